//! The kernels of a router of experts.

use burn::backend::Flex;
use burn::tensor::DType;
use burn_flex::FlexTensor;

use super::dispatch::with_real;
use super::parallel::{for_each_row, map_items, rows_per_block};
use super::scalar::{Real, dot, exp_sum, max};
use super::values::{Values, int_values, new_tensor, tensor_of};
use crate::ops::linear::rows_of;
use crate::ops::router::RouterKernels;

impl RouterKernels for Flex {
    fn softmax_forward(logits: FlexTensor) -> FlexTensor {
        let shape @ [_, experts] = rows_of(&logits);
        with_real!(logits.dtype(), T => {
            let mut y = Values::<T>::of(&logits).to_vec();
            for_each_row(&mut y, experts, #[inline(always)] |_, row| {
                let largest = max(row);
                let sum = exp_sum(row, largest);
                row.iter_mut().for_each(|value| *value /= sum);
            });
            new_tensor(y, shape)
        })
    }

    fn softmax_backward(probabilities: FlexTensor, gradient: FlexTensor, dtype: DType) -> FlexTensor {
        let shape @ [_, experts] = rows_of(&probabilities);
        with_real!(probabilities.dtype(), T => {
            let (p, mut dy) = (Values::<T>::of(&probabilities), Values::<T>::of(&gradient).to_vec());
            let p: &[T] = &p;
            for_each_row(&mut dy, experts, #[inline(always)] |row, dy| {
                let p = &p[row * experts..][..experts];
                let mean = dot(dy, p);
                dy.iter_mut().zip(p).for_each(|(dy, &p)| *dy = p * (*dy - mean));
            });
            tensor_of(dy, shape, dtype)
        })
    }

    fn weights_forward(probabilities: FlexTensor, chosen: FlexTensor, normalized: bool) -> FlexTensor {
        let ([_, experts], shape @ [tokens, k]) = (rows_of(&probabilities), rows_of(&chosen));
        let chosen = int_values(&chosen);
        with_real!(probabilities.dtype(), T => {
            let p = Values::<T>::of(&probabilities);
            let p: &[T] = &p;
            let mut weights = vec![T::ZERO; tokens * k];
            for_each_row(&mut weights, k, #[inline(always)] |row, weights| {
                gather(&p[row * experts..][..experts], &chosen[row * k..], weights);
                if normalized {
                    let sum = sum(weights);
                    weights.iter_mut().for_each(|weight| *weight /= sum);
                }
            });
            tensor_of(weights, shape, probabilities.dtype())
        })
    }

    fn weights_backward(
        probabilities: FlexTensor,
        chosen: FlexTensor,
        gradient: FlexTensor,
        normalized: bool,
    ) -> FlexTensor {
        let (shape @ [tokens, experts], [_, k]) = (rows_of(&probabilities), rows_of(&chosen));
        let chosen = int_values(&chosen);
        with_real!(probabilities.dtype(), T => {
            let (p, dw) = (Values::<T>::of(&probabilities), Values::<T>::of(&gradient));
            let (p, dw): (&[T], &[T]) = (&p, &dw);
            let mut dp = vec![T::ZERO; tokens * experts];
            for_each_row(&mut dp, experts, #[inline(always)] |row, dp| {
                let (p, chosen) = (&p[row * experts..][..experts], &chosen[row * k..][..k]);
                let dw = &dw[row * k..][..k];
                let (mut total, mut mean) = (T::ONE, T::ZERO);
                if normalized {
                    total = T::ZERO;
                    for (&expert, &dw) in chosen.iter().zip(dw) {
                        total += p[expert as usize];
                        mean += p[expert as usize] * dw;
                    }
                    mean /= total;
                }
                for (&expert, &dw) in chosen.iter().zip(dw) {
                    dp[expert as usize] += (dw - mean) / total;
                }
            });
            tensor_of(dp, shape, probabilities.dtype())
        })
    }

    fn load(probabilities: FlexTensor, chosen: FlexTensor) -> FlexTensor {
        let [_, experts] = rows_of(&probabilities);
        let mut load = vec![0.0_f32; experts];
        int_values(&chosen).into_iter().for_each(|expert| load[expert as usize] += 1.0);
        new_tensor(load, [experts])
    }

    fn means_forward(probabilities: FlexTensor) -> FlexTensor {
        let [tokens, experts] = rows_of(&probabilities);
        with_real!(probabilities.dtype(), T => {
            let p = Values::<T>::of(&probabilities);
            let p: &[T] = &p;
            let sums = map_items(p.chunks(rows_per_block(experts) * experts.max(1)), |block| {
                let mut sums = vec![T::ZERO; experts];
                for row in block.chunks_exact(experts) {
                    sums.iter_mut().zip(row).for_each(|(sum, &value)| *sum += value);
                }
                sums
            });
            let mut means = vec![T::ZERO; experts];
            for block in sums {
                means.iter_mut().zip(block).for_each(|(mean, sum)| *mean += sum);
            }
            let tokens = T::from_f64(tokens as f64);
            means.iter_mut().for_each(|mean| *mean /= tokens);
            tensor_of(means, [experts], probabilities.dtype())
        })
    }

    fn means_backward(gradient: FlexTensor, tokens: usize) -> FlexTensor {
        let [_, experts] = rows_of(&gradient);
        with_real!(gradient.dtype(), T => {
            let count = T::from_f64(tokens as f64);
            let row: Vec<T> = Values::<T>::of(&gradient).iter().map(|&value| value / count).collect();
            tensor_of(row.repeat(tokens), [tokens, experts], gradient.dtype())
        })
    }
}

#[inline(always)]
fn gather<T: Real>(values: &[T], indices: &[i64], to: &mut [T]) {
    for (to, &index) in to.iter_mut().zip(indices) {
        *to = values[index as usize];
    }
}

#[inline(always)]
fn sum<T: Real>(values: &[T]) -> T {
    let mut sum = T::ZERO;
    values.iter().for_each(|&value| sum += value);
    sum
}
