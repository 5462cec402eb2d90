//! Flat buffers in the host's memory, and burn's CPU backend.

use std::ops::Range;

use burn::backend::Flex;
use burn::tensor::{DType as BurnDType, Shape};
use burn_flex::{FlexTensor, Layout};
use half::{bf16, f16};
use kiln_collectives::{Buffer, BufferError, DType};
use rayon::prelude::*;

use super::pending::PendingValues;
use super::tensors::{DeviceScalar, FlatTensors, LossSum, burn_dtype};
use super::weights::FlatWeights;

/// Number of elements that one task casts at a time.
const CAST_TASK: usize = 1 << 16;

/// Number of elements that one task updates or sums at a time. Fixed, so that sums have the same bits for any number
/// of threads.
pub(crate) const TASK: usize = 1 << 14;

/// Number of independent sums of squares within a chunk: enough for the widest vector registers. Fixed, so that sums
/// have the same bits on every processor.
const LANES: usize = 16;

impl FlatTensors for Flex {
    fn view(
        weights: &FlatWeights,
        _like: &FlexTensor,
        shape: &[usize],
        offset: usize,
        dtype: DType,
    ) -> FlexTensor {
        let Some(bytes) = weights.host() else {
            unreachable!("invariant: a rank's tensors and buffers are in the same memory");
        };
        let shape = Shape::from(shape.to_vec());
        let strides = Layout::contiguous(shape.clone()).strides().to_vec();
        let layout = Layout::new(shape, strides, offset);
        FlexTensor::from_arc(bytes.clone(), layout, burn_dtype(dtype))
    }

    fn token(_like: &FlexTensor) -> FlexTensor {
        FlexTensor::zeros(Shape::new([1]), BurnDType::F32)
    }

    fn add_gradient(
        target: &mut Buffer,
        range: Range<usize>,
        gradient: FlexTensor,
        replace: bool,
    ) -> Result<(), String> {
        let target = target.as_mut_slice::<f32>().map_err(|error| error.to_string())?;
        add_gradient(&mut target[range], gradient, replace)
    }

    fn add_loss(loss: &FlexTensor, sum: &mut LossSum) -> Result<(), String> {
        let mut value = [0.0];
        add_gradient(&mut value, loss.clone(), true)?;
        sum.host += f64::from(value[0]);
        Ok(())
    }

    fn start_reading(values: &FlexTensor) -> Result<PendingValues, String> {
        let mut read = vec![0.0; values.layout().num_elements()];
        add_gradient(&mut read, values.clone(), true)?;
        Ok(PendingValues::known(read))
    }

    fn scaled(gradient: FlexTensor, _scale: &DeviceScalar) -> FlexTensor {
        // The host does not compute in f16, so no loss is scaled there.
        gradient
    }
}

/// Writes `source` (f32) to `target`, converted to the dtype of `target`; both have the same length.
pub(super) fn cast_from_f32(source: &Buffer, target: &mut Buffer) -> Result<(), BufferError> {
    let source = source.as_slice::<f32>()?;
    match target.dtype() {
        DType::BF16 => cast(source, target.as_mut_slice()?, |x| bf16::from_f32(*x)),
        DType::F16 => cast(source, target.as_mut_slice()?, |x| f16::from_f32(*x)),
        _ => target.as_mut_slice::<f32>()?.copy_from_slice(source),
    }
    Ok(())
}

/// Writes `source`, of 16 or 64 bits per element, to `target` (f32).
pub(super) fn cast_to_f32(source: &Buffer, target: &mut Buffer) -> Result<(), BufferError> {
    let out = target.as_mut_slice::<f32>()?;
    match source.dtype() {
        DType::BF16 => cast(source.as_slice()?, out, |x: &bf16| x.to_f32()),
        DType::F16 => cast(source.as_slice()?, out, |x: &f16| x.to_f32()),
        _ => cast(source.as_slice()?, out, |x: &f64| *x as f32),
    }
    Ok(())
}

