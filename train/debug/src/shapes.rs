use kiln_model::ops::Seen;
use kiln_shard::Engine;

use kiln_train::error::Result;
use kiln_train::run::{Moment, Observer};

/// Logs the shapes at the edges of every layer at level `debug`, in the first step: later shapes are the same.
#[derive(Debug, Default)]
pub(super) struct ShapeLog {
    first: Option<u64>,
}

impl Observer for ShapeLog {
    fn is_observing(&self, _step: u64) -> bool {
        false
    }

    fn is_observing_passes(&self, step: u64) -> bool {
        self.first.is_none_or(|first| first == step) && tracing::enabled!(tracing::Level::DEBUG)
    }

    fn on_tensor(&mut self, _engine: &Engine, at: Moment, seen: &Seen<'_>) -> Result<()> {
        self.first = Some(at.step);
        let Seen { place, name, ref shape, is_gradient, .. } = *seen;
        if at.micro_batch == 0 {
            tracing::debug!(place, name, ?shape, is_gradient, "a tensor");
        }
        Ok(())
    }
}
