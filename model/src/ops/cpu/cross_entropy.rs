//! Output projection and cross-entropy loss, block by block of rows.

use burn::backend::Flex;
use burn::tensor::DType;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::gemm::{Matrix, MatrixMut, Output, Threads, gemm, product};
use super::real::{Real, exp_sum, max};
use super::{
    BLOCK, MatrixValues, Values, for_each_block, in_float, int_values, rows_per_block, simd,
    tensor_of, with_real, zeros,
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
    with_real!(hidden.dtype(), T => {
        let (hidden, weight_values) = (Values::<T>::of(hidden), MatrixValues::<T>::of(weight));
        let head = Head {
            hidden: &hidden,
            // Seen as [d_model, vocab] in either layout.
            weight: match layout {
                HeadLayout::VocabRows => weight_values.view().t(),
                HeadLayout::VocabColumns => weight_values.view(),
            },
            layout,
            targets: &targets,
            scale: T::from_f64(scale),
            shape: [rows, d_model, vocab],
        };
        let (sum, [dhidden, dweight]) = head.run(wanted);
        let gradients = [
            dhidden.map(|values| tensor_of(values, [rows, d_model], T::DTYPE)),
            dweight.map(|values| tensor_of(values, weight.layout().shape().clone(), T::DTYPE)),
        ];
        (tensor_of(vec![T::from_f64(sum * scale)], [1], T::DTYPE), gradients)
    })
}

/// Operands of the loss.
struct Head<'a, T> {
    hidden: &'a [T],
    weight: Matrix<'a, T>,
    layout: HeadLayout,
    targets: &'a [i64],
    scale: T,
    /// Rows, width of a row, size of the vocabulary.
    shape: [usize; 3],
}

impl<T: Real> Head<'_, T> {
    /// The sum of the losses and the gradients that are wanted.
    fn run(&self, wanted: [bool; 2]) -> (f64, [Option<Vec<T>>; 2]) {
        let [rows, d_model, vocab] = self.shape;
        let mut dhidden = zeros::<T>(wanted[0], rows * d_model);
        let mut dweight = None;
        let block_rows = block_rows(vocab);
        let mut sum = 0.0;
        for start in (0..rows).step_by(block_rows) {
            let count = block_rows.min(rows - start);
            let hidden = Matrix::rows(&self.hidden[start * d_model..], [count, d_model]);
            let mut logits = product(hidden, self.weight);

            let targets = &self.targets[start..][..count];
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
            let dlogits = Matrix::rows(&logits, [count, vocab]);
            let row_factor = |row: usize| factors[row] * self.scale;
            if let Some(dhidden) = &mut dhidden {
                let dhidden = &mut dhidden[start * d_model..][..count * d_model];
                let out = MatrixMut::rows(dhidden, [count, d_model]);
                gemm(out, Output::Overwrite, T::ONE, dlogits, self.weight.t(), Threads::Pool);
                scale_rows(dhidden, d_model, row_factor);
            }
            if wanted[1] {
                let mut hidden = self.hidden[start * d_model..][..count * d_model].to_vec();
                scale_rows(&mut hidden, d_model, row_factor);
                let hidden = Matrix::rows(&hidden, [count, d_model]);
                let (shape, lhs, rhs) = match self.layout {
                    HeadLayout::VocabRows => ([vocab, d_model], dlogits.t(), hidden),
                    HeadLayout::VocabColumns => ([d_model, vocab], hidden.t(), dlogits),
                };
                match &mut dweight {
                    None => dweight = Some(product(lhs, rhs)),
                    Some(dweight) => {
                        let out = MatrixMut::rows(dweight, shape);
                        gemm(out, Output::Add, T::ONE, lhs, rhs, Threads::Pool);
                    }
                }
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

/// Multiplies each row of `width` values with its factor.
fn scale_rows<T: Real>(values: &mut [T], width: usize, factor: impl Fn(usize) -> T + Sync + Send) {
    let rows = rows_per_block(width);
    for_each_block(
        values,
        rows * width.max(1),
        #[inline(always)]
        |start, block| {
            for (i, row) in block.chunks_exact_mut(width.max(1)).enumerate() {
                let factor = factor(start / width.max(1) + i);
                row.iter_mut().for_each(|value| *value *= factor);
            }
        },
    );
}
