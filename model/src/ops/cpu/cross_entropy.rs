//! Output projection and cross-entropy loss, block by block of rows.

mod products;

use burn::backend::Flex;
use burn::tensor::DType;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use self::products::{Halves, Products, Reals, scale_rows};
use super::bf16::unit_for;
use super::matrix::Matrix;
use super::real::{Real, exp_sum, max};
use super::{
    BLOCK, MatrixValues, Values, for_each_block, in_float, int_values, simd, tensor_of, with_real,
    zeros,
};
use crate::ops::cross_entropy::{CrossEntropyKernels, HeadLayout};

impl CrossEntropyKernels for Flex {
    fn cross_entropy_forward(
        hidden: &FlexTensor,
        weight: &FlexTensor,
        layout: HeadLayout,
        targets: &FlexTensor,
        scale: f64,
        wanted: [bool; 2],
    ) -> (FlexTensor, [Option<FlexTensor>; 2]) {
        forward(hidden, weight, layout, targets, scale, wanted)
    }

    fn cross_entropy_backward(gradient: FlexTensor, dy: &FlexTensor, dtype: DType) -> FlexTensor {
        let gradient = with_real!(gradient.dtype(), T => scaled::<T>(gradient, dy));
        in_float(gradient, dtype)
    }
}

/// `gradient` times the only value of `factor`, in place where nobody else holds `gradient`.
fn scaled<T: Real>(mut gradient: FlexTensor, factor: &FlexTensor) -> FlexTensor {
    let factor = Values::<T>::of(factor)[0];
    if factor != T::ONE {
        let values = T::storage_mut(&mut gradient).expect("the caller dispatches on this dtype");
        for_each_block(
            values,
            BLOCK,
            #[inline(always)]
            |_, block| block.iter_mut().for_each(|value| *value *= factor),
        );
    }
    gradient
}

fn forward(
    hidden: &FlexTensor,
    weight: &FlexTensor,
    layout: HeadLayout,
    targets: &FlexTensor,
    scale: f64,
    wanted: [bool; 2],
) -> (FlexTensor, [Option<FlexTensor>; 2]) {
    let [rows, d_model, vocab] = layout.sizes(hidden, weight, targets);
    let targets = int_values(targets);
    if let Some(target) = targets.iter().find(|&&target| target >= vocab as i64) {
        panic!("cross entropy: target {target} is outside a vocabulary of {vocab}");
    }
    if let Some(unit) = unit_for([hidden, weight]) {
        let (hidden_values, weight_values) = (Values::of(hidden), MatrixValues::of(weight));
        let weight_values = layout.columns(weight_values.view());
        let products = Halves::new(unit, &hidden_values, weight_values, layout, wanted);
        let head = Head { targets: &targets, scale: scale as f32, shape: [rows, d_model, vocab] };
        return head.tensors(products, weight, wanted);
    }
    with_real!(hidden.dtype(), T => {
        let (hidden, weight_values) = (Values::<T>::of(hidden), MatrixValues::<T>::of(weight));
        let weight_values = layout.columns(weight_values.view());
        let products = Reals { hidden: &hidden, weight: weight_values, layout };
        let scale = T::from_f64(scale);
        let head = Head { targets: &targets, scale, shape: [rows, d_model, vocab] };
        head.tensors(products, weight, wanted)
    })
}

impl HeadLayout {
    /// A weight of this layout as `[d_model, vocab]`.
    fn columns<T>(self, weight: Matrix<'_, T>) -> Matrix<'_, T> {
        match self {
            HeadLayout::VocabRows => weight.t(),
            HeadLayout::VocabColumns => weight,
        }
    }
}

/// What the loss is taken of.
struct Head<'a, T> {
    targets: &'a [i64],
    scale: T,
    /// Rows, width of a row, size of the vocabulary.
    shape: [usize; 3],
}

impl<T: Real> Head<'_, T> {
    /// The loss, and the gradients that are wanted.
    fn tensors(
        &self,
        products: impl Products<T>,
        weight: &FlexTensor,
        wanted: [bool; 2],
    ) -> (FlexTensor, [Option<FlexTensor>; 2]) {
        let [rows, d_model, _] = self.shape;
        let (sum, [dhidden, dweight]) = self.run(products, wanted);
        let gradients = [
            dhidden.map(|values| tensor_of(values, [rows, d_model], T::DTYPE)),
            dweight.map(|values| tensor_of(values, weight.layout().shape().clone(), T::DTYPE)),
        ];
        let loss = T::from_f64(sum * self.scale.to_f64());
        (tensor_of(vec![loss], [1], T::DTYPE), gradients)
    }

    /// The sum of the losses and the gradients that are wanted.
    fn run(&self, products: impl Products<T>, wanted: [bool; 2]) -> (f64, [Option<Vec<T>>; 2]) {
        let [rows, d_model, vocab] = self.shape;
        let mut dhidden = zeros::<T>(wanted[0], rows * d_model);
        let mut dweight = None;
        let block_rows = block_rows(vocab);
        let mut sum = 0.0;
        for start in (0..rows).step_by(block_rows) {
            let block = start..rows.min(start + block_rows);
            let mut logits = products.logits(block.clone());

            let targets = &self.targets[block.clone()];
            let (losses, factors): (Vec<f64>, Vec<T>) = logits
                .par_chunks_mut(vocab)
                .zip(targets)
                .map(|(logits, &target)| {
                    simd(
                        #[inline(always)]
                        || row_loss(logits, target),
                    )
                })
                .unzip();
            sum += losses.iter().sum::<f64>();

            // Gradients of the logits but for a factor per row, which is applied to what is narrower.
            let dlogits = products.gradient(logits, block.len());
            let row_factor = |row: usize| factors[row] * self.scale;
            if let Some(dhidden) = &mut dhidden {
                let dhidden = &mut dhidden[block.start * d_model..block.end * d_model];
                products.hidden_gradient(&dlogits, dhidden);
                scale_rows(dhidden, d_model, row_factor);
            }
            if wanted[1] {
                products.weight_gradient(&dlogits, block, row_factor, &mut dweight);
            }
        }
        let dweight = dweight.or_else(|| zeros(wanted[1], d_model * vocab));
        (sum, [dhidden, dweight])
    }
}

/// Rows whose logits exist at one time: enough for the matrix products to run at full speed, fewer
/// where a large vocabulary would make the logits larger than 64 MiB.
fn block_rows(vocab: usize) -> usize {
    const LOGITS: usize = 1 << 24;
    (LOGITS / vocab.max(1)).clamp(16, 256)
}

/// The loss of one row, and the factor that makes its gradient of what replaces its logits.
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
