//! The kernel of the output projection and cross-entropy loss, block by block of rows.

use burn::backend::Flex;
use burn::prelude::ToElement;
use burn::tensor::DType;
use burn_flex::FlexTensor;

use super::bf16::bf16_gemm_for;
use super::dispatch::{with_products, with_real};
use super::matrix::{Matrix, MatrixMut};
use super::parallel::{BLOCK, for_each_block, map_items, rows_per_block, simd};
use super::products::{Multiplier, Output, Products, Threads};
use super::scalar::{Real, Scalar, exp_sum, max};
use super::uninit::zeros;
use super::values::{MatrixValues, Values, in_float, int_values, new_tensor};
use crate::ops::cross_entropy::{CrossEntropyKernels, HeadLayout, LogitOptions, Targets, logit_rows};

impl CrossEntropyKernels for Flex {
    fn cross_entropy_forward(
        hidden: &FlexTensor,
        weight: &FlexTensor,
        layout: HeadLayout,
        targets: Targets<'_, Self>,
        scale: f64,
        options: LogitOptions,
        wanted: [bool; 2],
    ) -> (FlexTensor, [Option<FlexTensor>; 2]) {
        let Targets { ids: targets, weights: row_weights } = targets;
        let [rows, d_model, vocab] = layout.sizes(hidden, weight, targets);
        let targets = int_values(targets);
        if let Some(target) = targets.iter().find(|&&target| target >= vocab as i64) {
            panic!("cross entropy: target {target} is outside a vocabulary of {vocab}");
        }
        let row_weights = row_weights.map(Values::<f32>::of);
        with_products!(bf16_gemm_for([hidden, weight]), hidden.dtype(), products, S => {
            let (hidden, weight_values) = (Values::<S>::of(hidden), MatrixValues::<S>::of(weight));
            let columns = match layout {
                HeadLayout::VocabRows => weight_values.view().t(),
                HeadLayout::VocabColumns => weight_values.view(),
            };
            let head = Head {
                hidden: Matrix::rows(&hidden, [rows, d_model]),
                products,
                weight: products.right(columns, Threads::Pool),
                transposed: wanted[0].then(|| products.right(columns.t(), Threads::Pool)),
                layout,
                targets: &targets,
                row_weights: row_weights.as_deref(),
                scale: <S as Scalar>::Real::from_f64(scale),
                options,
                shape: [rows, d_model, vocab],
            };
            head.run(weight, wanted)
        })
    }

    fn cross_entropy_backward(gradient: FlexTensor, dy: &FlexTensor, dtype: DType) -> FlexTensor {
        let gradient = with_real!(gradient.dtype(), T => scaled::<T>(gradient, dy));
        in_float(gradient, dtype)
    }
}

/// Multiplies `gradient` by the first value of `factor`, in place if possible.
fn scaled<T: Real>(mut gradient: FlexTensor, factor: &FlexTensor) -> FlexTensor {
    let factor = Values::<T>::of(factor)[0];
    if factor != T::ONE {
        for_each_block(
            gradient.storage_mut::<T>(),
            BLOCK,
            #[inline(always)]
            |_, block| block.iter_mut().for_each(|value| *value *= factor),
        );
    }
    gradient
}

struct Head<'a, S: Scalar, P: Products<S, S::Real>> {
    hidden: Matrix<'a, S>,
    products: P,
    /// `[d_model, vocab]`.
    weight: P::Right<'a>,
    /// Present if the gradient of `hidden` is requested.
    transposed: Option<P::Right<'a>>,
    layout: HeadLayout,
    targets: &'a [i64],
    row_weights: Option<&'a [f32]>,
    scale: S::Real,
    options: LogitOptions,
    /// `[rows, d_model, vocab]`.
    shape: [usize; 3],
}

