//! Operations on the elements of a buffer, on the host or on a GPU.

use std::borrow::Cow;
use std::ops::Range;

use kiln_collectives::{Buffer, BufferError, DType};

#[cfg(feature = "cube")]
use super::cube;
use super::host;
use super::placement::Placement;

/// Writes `source` (f32) to `target`, converted to the dtype of `target`. Both have the same length and are in the
/// same memory.
pub(crate) fn cast_from_f32(source: &Buffer, target: &mut Buffer) -> Result<(), BufferError> {
    match source.is_on_host() {
        #[cfg(feature = "cube")]
        false => cube::cast(source, target),
        _ => host::cast_from_f32(source, target),
    }
}

/// Returns a copy of `source` in `dtype`.
pub(crate) fn cast_to(source: &Buffer, dtype: DType) -> Result<Buffer, BufferError> {
    let mut target = Placement::from_buffer(source).empty(dtype, source.len());
    cast_from_f32(source, &mut target)?;
    Ok(target)
}

/// Converts `source` to f32; a source that is f32 already is returned without a copy.
pub(crate) fn into_f32(source: Buffer) -> Result<Buffer, BufferError> {
    if source.dtype() == DType::F32 {
        return Ok(source);
    }
    let mut target = Placement::from_buffer(&source).empty(DType::F32, source.len());
    match source.is_on_host() {
        #[cfg(feature = "cube")]
        false => cube::cast(&source, &mut target)?,
        _ => host::cast_to_f32(&source, &mut target)?,
    }
    Ok(target)
}

/// Adds the elements of `source` (f32 or bf16) to those of `target` (f32); both have the same length and are in the
/// same memory.
pub(crate) fn add(target: &mut Buffer, source: &Buffer) -> Result<(), BufferError> {
    match source.is_on_host() {
        #[cfg(feature = "cube")]
        false => cube::add(target, source),
        _ => host::add(target, source),
    }
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

/// Returns `buffer` in host memory; copied only if it is on a GPU.
pub(crate) fn on_host(buffer: &Buffer) -> Result<Cow<'_, Buffer>, BufferError> {
    match buffer.is_on_host() {
        #[cfg(feature = "cube")]
        false => Ok(Cow::Owned(buffer.to_host()?)),
        _ => Ok(Cow::Borrowed(buffer)),
    }
}

/// Copies elements `range` of `buffer` (f32) to the host.
pub(crate) fn range_to_host(buffer: &Buffer, range: Range<usize>) -> Result<Buffer, BufferError> {
    match buffer.is_on_host() {
        #[cfg(feature = "cube")]
        false => buffer.range_to_host(range),
        _ => Ok(Buffer::from_slice(&buffer.as_slice::<f32>()?[range])),
    }
}

/// Moves `buffer` to the host.
pub(crate) fn into_host(buffer: Buffer) -> Result<Buffer, BufferError> {
    match buffer.is_on_host() {
        #[cfg(feature = "cube")]
        false => buffer.to_host(),
        _ => Ok(buffer),
    }
}

/// Copies `buffer` (f32) within the same memory.
pub(crate) fn copy(buffer: &Buffer) -> Result<Buffer, BufferError> {
    match buffer.is_on_host() {
        #[cfg(feature = "cube")]
        false => Ok(buffer.clone()),
        _ => host::copy(buffer),
    }
}

/// Calls `fill` to write elements `range` of `buffer` (f32). `fill` must write every element.
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
