//! A run in a few numbers.

use std::cmp::Ordering;

use crate::run::{Run, Series};
use crate::status::Look;

/// Logged steps that the remaining time is estimated from.
const PACE: usize = 50;

/// Logged steps on each side of a trend.
const TREND: usize = 10;

/// Keys without curves: the axis itself, and the time of day.
const NO_CURVES: [&str; 2] = ["step", "time"];

/// A run in a few numbers. `None` is unknown.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Summary {
    pub step: Option<u64>,
    pub steps: Option<u64>,
    pub loss: Option<f64>,
    /// The direction of the loss.
    pub trend: Option<Ordering>,
    pub val_loss: Option<f64>,
    pub tokens_per_s: Option<f64>,
    pub mfu: Option<f64>,
    pub tflops: Option<f64>,
    pub peak_bytes: Option<f64>,
    /// Seconds until the last step.
    pub left_s: Option<f64>,
    /// The keys of its metrics.
    pub keys: Vec<String>,
    /// First and last step of any metric.
    pub extent: Option<(u64, u64)>,
}

impl Summary {
    /// Summarizes the files of a run and a look at its processes.
    pub(super) fn new(run: &Run, look: Option<&Look>) -> Summary {
        let metrics = run.metrics();
        let last = |key: &str| metrics.get(key).and_then(Series::last).map(|(_, value)| value);
        let first_step = metrics.iter().filter_map(|(_, series)| series.steps().first().copied()).min();
        let step = look.and_then(|look| look.step).max(metrics.last_step());
        let steps = look.and_then(|look| look.steps).or(run.steps());
        let is_running = look.is_some_and(|look| !look.state.is_over() && !look.state.is_bad());
        let left = step.zip(steps).filter(|_| is_running).map(|(step, steps)| steps.saturating_sub(step));
        // The times of lines include evaluations and saves; the times of steps do not.
        let by_time = metrics.get("time").and_then(|times| times.growth(PACE)).filter(|pace| *pace > 0.0);
        let pace = by_time.or_else(|| metrics.get("step_s").and_then(median));
        let keys = metrics.iter().map(|(key, _)| key).filter(|key| !NO_CURVES.contains(key));
        Summary {
            step,
            steps,
            loss: look.and_then(|look| look.loss).or(last("loss")),
            trend: metrics.get("loss").and_then(trend),
            val_loss: last("val_loss"),
            tokens_per_s: look.and_then(|look| look.tokens_per_s).or(last("tokens_per_s")),
            mfu: last("mfu"),
            tflops: last("tflops"),
            peak_bytes: last("peak_bytes"),
            left_s: left.zip(pace).map(|(left, pace)| left as f64 * pace),
            keys: keys.map(str::to_owned).collect(),
            extent: first_step.zip(metrics.last_step()),
        }
    }

    /// The share of steps that are done.
    pub(super) fn share(&self) -> Option<f64> {
        let (step, steps) = self.step.zip(self.steps)?;
        (steps > 0).then(|| (step as f64 / steps as f64).min(1.0))
    }
}

/// The median of the last [`PACE`] values.
fn median(series: &Series) -> Option<f64> {
    let mut late: Vec<f64> = series.values().iter().rev().take(PACE).copied().collect();
    late.sort_by(f64::total_cmp);
    late.get(late.len() / 2).copied().filter(|value| value.is_finite())
}

/// Compares the last values with those before them: equal if they differ by less than their scatter, `None` if there
/// are too few.
fn trend(loss: &Series) -> Option<Ordering> {
    let late: Vec<f64> = loss.values().iter().rev().take(2 * TREND).copied().collect();
    if late.len() < 4 || late.iter().any(|value| !value.is_finite()) {
        return None;
    }
    let (new, old) = late.split_at(late.len() / 2);
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let variance = |values: &[f64]| {
        let centre = mean(values);
        values.iter().map(|value| (value - centre).powi(2)).sum::<f64>() / values.len() as f64
    };
    // The standard error of a difference of two means.
    let error = ((variance(new) + variance(old)) / new.len() as f64).sqrt();
    let change = mean(new) - mean(old);
    if change.abs() <= error { Some(Ordering::Equal) } else { change.partial_cmp(&0.0) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn summary_reads_files_and_look() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.toml"), "[train]\nsteps = 100\n").unwrap();
        let line = |step: u64| {
            let time = 1000.0 + step as f64 * 0.5;
            format!(
                "{{\"step\":{step},\"loss\":{},\"step_s\":0.25,\"time\":{time}}}\n",
                5.0 - step as f64 * 0.1
            )
        };
        let lines: String = (1..=30).map(line).collect();
        fs::write(folder.path().join("metrics.jsonl"), format!("{lines}{{\"step\":30,\"val_loss\":2.5}}\n"))
            .unwrap();
        let run = Run::open(folder.path()).unwrap();
        let summary = Summary::new(&run, None);
        assert_eq!((summary.step, summary.steps, summary.share()), (Some(30), Some(100), Some(0.3)));
        assert_eq!(
            (summary.loss, summary.val_loss, summary.trend),
            (Some(2.0), Some(2.5), Some(Ordering::Less))
        );
        assert_eq!(
            (summary.keys, summary.extent),
            (vec!["loss".into(), "step_s".into(), "val_loss".into()], Some((1, 30)))
        );
        // Nobody says that it goes on.
        assert_eq!(summary.left_s, None);
        assert_eq!(Summary::default().share(), None);
    }
}