impl<S: Scalar, P: Products<S, S::Real>> Head<'_, S, P> {
    /// Returns the loss, and the requested gradients of `hidden` and of the projection's `weight`.
    fn run(&self, weight: &FlexTensor, wanted: [bool; 2]) -> (FlexTensor, [Option<FlexTensor>; 2]) {
        let ([rows, d_model, vocab], products) = (self.shape, self.products);
        let mut dhidden = zeros::<S::Real>(wanted[0], rows * d_model);
        let mut dweight = None;
        let block_rows = logit_rows(vocab, true);
        let (mut sum, mut z_sum) = (0.0, 0.0);
        for start in (0..rows).step_by(block_rows) {
            let block = start..rows.min(start + block_rows);
            let hidden = self.hidden.slice(block.clone(), 0..d_model);
            let lhs = products.left(hidden, Threads::Pool);
            let mut logits: Vec<S::Real> =
                products.product(&lhs, &self.weight, [block.len(), d_model, vocab]);

            let targets = &self.targets[block.clone()];
            let rows = logits.chunks_mut(vocab).zip(targets);
            let (mut losses, mut factors): (Vec<f64>, Vec<S::Real>) = if self.options
                == LogitOptions::default()
            {
                let losses = map_items(rows, |(logits, &target)| {
                    simd(
                        #[inline(always)]
                        || row_loss(logits, target),
                    )
                });
                losses.into_iter().unzip()
            } else {
                let losses = map_items(rows, |(logits, &target)| {
                    simd(
                        #[inline(always)]
                        || row_loss_with(logits, target, self.options),
                    )
                });
                let (losses, factors): (Vec<RowLoss>, _) = losses.into_iter().unzip();
                let weight =
                    |row: usize| self.row_weights.map_or(1.0, |all| f64::from(all[block.start + row]));
                z_sum += losses.iter().enumerate().map(|(row, loss)| loss.z_loss * weight(row)).sum::<f64>();
                (losses.iter().map(|loss| loss.cross_entropy).collect(), factors)
            };
            if let Some(weights) = self.row_weights {
                for ((loss, factor), &weight) in
                    losses.iter_mut().zip(&mut factors).zip(&weights[block.clone()])
                {
                    *loss *= f64::from(weight);
                    *factor *= <S as Scalar>::Real::from_f64(f64::from(weight));
                }
            }
            sum += losses.iter().sum::<f64>();

            // The factor per row is applied to the hidden values and their gradients, which are narrower.
            let dlogits = products.operands(logits.into());
            let dlogits = Matrix::rows(&dlogits, [block.len(), vocab]);
            let scale = self.scale;
            let row_factor = |row: usize| factors[row] * scale;
            if let (Some(dhidden), Some(transposed)) = (&mut dhidden, &self.transposed) {
                let dhidden = &mut dhidden[block.start * d_model..block.end * d_model];
                let out = MatrixMut::rows(dhidden, [block.len(), d_model]);
                let (lhs, all) = (products.left(dlogits, Threads::Pool), [0..vocab, 0..d_model]);
                products.multiply(out, Output::Overwrite(S::Real::ONE), &lhs, transposed, all, Threads::Pool);
                scale_rows(dhidden, d_model, row_factor);
            }
            if wanted[1] {
                let mut hidden = hidden.values()[..block.len() * d_model].to_vec();
                scale_rows(&mut hidden, d_model, row_factor);
                let hidden = Matrix::rows(&hidden, [block.len(), d_model]);
                let (lhs, rhs) = match self.layout {
                    HeadLayout::VocabRows => (dlogits.t(), hidden),
                    HeadLayout::VocabColumns => (hidden.t(), dlogits),
                };
                let ([m, k], [_, n]) = (lhs.shape(), rhs.shape());
                let (lhs, rhs) = (products.left(lhs, Threads::Pool), products.right(rhs, Threads::Pool));
                match &mut dweight {
                    None => dweight = Some(products.product(&lhs, &rhs, [m, k, n])),
                    Some(dweight) => {
                        let out = MatrixMut::rows(dweight, [m, n]);
                        products.multiply(out, Output::Add, &lhs, &rhs, [0..k, 0..n], Threads::Pool);
                    }
                }
            }
        }
        let dweight = dweight.or_else(|| zeros(wanted[1], d_model * vocab));
        let scaled = |sum: f64| S::Real::from_f64(sum * self.scale.to_f64());
        let losses = match self.options.z_loss {
            None => new_tensor(vec![scaled(sum)], [1]),
            Some(_) => new_tensor(vec![scaled(sum + z_sum), scaled(z_sum)], [2]),
        };
        let dhidden = dhidden.map(|values| new_tensor(values, [rows, d_model]));
        let dweight = dweight.map(|values| new_tensor(values, weight.layout().shape().clone()));
        (losses, [dhidden, dweight])
    }
}

/// Returns the loss of one row, and the factor by which the rewritten logits become their gradient.
#[inline(always)]
fn row_loss<T: Real>(logits: &mut [T], target: i64) -> (f64, T) {
    let Ok(target) = usize::try_from(target) else {
        logits.fill(T::ZERO);
        return (0.0, T::ZERO);
    };
    let (shift, picked) = (max(logits), logits[target]);
    let sum = exp_sum(logits, shift);
    logits[target] = logits[target] - sum;
    ((sum.ln() + (shift - picked)).to_f64(), T::ONE / sum)
}

struct RowLoss {
    cross_entropy: f64,
    z_loss: f64,
}

#[inline(always)]
fn row_loss_with<T: Real>(logits: &mut [T], target: i64, options: LogitOptions) -> (RowLoss, T) {
    let Ok(target) = usize::try_from(target) else {
        logits.fill(T::ZERO);
        return (RowLoss { cross_entropy: 0.0, z_loss: 0.0 }, T::ZERO);
    };
    let slopes = options.softcap.map(|cap| cap_row(logits, T::from_f64(cap)));
    let (shift, picked) = (max(logits), logits[target]);
    let sum = exp_sum(logits, shift);
    let z = options.z_loss.unwrap_or(0.0);
    let log_sum = (shift + sum.ln()).to_f64();
    if options.z_loss.is_some() {
        let factor = T::from_f64(1.0 + 2.0 * z * log_sum);
        logits.iter_mut().for_each(|value| *value *= factor);
    }
    logits[target] = logits[target] - sum;
    for (value, slope) in logits.iter_mut().zip(slopes.iter().flatten()) {
        *value *= *slope;
    }
    let cross_entropy = (sum.ln() + (shift - picked)).to_f64();
    (RowLoss { cross_entropy, z_loss: z * log_sum * log_sum }, T::ONE / sum)
}

/// Replaces logits by `cap · tanh(logits / cap)`, and returns the derivatives.
#[inline(always)]
fn cap_row<T: Real>(logits: &mut [T], cap: T) -> Vec<T> {
    let mut slopes = vec![T::ZERO; logits.len()];
    for (value, slope) in logits.iter_mut().zip(&mut slopes) {
        let tanh = (*value / cap).tanh();
        *value = cap * tanh;
        *slope = T::ONE - tanh * tanh;
    }
    slopes
}

fn scale_rows<S: Scalar>(values: &mut [S], width: usize, factor: impl Fn(usize) -> S::Real + Sync + Send) {
    let rows = rows_per_block(width);
    for_each_block(
        values,
        rows * width.max(1),
        #[inline(always)]
        |start, block| {
            for (i, row) in block.chunks_exact_mut(width.max(1)).enumerate() {
                let factor = factor(start / width.max(1) + i);
                row.iter_mut().for_each(|value| *value = S::nearest(value.real() * factor));
            }
        },
    );
}
