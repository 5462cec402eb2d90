//! What a burn backend must do for its tensors to be views of flat buffers.

use std::ops::Range;

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType as BurnDType;
use kiln_collectives::{Buffer, BufferError, DType};

use super::pending::PendingValues;
use super::weights::FlatWeights;

/// One f32 value in the memory of a GPU.
#[cfg(feature = "cube")]
pub(crate) type DeviceScalar = cubecl::server::Handle;
/// There is no GPU in this build.
#[cfg(not(feature = "cube"))]
pub(crate) type DeviceScalar = std::convert::Infallible;

/// A backend whose tensors can be views of flat buffers.
pub(crate) trait FlatTensors: Backend {
    /// A parameter: `shape` at element `offset` of `weights`, without a copy, on the device of `like`.
    fn view(
        weights: &FlatWeights,
        like: &FloatTensor<Self>,
        shape: &[usize],
        offset: usize,
        dtype: DType,
    ) -> FloatTensor<Self>;

    /// One element on the device of `like`; its value is never read.
    fn token(like: &FloatTensor<Self>) -> FloatTensor<Self>;

    /// Adds a gradient to elements `range` of `target` (f32), or replaces them. The error says what is
    /// wrong with the gradient.
    fn add_gradient(
        target: &mut Buffer,
        range: Range<usize>,
        gradient: FloatTensor<Self>,
        replace: bool,
    ) -> Result<(), String>;

    /// Adds `loss` `[1]` to `sum`.
    fn add_loss(loss: &FloatTensor<Self>, sum: &mut LossSum) -> Result<(), String>;

    /// Starts to read `values` (f32). The error says what is wrong with them.
    fn start_reading(values: &FloatTensor<Self>) -> Result<PendingValues, String>;

    /// `gradient` `[1]` times `scale`.
    fn scaled(gradient: FloatTensor<Self>, scale: &DeviceScalar) -> FloatTensor<Self>;
}

/// The losses of a step added up: on the host in f64, on a GPU in f32 in its own memory.
#[derive(Default)]
pub(crate) struct LossSum {
    pub(crate) host: f64,
    #[cfg(feature = "cube")]
    pub(crate) device: Option<Buffer>,
}

impl LossSum {
    /// The sum. Waits for the GPU if it is there.
    pub(crate) fn read(&self) -> Result<f64, BufferError> {
        #[cfg(feature = "cube")]
        if let Some(sum) = &self.device {
            return Ok(self.host + f64::from(sum.to_host()?.as_slice::<f32>()?[0]));
        }
        Ok(self.host)
    }
}

/// The dtype's name in burn.
pub(super) fn burn_dtype(dtype: DType) -> BurnDType {
    match dtype {
        DType::F64 => BurnDType::F64,
        DType::F32 => BurnDType::F32,
        DType::F16 => BurnDType::F16,
        DType::BF16 => BurnDType::BF16,
        DType::U8 => BurnDType::U8,
    }
}
