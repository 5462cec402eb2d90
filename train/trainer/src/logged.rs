//! The metrics that a program adds to logged steps.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use kiln_config::Config;
use kiln_shard::Engine;
use serde::Serialize;

use crate::metrics::{EvalMetrics, SkipMetrics, StepMetrics};
use crate::values::Values;

/// A logged step, passed to each custom metric.
pub struct LoggedStep<'a> {
    /// Built-in metrics of the step. Times are those of this rank; other values are the same on every rank.
    pub metrics: &'a StepMetrics,
    /// The engine, with the weights after the step; see, for example, [`Engine::weight_norms`].
    pub engine: &'a Engine,
    /// Configuration of the run, with all defaults resolved.
    pub config: &'a Config,
}

/// The value of a metric, or any error.
pub type MetricResult = Result<f64, Box<dyn Error + Send + Sync>>;

/// A metric that could not be computed.
#[derive(Debug, thiserror::Error)]
#[error("metric `{name}`: {source}")]
pub struct MetricError {
    /// Name of the metric.
    pub name: String,
    /// The reason.
    pub source: Box<dyn Error + Send + Sync>,
}

type Metric = Arc<dyn Fn(&LoggedStep<'_>) -> MetricResult + Send + Sync>;

/// The metrics that a program adds.
#[derive(Clone, Default)]
pub struct Metrics(Vec<(String, Metric)>);

impl Metrics {
    /// Adds a metric; see [`Registry::metric`](crate::registry::Registry::metric).
    ///
    /// # Panics
    ///
    /// If the name is empty, contains a dot, or is taken.
    pub fn metric(
        mut self,
        name: &str,
        value: impl Fn(&LoggedStep<'_>) -> MetricResult + Send + Sync + 'static,
    ) -> Self {
        check_name(name);
        let taken = self.0.iter().any(|(known, _)| known == name);
        assert!(!taken, "metric `{name}`: `metrics.jsonl` has a key of this name");
        self.0.push((name.to_owned(), Arc::new(value)));
        self
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Computes the values of a step. All ranks call this, in the order of the steps.
    pub fn of(&self, step: &LoggedStep<'_>) -> Result<Values, MetricError> {
        let mut values = Values::default();
        for (name, value) in &self.0 {
            let value = value(step).map_err(|source| MetricError { name: name.clone(), source })?;
            values.set(name.as_str(), value);
        }
        Ok(values)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

/// Panics if a program's own value cannot have `name`.
pub(crate) fn check_name(name: &str) {
    assert!(!name.is_empty(), "a metric needs a name");
    assert!(!name.contains('.'), "metric `{name}`: names with a dot are those of layers");
    assert!(!is_built_in(name), "metric `{name}`: `metrics.jsonl` has a key of this name");
}

fn is_built_in(name: &str) -> bool {
    fn has(line: impl Serialize, name: &str) -> bool {
        serde_json::to_value(line).is_ok_and(|line| line.get(name).is_some())
    }
    ["cross_entropy", "time"].contains(&name)
        || has(StepMetrics::default(), name)
        || has(SkipMetrics::default(), name)
        || has(
            EvalMetrics { val_objective: Some(0.0), answer_loss: Some(0.0), ..EvalMetrics::default() },
            name,
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "metric `val_loss`: `metrics.jsonl` has a key of this name")]
    fn a_metric_cannot_have_the_name_of_a_built_in_one() {
        let _ = Metrics::default().metric("mine", |_| Ok(0.0)).metric("val_loss", |_| Ok(0.0));
    }

    #[test]
    fn every_key_of_a_line_is_built_in() {
        for key in ["step", "loss", "cross_entropy", "skipped", "val_loss", "answer_loss", "time"] {
            assert!(is_built_in(key), "{key}");
        }
        assert!(!is_built_in("mine"));
    }

    #[test]
    #[should_panic(expected = "metric `layers.0.mine`: names with a dot")]
    fn a_metric_cannot_have_the_name_of_a_record() {
        let _ = Metrics::default().metric("layers.0.mine", |_| Ok(0.0));
    }
}
