//! Starts reading a tensor, whatever its backend.

use std::sync::{Arc, Mutex};

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::node::Tracked;
use crate::buffers::{FlatTensors, PendingValues};
use crate::sync::lock;

/// Receives the started read, or an error that says what is wrong with the tensor.
#[derive(Clone, Default)]
pub(crate) struct Started(Arc<Mutex<Option<Result<PendingValues, String>>>>);

impl std::fmt::Debug for Started {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Started")
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait ReadOps: Backend {
    /// Starts to read `values`, and returns them.
    fn start_reading(values: FloatTensor<Self>, started: Started) -> FloatTensor<Self>;
}

/// Starts to read `values` (f32).
pub(crate) fn start_reading(values: Tensor<1>) -> Result<PendingValues, String> {
    let started = Started::default();
    drop(Dispatch::start_reading(values.into_dispatch(), started.clone()));
    let started = lock(&started.0).take();
    started.unwrap_or_else(|| Err("is on no device that can be read".to_owned()))
}

impl<B: FlatTensors> ReadOps for B {
    fn start_reading(values: FloatTensor<B>, started: Started) -> FloatTensor<B> {
        *lock(&started.0) = Some(<B as FlatTensors>::start_reading(&values));
        values
    }
}

impl<B: FlatTensors, C: CheckpointStrategy> ReadOps for Autodiff<B, C> {
    fn start_reading(values: Tracked<B, C>, started: Started) -> Tracked<B, C> {
        *lock(&started.0) = Some(<B as FlatTensors>::start_reading(values.primitive()));
        values
    }
}
