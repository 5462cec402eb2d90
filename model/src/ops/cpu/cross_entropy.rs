//! The kernel of the output projection and cross-entropy loss, block by block of rows.

mod products;

use burn::backend::Flex;
use burn::tensor::DType;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use self::products::{Bf16Products, FloatProducts, Products};
use super::bf16::bf16_gemm_for;
use super::dispatch::with_real;
use super::matrix::{Matrix, MatrixMut};
use super::parallel::{BLOCK, for_each_block, rows_per_block, simd};
use super::scalar::{Real, Scalar, exp_sum, max};
use super::uninit::zeros;
use super::values::{MatrixValues, Values, in_float, int_values};
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
        let [rows, d_model, vocab] = layout.sizes(hidden, weight, targets);
        let targets = int_values(targets);
        if let Some(target) = targets.iter().find(|&&target| target >= vocab as i64) {
            panic!("cross entropy: target {target} is outside a vocabulary of {vocab}");
        }
        let shape = [rows, d_model, vocab];
        if let Some(bf16_gemm) = bf16_gemm_for([hidden, weight]) {
            let (hidden, weight_values) = (Values::of(hidden), MatrixValues::of(weight));
            let products = Bf16Products::new(bf16_gemm, layout.columns(weight_values.view()), wanted);
            let hidden = Matrix::rows(&hidden, [rows, d_model]);
            let head = Head { hidden, products, layout, targets: &targets, scale: scale as f32, shape };
            return head.tensors(weight, wanted);
        }
        with_real!(hidden.dtype(), T => {
            let (hidden, weight_values) = (Values::<T>::of(hidden), MatrixValues::<T>::of(weight));
            let products = FloatProducts { weight: layout.columns(weight_values.view()) };
            let (hidden, scale) = (Matrix::rows(&hidden, [rows, d_model]), T::from_f64(scale));
            let head = Head { hidden, products, layout, targets: &targets, scale, shape };
            head.tensors(weight, wanted)
        })
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

impl HeadLayout {
    /// A weight of this layout as `[d_model, vocab]`.
    fn columns<T>(self, weight: Matrix<'_, T>) -> Matrix<'_, T> {
        match self {
            HeadLayout::VocabRows => weight.t(),
            HeadLayout::VocabColumns => weight,
        }
    }
}

/// The operands of the loss.
struct Head<'a, P: Products> {
    hidden: Matrix<'a, P::Operand>,
    products: P,
    layout: HeadLayout,
    targets: &'a [i64],
    scale: RealOf<P>,
    /// Rows, width of a row, size of the vocabulary.
    shape: [usize; 3],
}

/// The type that the loss and its gradients are computed in.
type RealOf<P> = <<P as Products>::Operand as Scalar>::Real;

impl<P: Products> Head<'_, P> {
    /// The loss, and the gradients that are wanted.
    fn tensors(&self, weight: &FlexTensor, wanted: [bool; 2]) -> (FlexTensor, [Option<FlexTensor>; 2]) {
        let [rows, d_model, _] = self.shape;
        let (sum, [dhidden, dweight]) = self.run(wanted);
        let loss = RealOf::<P>::from_f64(sum * self.scale.to_f64());
        let gradients = [
            dhidden.map(|values| RealOf::<P>::tensor(values, [rows, d_model].into())),
            dweight.map(|values| RealOf::<P>::tensor(values, weight.layout().shape().clone())),
        ];
        (RealOf::<P>::tensor(vec![loss], [1].into()), gradients)
    }

    /// The sum of the losses and the gradients that are wanted.
    fn run(&self, wanted: [bool; 2]) -> (f64, [Option<Vec<RealOf<P>>>; 2]) {
        let [rows, d_model, vocab] = self.shape;
        let mut dhidden = zeros::<RealOf<P>>(wanted[0], rows * d_model);
        let mut dweight = None;
        let block_rows = block_rows(vocab);
        let mut sum = 0.0;
        for start in (0..rows).step_by(block_rows) {
            let block = start..rows.min(start + block_rows);
            let hidden = self.hidden.slice(block.clone(), 0..d_model);
            let mut logits = self.products.logits(hidden);

            let targets = &self.targets[block.clone()];
            let (losses, factors): (Vec<f64>, Vec<RealOf<P>>) = logits
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

            // Gradients of the logits without a factor per row. The factor is applied to the hidden values
            // and their gradients, which are narrower.
            let dlogits = P::operands(logits);
            let dlogits = Matrix::rows(&dlogits, [block.len(), vocab]);
            let scale = self.scale;
            let row_factor = |row: usize| factors[row] * scale;
            if let Some(dhidden) = &mut dhidden {
                let dhidden = &mut dhidden[block.start * d_model..block.end * d_model];
                let out = MatrixMut::rows(dhidden, [block.len(), d_model]);
                self.products.hidden_gradient(dlogits, out);
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
                match &mut dweight {
                    None => dweight = Some(self.products.product(lhs, rhs)),
                    Some(dweight) => {
                        let out = MatrixMut::rows(dweight, [lhs.shape()[0], rhs.shape()[1]]);
                        self.products.add_product(out, lhs, rhs);
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

/// The loss of one row, whose logits are replaced. The replaced values times the returned factor are the
/// gradient of the logits.
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
