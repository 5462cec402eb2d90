//! Tensor values that are being copied to the host.

use kiln_collectives::BufferError;

#[cfg(feature = "cube")]
use super::readback::Readback;

/// Requested values of a tensor. On a GPU, the copy runs after the work that was queued earlier, without blocking the
/// host.
pub struct PendingValues(State);

enum State {
    Known(Vec<f32>),
    #[cfg(feature = "cube")]
    OnDevice(Readback),
}

impl PendingValues {
    pub(crate) fn known(values: Vec<f32>) -> Self {
        PendingValues(State::Known(values))
    }

    #[cfg(feature = "cube")]
    pub(crate) fn on_device(readback: Readback) -> Self {
        PendingValues(State::OnDevice(readback))
    }

    /// Waits for the values and returns them.
    ///
    /// # Errors
    ///
    /// If the GPU has failed.
    pub fn wait(self) -> Result<Vec<f32>, BufferError> {
        match self.0 {
            State::Known(values) => Ok(values),
            #[cfg(feature = "cube")]
            State::OnDevice(readback) => Ok(readback.wait()?.as_slice::<f32>()?.to_vec()),
        }
    }
}
