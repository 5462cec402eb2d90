//! Sums buffers in ascending rank order: every element is `((x0 + x1) + x2) + ...`, independent of timing and chunking.
//! Blocks keep the running sum in the first-level cache, and the loops are simple enough to vectorise.

use crate::buffer::Buffer;
use crate::call::ArgumentError;
use crate::dtype::{DType, Element};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::ops::{AddAssign, Range};
use std::sync::Arc;

const BLOCK: usize = 4096;

/// Sums `inputs`, from their element `start` on, into `output`. Sums `f16` and `bf16` in `f32`, and rounds once.
///
/// # Errors
///
/// Fails if the types differ or have no sum.
///
/// # Panics
///
/// Panics if an input is shorter than `start + output.len()`.
pub fn sum_into(output: &mut Buffer, inputs: &[Arc<Buffer>], start: usize) -> Result<(), ArgumentError> {
    let (dtype, len, size) = (output.dtype(), output.len(), output.dtype().size());
    if let Some(other) = inputs.iter().map(|input| input.dtype()).find(|other| *other != dtype) {
        return Err(ArgumentError::DType { input: other, output: dtype });
    }
    let range = start * size..(start + len) * size;
    let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input.as_bytes()[range.clone()]).collect();
    sum_bytes(dtype, output.as_bytes_mut(), &inputs)
}

/// Implements [`sum_into`] on bytes: all slices have the same length and the alignment of `dtype`.
pub(crate) fn sum_bytes(dtype: DType, output: &mut [u8], inputs: &[&[u8]]) -> Result<(), ArgumentError> {
    match dtype {
        DType::F64 => sum_as::<f64>(output, inputs, sum_plain),
        DType::F32 => sum_as::<f32>(output, inputs, sum_plain),
        DType::F16 => sum_as::<f16>(output, inputs, sum_half),
        DType::BF16 => sum_as::<bf16>(output, inputs, sum_half),
        DType::U8 => return Err(ArgumentError::NoSum { dtype }),
    }
    Ok(())
}

/// Returns the chunk of `len` elements that `rank` reduces. The first `len % world_size` chunks have one element more.
pub fn chunk_range(len: usize, world_size: usize, rank: usize) -> Range<usize> {
    let (size, longer) = (len / world_size, len % world_size);
    let start = |rank: usize| rank * size + rank.min(longer);
    start(rank)..start(rank + 1)
}

fn sum_as<T: Element>(output: &mut [u8], inputs: &[&[u8]], sum: impl Fn(&mut [T], &[&[T]])) {
    let inputs: Vec<&[T]> = inputs.iter().map(|input| bytemuck::cast_slice(input)).collect();
    sum(bytemuck::cast_slice_mut(output), &inputs);
}

/// Starts from the first input instead of zero, so that a sum of negative zeros keeps its sign.
fn sum_plain<T: Copy + AddAssign>(output: &mut [T], inputs: &[&[T]]) {
    let Some((first, rest)) = inputs.split_first() else {
        return;
    };
    for (index, block) in output.chunks_mut(BLOCK).enumerate() {
        let range = index * BLOCK..index * BLOCK + block.len();
        block.copy_from_slice(&first[range.clone()]);
        for input in rest {
            add(block, &input[range.clone()]);
        }
    }
}

fn sum_half<T>(output: &mut [T], inputs: &[&[T]])
where
    [T]: HalfFloatSliceExt,
{
    let Some((first, rest)) = inputs.split_first() else {
        return;
    };
    let mut total = [0.0f32; BLOCK];
    let mut addend = [0.0f32; BLOCK];
    for (index, block) in output.chunks_mut(BLOCK).enumerate() {
        let range = index * BLOCK..index * BLOCK + block.len();
        let total = &mut total[..block.len()];
        let addend = &mut addend[..block.len()];
        first[range.clone()].convert_to_f32_slice(total);
        for input in rest {
            input[range.clone()].convert_to_f32_slice(addend);
            add(total, addend);
        }
        block.convert_from_f32_slice(total);
    }
}

pub(crate) fn add<T: Copy + AddAssign>(sums: &mut [T], values: &[T]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += *value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_types_round_once() {
        // In f16, 2048 + 1 rounds to 2048, so rounding after each addition would lose both ones.
        let values = [2048.0, 1.0, 1.0];
        let inputs: Vec<_> = values.map(|value| Arc::new(Buffer::from_slice(&[f16::from_f32(value)]))).into();
        let mut output = Buffer::zeros(DType::F16, 1);
        sum_into(&mut output, &inputs, 0).unwrap();
        assert_eq!(output.as_slice::<f16>().unwrap()[0].to_f32(), 2050.0);
    }

    #[test]
    fn negative_zero_keeps_its_sign() {
        let inputs = [(); 3].map(|()| Arc::new(Buffer::from_slice(&[-0.0f32])));
        let mut output = Buffer::zeros(DType::F32, 1);
        sum_into(&mut output, &inputs, 0).unwrap();
        assert!(output.as_slice::<f32>().unwrap()[0].is_sign_negative());
    }

    #[test]
    fn sums_from_the_given_start_across_blocks() {
        let values: Vec<f64> = (0..2 * BLOCK + 5).map(|i| i as f64).collect();
        let inputs = [(); 2].map(|()| Arc::new(Buffer::from_slice(&values)));
        let mut output = Buffer::zeros(DType::F64, values.len() - 2);
        sum_into(&mut output, &inputs, 2).unwrap();
        let expected: Vec<f64> = values[2..].iter().map(|value| 2.0 * value).collect();
        assert_eq!(output.as_slice::<f64>().unwrap(), expected);
    }

    #[test]
    fn bytes_have_no_sum() {
        let inputs = [Arc::new(Buffer::zeros(DType::U8, 1))];
        assert!(sum_into(&mut Buffer::zeros(DType::U8, 1), &inputs, 0).is_err());
    }

    #[test]
    fn chunks_cover_everything_in_order() {
        for len in [0, 1, 2, 7, 8, 1023] {
            for world_size in [1, 2, 3, 8] {
                let mut next = 0;
                for rank in 0..world_size {
                    let chunk = chunk_range(len, world_size, rank);
                    assert_eq!(chunk.start, next);
                    assert!(chunk.len() <= len.div_ceil(world_size));
                    next = chunk.end;
                }
                assert_eq!(next, len);
            }
        }
    }
}