/// Adds `source` (f32 or bf16) to `target` (f32); both have the same length.
pub(super) fn add(target: &mut Buffer, source: &Buffer) -> Result<(), BufferError> {
    let target = target.as_mut_slice::<f32>()?;
    match source.dtype() {
        DType::BF16 => change(source.as_slice()?, target, |sum, x: &bf16| *sum += x.to_f32()),
        _ => change(source.as_slice()?, target, |sum, x: &f32| *sum += x),
    }
    Ok(())
}

/// Returns a copy of `buffer` (f32).
pub(super) fn copy(buffer: &Buffer) -> Result<Buffer, BufferError> {
    let source = buffer.as_slice::<f32>()?;
    let mut copy = Buffer::zeros(DType::F32, source.len());
    cast(source, copy.as_mut_slice::<f32>()?, |x| *x);
    Ok(copy)
}

/// Copies values on several threads. If `target` has never been touched, its page faults are spread over the threads.
pub(crate) fn copy_values(source: &[f32], target: &mut [f32]) {
    let chunks = target.par_chunks_mut(TASK).zip(source.par_chunks(TASK));
    chunks.for_each(|(target, source)| target.copy_from_slice(source));
}

fn cast<A: Sync, B: Send>(source: &[A], target: &mut [B], convert: impl Fn(&A) -> B + Sync) {
    change(source, target, |target, source| *target = convert(source));
}

/// Calls `change` on each element of `target` and the corresponding element of `source`, on several threads.
fn change<A: Sync, B: Send>(source: &[A], target: &mut [B], change: impl Fn(&mut B, &A) + Sync) {
    let arch = pulp::Arch::new();
    target.par_chunks_mut(CAST_TASK).zip(source.par_chunks(CAST_TASK)).for_each(|(target, source)| {
        arch.dispatch(
            #[inline(always)]
            || {
                for (target, source) in target.iter_mut().zip(source) {
                    change(target, source);
                }
            },
        );
    });
}

fn add_gradient(target: &mut [f32], gradient: FlexTensor, replace: bool) -> Result<(), String> {
    let gradient = if gradient.is_contiguous() { gradient } else { gradient.to_contiguous() };
    let found = gradient.layout().num_elements();
    if found != target.len() {
        return Err(format!("has {found} elements, expected {}", target.len()));
    }
    match gradient.dtype() {
        BurnDType::F32 => accumulate(target, gradient.as_slice::<f32>(), replace, |x| *x),
        BurnDType::BF16 => accumulate(target, gradient.as_slice::<bf16>(), replace, |x| x.to_f32()),
        BurnDType::F16 => accumulate(target, gradient.as_slice::<f16>(), replace, |x| x.to_f32()),
        other => Err(format!("has dtype {other:?}, expected a float of 32 or 16 bits")),
    }
}

fn accumulate<T: Sync>(
    target: &mut [f32],
    gradient: Option<&[T]>,
    replace: bool,
    convert: impl Fn(&T) -> f32 + Sync,
) -> Result<(), String> {
    let gradient = gradient.ok_or("is not contiguous")?;
    match replace {
        true => cast(gradient, target, convert),
        false => change(gradient, target, |target, gradient| *target += convert(gradient)),
    }
    Ok(())
}

/// Returns the sum of squares in f64, with the same bits for any number of threads.
pub(crate) fn sum_of_squares(values: &[f32]) -> f64 {
    let arch = pulp::Arch::new();
    let sums: Vec<f64> = values.par_chunks(TASK).map(|chunk| arch.dispatch(SquaresOf(chunk))).collect();
    sums.iter().sum()
}

/// A struct instead of a closure: the compiler may not inline a long function that calls a closure, and would then
/// compile it without this processor's vector instructions.
struct SquaresOf<'a>(&'a [f32]);

impl pulp::NullaryFnOnce for SquaresOf<'_> {
    type Output = f64;

    #[inline(always)]
    fn call(self) -> f64 {
        sum_of_squares_chunk(self.0)
    }
}

#[inline(always)]
fn sum_of_squares_chunk(values: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let chunks = values.chunks_exact(LANES);
    for (lane, value) in chunks.remainder().iter().enumerate() {
        lanes[lane] = f64::from(*value) * f64::from(*value);
    }
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    lanes.iter().sum()
}
