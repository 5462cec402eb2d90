//! Flat buffers, wherever they are: made, cast, read and written, and seen as tensors.
//!
//! Everything else in this crate handles [`Buffer`]s without asking where they are. What touches
//! their elements is here: in [`host`] for memory of the host, in [`cube`] for that of a GPU.

#[cfg(feature = "cube")]
mod cube;
mod host;
#[cfg(feature = "cube")]
mod kernels;
mod placement;
#[cfg(feature = "cube")]
mod reading;
#[cfg(feature = "cube")]
mod step;
#[cfg(feature = "cube")]
mod step_kernels;
mod weights;

use std::borrow::Cow;
use std::ops::Range;

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType as BurnDType;
use kiln_collectives::{Buffer, BufferError, DType};

pub(crate) use host::copy_values;
pub(crate) use placement::Placement;
#[cfg(feature = "cube")]
pub(crate) use reading::Reading;
#[cfg(feature = "cube")]
pub(crate) use step::{Decision, DeviceStep, Settings, Sums};
pub(crate) use weights::FlatWeights;

use crate::optimizer::Factors;
use crate::runtime::Runtime;
use crate::update::LossSum;

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

    /// Adds a gradient to elements `range` of `target` (f32), or replaces them. Returns what is wrong
    /// with the gradient otherwise.
    fn add_gradient(
        target: &mut Buffer,
        range: Range<usize>,
        gradient: FloatTensor<Self>,
        replace: bool,
    ) -> Result<(), String>;

    /// Adds `loss` `[1]` to `sum`.
    fn add_loss(loss: &FloatTensor<Self>, sum: &mut LossSum) -> Result<(), String>;

    /// `gradient` `[1]` times the scale of the loss.
    fn scaled(gradient: FloatTensor<Self>, runtime: &Runtime) -> FloatTensor<Self>;
}

/// The dtype's name in burn.
fn burn_dtype(dtype: DType) -> BurnDType {
    match dtype {
        DType::F64 => BurnDType::F64,
        DType::F32 => BurnDType::F32,
        DType::F16 => BurnDType::F16,
        DType::BF16 => BurnDType::BF16,
        DType::U8 => BurnDType::U8,
    }
}

/// `source` (f32) written as the dtype of `target`; both have the same length and place.
pub(crate) fn cast_from_f32(source: &Buffer, target: &mut Buffer) -> Result<(), BufferError> {
    match source.is_on_host() {
        #[cfg(feature = "cube")]
        false => cube::cast(source, target),
        _ => host::cast_from_f32(source, target),
    }
}

/// A copy of `source` in `dtype`.
pub(crate) fn cast_to(source: &Buffer, dtype: DType) -> Result<Buffer, BufferError> {
    let mut target = Placement::of_buffer(source).empty(dtype, source.len());
    cast_from_f32(source, &mut target)?;
    Ok(target)
}

/// `source` as f32; moved, not copied, when it is f32 already.
pub(crate) fn into_f32(source: Buffer) -> Result<Buffer, BufferError> {
    if source.dtype() == DType::F32 {
        return Ok(source);
    }
    let mut target = Placement::of_buffer(&source).empty(DType::F32, source.len());
    match source.is_on_host() {
        #[cfg(feature = "cube")]
        false => cube::cast(&source, &mut target)?,
        _ => host::cast_to_f32(&source, &mut target)?,
    }
    Ok(target)
}

/// Sets elements `ranges` of `buffer` (f32) to zero.
pub(crate) fn clear(
    buffer: &mut Buffer,
    ranges: impl IntoIterator<Item = Range<usize>>,
) -> Result<(), BufferError> {
    for range in ranges {
        match buffer.is_on_host() {
            #[cfg(feature = "cube")]
            false => cube::clear(buffer, range)?,
            _ => buffer.as_mut_slice::<f32>()?[range].fill(0.0),
        }
    }
    Ok(())
}

/// `buffer` where the host can read it; copied only if it is on a GPU.
pub(crate) fn on_host(buffer: &Buffer) -> Result<Cow<'_, Buffer>, BufferError> {
    match buffer.is_on_host() {
        #[cfg(feature = "cube")]
        false => Ok(Cow::Owned(buffer.to_host()?)),
        _ => Ok(Cow::Borrowed(buffer)),
    }
}

/// Elements `range` of `buffer` (f32), copied to the host.
pub(crate) fn range_to_host(buffer: &Buffer, range: Range<usize>) -> Result<Buffer, BufferError> {
    match buffer.is_on_host() {
        #[cfg(feature = "cube")]
        false => buffer.range_to_host(range),
        _ => Ok(Buffer::from_slice(&buffer.as_slice::<f32>()?[range])),
    }
}

/// `buffer` moved to the host.
pub(crate) fn into_host(buffer: Buffer) -> Result<Buffer, BufferError> {
    match buffer.is_on_host() {
        #[cfg(feature = "cube")]
        false => buffer.to_host(),
        _ => Ok(buffer),
    }
}

/// A copy of `buffer` (f32), in the same place.
pub(crate) fn copy(buffer: &Buffer) -> Result<Buffer, BufferError> {
    match buffer.is_on_host() {
        #[cfg(feature = "cube")]
        false => Ok(buffer.clone()),
        _ => host::copy(buffer),
    }
}

/// Lets `fill` write elements `range` of `buffer` (f32). It must write all of them.
pub(crate) fn write<E: From<BufferError>>(
    buffer: &mut Buffer,
    range: Range<usize>,
    fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    match buffer.is_on_host() {
        #[cfg(feature = "cube")]
        false => {
            let mut values = vec![0.0; range.len()];
            fill(&mut values)?;
            Ok(cube::write(buffer, range.start, &values)?)
        }
        _ => fill(&mut buffer.as_mut_slice::<f32>()?[range]),
    }
}

/// The sum of squares of every piece of `gradient` (f32, on the host), `piece` elements each. The order
/// of sums depends on the lengths alone.
pub(crate) fn sums_of_squares(gradient: &Buffer, piece: usize) -> Result<Vec<f64>, BufferError> {
    let pieces = gradient.as_slice::<f32>()?.chunks(piece);
    Ok(pieces.map(host::sum_of_squares).collect())
}

/// One AdamW step of elements `range` of a shard on the host; every element is read and written once.
/// `keep` is what weight decay leaves of a weight. On a GPU, [`DeviceStep`] does it.
pub(crate) fn update(
    [weights, first, second]: [&mut Buffer; 3],
    gradient: &Buffer,
    range: Range<usize>,
    factors: Factors,
    keep: f32,
) -> Result<(), BufferError> {
    host::update(
        &mut weights.as_mut_slice::<f32>()?[range.clone()],
        &gradient.as_slice::<f32>()?[range.clone()],
        &mut first.as_mut_slice::<f32>()?[range.clone()],
        &mut second.as_mut_slice::<f32>()?[range],
        factors,
        keep,
    )
}
