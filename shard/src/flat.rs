//! Flat host buffers: as burn tensors, and cast between dtypes.

use std::sync::Arc;

use burn::tensor::{Bytes, DType as BurnDType, Shape};
use burn_flex::{FlexTensor, Layout};
use half::{bf16, f16};
use kiln_collectives::{Buffer, BufferError, DType};
use rayon::prelude::*;

use crate::runtime::{LiveUnit, Runtime};

/// Elements that one task casts at a time.
const CAST_CHUNK: usize = 1 << 16;

/// A unit's whole weights in memory. Parameter tensors are views into it.
pub(crate) type FlatWeights = Arc<Bytes>;

/// A gathered buffer; goes back to the pool when the last view is gone, if it is streamed: freed
/// and gathered again within a pass.
pub(crate) struct Gathered {
    buffer: Option<Buffer>,
    runtime: Arc<Runtime>,
    streamed: bool,
    _live: Option<LiveUnit>,
}

impl Gathered {
    pub(crate) fn into_weights(
        buffer: Buffer,
        runtime: &Arc<Runtime>,
        streamed: bool,
        live: Option<LiveUnit>,
    ) -> FlatWeights {
        weights(Gathered { buffer: Some(buffer), runtime: runtime.clone(), streamed, _live: live })
    }
}

impl AsRef<[u8]> for Gathered {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], Buffer::as_bytes)
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take()
            && self.streamed
        {
            self.runtime.pool.put(buffer);
        }
    }
}

/// A master shard that is the whole unit, read in place.
struct SharedMaster(Arc<Buffer>);

impl AsRef<[u8]> for SharedMaster {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// The master itself as weights: nothing is copied.
pub(crate) fn master_as_weights(master: Arc<Buffer>) -> FlatWeights {
    weights(SharedMaster(master))
}

fn weights(owner: impl AsRef<[u8]> + Send + 'static) -> FlatWeights {
    let bytes = bytes::Bytes::from_owner(owner);
    Arc::new(Bytes::from_shared(bytes, burn::tensor::AllocationProperty::Native))
}

/// A parameter: `shape` at element `offset` of `weights`, without a copy.
pub(crate) fn view(
    weights: FlatWeights,
    shape: &[usize],
    offset: usize,
    dtype: DType,
) -> FlexTensor {
    let shape = Shape::from(shape.to_vec());
    let strides = Layout::contiguous(shape.clone()).strides().to_vec();
    FlexTensor::from_arc(weights, Layout::new(shape, strides, offset), burn_dtype(dtype))
}

/// The dtype's name in burn.
pub(crate) fn burn_dtype(dtype: DType) -> BurnDType {
    match dtype {
        DType::F64 => BurnDType::F64,
        DType::F32 => BurnDType::F32,
        DType::F16 => BurnDType::F16,
        DType::BF16 => BurnDType::BF16,
        DType::U8 => BurnDType::U8,
    }
}

/// `source` (f32) written as the dtype of `target`; both have the same length.
pub(crate) fn cast_from_f32(source: &Buffer, target: &mut Buffer) -> Result<(), BufferError> {
    let source = source.as_slice::<f32>()?;
    match target.dtype() {
        DType::BF16 => cast(source, target.as_mut_slice()?, |x| bf16::from_f32(*x)),
        DType::F16 => cast(source, target.as_mut_slice()?, |x| f16::from_f32(*x)),
        _ => target.as_mut_slice::<f32>()?.copy_from_slice(source),
    }
    Ok(())
}

/// A copy of `source` in `dtype`.
pub(crate) fn cast_to(source: &Buffer, dtype: DType) -> Result<Buffer, BufferError> {
    let mut target = Buffer::zeros(dtype, source.len());
    cast_from_f32(source, &mut target)?;
    Ok(target)
}

/// `source` as f32; moved, not copied, when it is f32 already.
pub(crate) fn into_f32(source: Buffer) -> Result<Buffer, BufferError> {
    if source.dtype() == DType::F32 {
        return Ok(source);
    }
    let mut target = Buffer::zeros(DType::F32, source.len());
    let out = target.as_mut_slice::<f32>()?;
    match source.dtype() {
        DType::BF16 => cast(source.as_slice()?, out, |x: &bf16| x.to_f32()),
        DType::F16 => cast(source.as_slice()?, out, |x: &f16| x.to_f32()),
        _ => cast(source.as_slice()?, out, |x: &f64| *x as f32),
    }
    Ok(target)
}

fn cast<A: Sync, B: Send>(source: &[A], target: &mut [B], convert: impl Fn(&A) -> B + Sync) {
    target.par_chunks_mut(CAST_CHUNK).zip(source.par_chunks(CAST_CHUNK)).for_each(
        |(target, source)| {
            for (target, source) in target.iter_mut().zip(source) {
                *target = convert(source);
            }
        },
    );
}

/// Adds a gradient tensor to `target`, or replaces it. Returns what is wrong with the gradient
/// otherwise.
pub(crate) fn add_gradient(
    target: &mut [f32],
    gradient: FlexTensor,
    replace: bool,
) -> Result<(), String> {
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
    target.par_chunks_mut(CAST_CHUNK).zip(gradient.par_chunks(CAST_CHUNK)).for_each(
        |(target, gradient)| {
            for (target, gradient) in target.iter_mut().zip(gradient) {
                *target = if replace { convert(gradient) } else { *target + convert(gradient) };
            }
        },
    );
    Ok(())
}
