//! Search for the first tensor of a step that is not finite.

use std::sync::{Arc, Mutex, PoisonError};

use kiln_collectives::Phase;
use kiln_model::ops::Seen;
use kiln_shard::{Engine, TensorStatistics};
use serde::{Deserialize, Serialize};

use super::observe::{Moment, Observer, Pass};
use crate::error::{Result, TrainError};

/// Searches a step on one rank for the first tensor with a value that is not finite.
#[derive(Clone, Debug, Default)]
pub struct NonFiniteFinder(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    seen: u64,
    before: Option<String>,
    found: Option<Found>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Found {
    /// Position of the tensor among the tensors of the step, the same on all ranks.
    number: u64,
    text: String,
}

impl NonFiniteFinder {
    /// Describes the first tensor of any rank with a non-finite value. Collective.
    pub fn finish(&self, engine: &Engine) -> Result<String> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner).found.clone();
        let mine = serde_json::to_vec(&found).unwrap_or_default();
        let all = engine.all_gather_bytes(Phase::Other, "non_finite", &mine)?;
        let of_rank = |(rank, bytes): (usize, &Vec<u8>)| {
            let found: Option<Found> = serde_json::from_slice(bytes).ok()?;
            found.map(|found| (found.number, rank, found.text))
        };
        Ok(match all.iter().enumerate().filter_map(of_rank).min() {
            Some((_, rank, text)) => {
                format!("; the first tensor that is not finite is {text}, on rank {rank}")
            }
            None => "; all tensors are finite when the passes are repeated: the value came from a \
                     collective or corrupted memory"
                .to_owned(),
        })
    }
}

impl Observer for NonFiniteFinder {
    fn is_observing(&self, _step: u64) -> bool {
        true
    }

    fn on_tensor(&mut self, _engine: &Engine, at: Moment, seen: &Seen<'_>) -> Result<()> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.seen += 1;
        if state.found.is_some() {
            return Ok(());
        }
        let data = seen.values.clone().into_data().convert::<f32>();
        let values =
            data.as_slice::<f32>().map_err(|error| TrainError::Records { reason: format!("{error:?}") })?;
        let statistics = TensorStatistics::of(values);
        let pass = match at.pass {
            Pass::Forward => "forward",
            Pass::Recompute => "the recomputed forward",
            Pass::Backward => "backward",
        };
        let of = if seen.is_gradient { "the gradient of " } else { "" };
        let name = format!("{of}{} {} in {pass}", seen.place, seen.name);
        if statistics.nan + statistics.infinite == 0 {
            state.before = Some(format!("{name} ({:.3e} to {:.3e})", statistics.min, statistics.max));
            return Ok(());
        }
        let before = state.before.as_ref().map_or_else(String::new, |before| format!(", after {before}"));
        let others = match statistics.nan + statistics.infinite < values.len() {
            true => format!(", the others from {:.3e} to {:.3e}", statistics.min, statistics.max),
            false => String::new(),
        };
        let text = format!(
            "{name} of micro-batch {} {:?}: {} NaN and {} Inf of {} values{others}{before}",
            at.micro_batch,
            seen.shape,
            statistics.nan,
            statistics.infinite,
            values.len()
        );
        state.found = Some(Found { number: state.seen, text });
        Ok(())
    }
}
