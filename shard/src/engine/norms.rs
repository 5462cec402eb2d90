//! Norms of gradients and weights, and non-blocking reads of tensors.

use burn::tensor::Tensor;
use kiln_collectives::Buffer;

use super::core::Engine;
use crate::buffers::host::sum_of_squares;
use crate::buffers::{PendingValues, on_host};
use crate::error::ShardError;
use crate::tape::start_reading;

impl Engine {
    /// Returns the name and 2-norm of the gradient of every trainable parameter before clipping, in layout order. The
    /// norms are computed from the shards, without changing them. Must be called between the backward of the last
    /// micro-batch and [`Engine::update`]; at other times there is no gradient, and all norms are 0. Strategies
    /// differ only by the rounding of sums in f64. Waits for a GPU. Collective.
    ///
    /// # Errors
    ///
    /// If the connection between ranks is lost, or a GPU fails.
    pub fn grad_norms(&self) -> Result<Vec<(String, f64)>, ShardError> {
        let scale = self.gradient_scale()?;
        let norms = self.norms("grad_norms", true)?;
        Ok(norms.into_iter().map(|(name, norm)| (name, norm / scale)).collect())
    }

    /// Returns the name and 2-norm of every parameter in layout order, like [`Engine::grad_norms`]. May be called at
    /// any time between two steps. Collective.
    ///
    /// # Errors
    ///
    /// As for [`Engine::grad_norms`].
    pub fn weight_norms(&self) -> Result<Vec<(String, f64)>, ShardError> {
        self.norms("weight_norms", false)
    }

    /// Starts to read `values` `[n]` (f32) from the device that this rank computes on. Does not wait for a GPU;
    /// [`PendingValues::wait`] does.
    ///
    /// # Errors
    ///
    /// If `values` are not f32.
    pub fn read_later(&self, values: Tensor<1>) -> Result<PendingValues, ShardError> {
        start_reading(values).map_err(|reason| ShardError::Unreadable { reason })
    }

    fn norms(&self, label: &str, of_gradient: bool) -> Result<Vec<(String, f64)>, ShardError> {
        self.context.check()?;
        let (mut names, mut squares) = (Vec::new(), Vec::new());
        for group in self.groups.iter().filter(|group| !of_gradient || group.layout.trainable) {
            let state = group.state();
            let values: Option<&Buffer> = if of_gradient { state.reduced() } else { Some(&state.master) };
            let values = values.map(on_host).transpose()?;
            let shard = self.shard_of(group);
            for parameter in &group.layout.parameters {
                let (held, _) = parameter.held_by(&shard);
                names.push(parameter.name.clone());
                squares.push(match &values {
                    Some(values) => sum_of_squares(&values.as_slice::<f32>()?[held]),
                    None => 0.0,
                });
            }
        }
        let squares = self.sum_over_shards(label, &squares)?;
        Ok(names.into_iter().zip(squares.into_iter().map(f64::sqrt)).collect())
    }

    /// Returns the factor by which the loss, and therefore every gradient, is scaled.
    pub(super) fn gradient_scale(&self) -> Result<f64, ShardError> {
        #[cfg(feature = "cube")]
        if let (Some(scale), crate::buffers::Placement::Device(client)) =
            (self.loss_scale(), self.context.state_placement())
        {
            let read = crate::buffers::Readback::start(client, scale, kiln_collectives::DType::F32, 1);
            return Ok(f64::from(read.wait()?.as_slice::<f32>()?[0]));
        }
        Ok(1.0)
    }
}
