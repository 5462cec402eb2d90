//! The operations that a burn backend needs so that its tensors can be views of flat buffers.

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
/// A placeholder without values, for builds without GPU support.
#[cfg(not(feature = "cube"))]
pub(crate) type DeviceScalar = std::convert::Infallible;

/// A backend whose tensors can be views of flat buffers.
pub(crate) trait FlatTensors: Backend {
    /// Returns a parameter: a view of `shape` at element `offset` of `weights`, on the device of `like`.
    fn view(
        weights: &FlatWeights,
        like: &FloatTensor<Self>,
        shape: &[usize],
        offset: usize,
        dtype: DType,
    ) -> FloatTensor<Self>;

    /// Returns one element on the device of `like`, whose value is never read.
    fn token(like: &FloatTensor<Self>) -> FloatTensor<Self>;

    /// Adds a gradient to elements `range` of `target` (f32), or overwrites them with it. The error says what is
    /// wrong with the gradient.
    fn add_gradient(
        target: &mut Buffer,
        range: Range<usize>,
        gradient: FloatTensor<Self>,
        replace: bool,
    ) -> Result<(), String>;

    /// Adds `loss` `[1]` to `sum`.
    fn add_loss(loss: &FloatTensor<Self>, sum: &mut LossSum) -> Result<(), String>;

    /// Starts to read `values` (f32). The error says what is wrong with the values.
    fn start_reading(values: &FloatTensor<Self>) -> Result<PendingValues, String>;

    /// Multiplies `gradient` `[1]` by `scale`.
    fn scaled(gradient: FloatTensor<Self>, scale: &DeviceScalar) -> FloatTensor<Self>;
}

/// The sum of the losses of a step: in f64 on the host, or in f32 in a GPU's memory.
#[derive(Default)]
pub(crate) struct LossSum {
    pub(crate) host: f64,
    #[cfg(feature = "cube")]
    pub(crate) device: Option<Buffer>,
}

impl LossSum {
    /// Returns the sum. Waits for the GPU if the sum is in its memory.
    pub(crate) fn read(&self) -> Result<f64, BufferError> {
        #[cfg(feature = "cube")]
        if let Some(sum) = &self.device {
            return Ok(self.host + f64::from(sum.to_host()?.as_slice::<f32>()?[0]));
        }
        Ok(self.host)
    }
}

/// Returns burn's equivalent of `dtype`.
pub(super) fn burn_dtype(dtype: DType) -> BurnDType {
    match dtype {
        DType::F64 => BurnDType::F64,
        DType::F32 => BurnDType::F32,
        DType::F16 => BurnDType::F16,
        DType::BF16 => BurnDType::BF16,
        DType::U8 => BurnDType::U8,
    }
}
