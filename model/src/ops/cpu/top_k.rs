//! The kernel that selects the largest values of each row.

use burn::backend::Flex;
use burn::tensor::TensorData;
use burn_flex::FlexTensor;

use super::dispatch::with_real;
use super::parallel::{for_each_block, rows_per_block};
use super::values::Values;
use crate::ops::linear::rows_of;
use crate::ops::top_k::TopKOp;

impl TopKOp for Flex {
    fn fused_top_k(scores: FlexTensor, k: usize) -> FlexTensor {
        let [rows, width] = rows_of(&scores);
        let mut chosen = vec![0_i64; rows * k];
        with_real!(scores.dtype(), T => {
            let values = Values::<T>::of(&scores);
            let values: &[T] = &values;
            let size = rows_per_block(width * k) * k.max(1);
            for_each_block(&mut chosen, size, #[inline(always)] |start, block| {
                for (i, chosen) in block.chunks_exact_mut(k.max(1)).enumerate() {
                    choose(&values[(start / k.max(1) + i) * width..][..width], chosen);
                }
            });
        });
        FlexTensor::from_data(TensorData::new(chosen, [rows, k]))
    }
}

/// Fills `chosen` with the indices of the largest `values`: valid and distinct even if there is a NaN.
#[inline(always)]
fn choose<T: PartialOrd + Copy>(values: &[T], chosen: &mut [i64]) {
    for count in 0..chosen.len() {
        let (earlier, rest) = chosen.split_at_mut(count);
        let mut best: Option<usize> = None;
        for (index, value) in values.iter().enumerate() {
            let is_better = best.is_none_or(|best| *value > values[best]);
            if is_better && !earlier.contains(&(index as i64)) {
                best = Some(index);
            }
        }
        rest[0] = best.unwrap_or_default() as i64;
    }
}
