//! Histograms of weights and gradients, by module, without gathering them.

use kiln_collectives::Buffer;

use super::core::Engine;
use crate::buffers::{ValueHistogram, on_host};
use crate::error::ShardError;

/// Number of values that a histogram has in addition to its counts: two sums.
const SUMS: usize = 2;

impl Engine {
    /// Returns histograms of the gradient before clipping, by the name of the parameter group, such as `layers.3`.
    /// They are computed from the shards, without changing them. May only be called when [`Engine::grad_norms`] may;
    /// at other times the result is empty. Waits for a GPU. Collective.
    ///
    /// # Errors
    ///
    /// If the connection between ranks is lost, or a GPU fails.
    pub fn grad_histograms(&self) -> Result<Vec<(String, ValueHistogram)>, ShardError> {
        let scale = self.gradient_scale()?;
        self.histograms("grad_histograms", true, (1.0 / scale) as f32)
    }

    /// Returns histograms of the weights, by the name of the parameter group, like
    /// [`Engine::grad_histograms`]. May be called at any time between two steps. Collective.
    ///
    /// # Errors
    ///
    /// As for [`Engine::grad_histograms`].
    pub fn weight_histograms(&self) -> Result<Vec<(String, ValueHistogram)>, ShardError> {
        self.histograms("weight_histograms", false, 1.0)
    }

    fn histograms(
        &self,
        label: &str,
        of_gradient: bool,
        factor: f32,
    ) -> Result<Vec<(String, ValueHistogram)>, ShardError> {
        self.context.check()?;
        // A module that is only partly trained has two groups.
        let mut found: Vec<(String, ValueHistogram)> = Vec::new();
        for group in self.groups.iter().filter(|group| !of_gradient || group.layout.trainable) {
            let name = &group.layout.name;
            if found.last().is_none_or(|(known, _)| known != name) {
                found.push((name.clone(), ValueHistogram::default()));
            }
            let state = group.state();
            let values: Option<&Buffer> = if of_gradient { state.reduced() } else { Some(&state.master) };
            let Some(values) = values.map(on_host).transpose()? else { continue };
            let (values, shard) = (values.as_slice::<f32>()?, self.shard_of(group));
            let Some((_, of_module)) = found.last_mut() else { continue };
            for parameter in &group.layout.parameters {
                // Skips the gaps between parameters.
                let (held, _) = parameter.held_by(&shard);
                of_module.add(&ValueHistogram::of(&values[held], factor));
            }
        }
        self.add_shards(label, &mut found)?;
        found.retain(|(_, histogram)| histogram.min <= histogram.max);
        Ok(found)
    }

    /// Sums the ranks' histograms into one for the whole model.
    fn add_shards(&self, label: &str, found: &mut [(String, ValueHistogram)]) -> Result<(), ShardError> {
        let (ranks, own) = (self.mesh().shard_size(), self.mesh().shard_index(self.context.rank));
        let mut message = Vec::new();
        for (_, ValueHistogram { min, max, sum, sum_squares, counts }) in found.iter() {
            message.extend([*sum, *sum_squares]);
            message.extend_from_slice(counts);
            // Only sums are available, so each rank writes to its own element, and zeros to those of other ranks.
            for value in [min, max] {
                message.extend((0..ranks).map(|rank| if rank == own { *value } else { 0.0 }));
            }
        }
        let sums = self.sum_over_shards(label, &message)?;
        let mut rest = &sums[..];
        for (_, histogram) in found {
            let numbers = SUMS + histogram.counts.len();
            let Some((values, others)) = rest.split_at_checked(numbers + 2 * ranks) else { break };
            let (counted, ends) = values.split_at(numbers);
            (histogram.sum, histogram.sum_squares) = (counted[0], counted[1]);
            histogram.counts.copy_from_slice(&counted[SUMS..]);
            histogram.min = ends[..ranks].iter().copied().fold(f64::INFINITY, f64::min);
            histogram.max = ends[ranks..].iter().copied().fold(f64::NEG_INFINITY, f64::max);
            rest = others;
        }
        Ok(())
    }
}
