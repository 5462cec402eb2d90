//! Output projection and cross-entropy loss in one operation.

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{
    Backend, Dispatch, Flex, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, FloatDType, Int, Tensor, activation::log_softmax};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::Tracked;
use super::cpu::gemm::{Matrix, MatrixMut, Output, Threads, gemm};
use super::cpu::real::{Real, exp_sum, max};
use super::cpu::{self, MatrixValues, Values, with_real};

/// How the weight of an output projection is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadLayout {
    /// `[vocab, d_model]`, as the embedding that the head may be tied to.
    VocabRows,
    /// `[d_model, vocab]`, as the weight of a [`linear`](super::linear()).
    VocabColumns,
}

/// `scale · Σ_rows −log softmax(hidden · W)[target]`, a tensor of one value.
///
/// `hidden` is `[rows, d_model]`, `targets` `[rows]`; a row with a negative target counts for
/// nothing. The sum is taken in double precision; the result is `f32` (`f64` for `f64` operands)
/// whatever the dtype of the operands.
///
/// Logits exist for a block of rows at a time and are never saved. Where `hidden` or `weight` is
/// tracked, the block's gradients, `dlogits = scale · (softmax − onehot(target))`,
/// `dhidden = dlogits · Wᵀ` and `dW += hiddenᵀ · dlogits`, are computed right away, and backward
/// only multiplies them by the incoming gradient (Hsu et al., 2024, "Liger Kernel"): three matrix
/// products in all, and the weight is not needed again.
///
/// # Panics
///
/// If a target is not below the size of the vocabulary.
pub fn linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    layout: HeadLayout,
    targets: Tensor<1, Int>,
    scale: f64,
) -> Tensor<1> {
    Tensor::from_dispatch(<Dispatch as LinearCrossEntropyOp>::fused_linear_cross_entropy(
        hidden.into_dispatch(),
        weight.into_dispatch(),
        layout,
        targets.into_dispatch(),
        scale,
    ))
}

/// [`linear_cross_entropy`] in plain burn, with all logits at once.
pub fn linear_cross_entropy_reference(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    layout: HeadLayout,
    targets: Tensor<1, Int>,
    scale: f64,
) -> Tensor<1> {
    let dtype = match hidden.dtype() {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    };
    let (hidden, weight) = (hidden.cast(dtype), weight.cast(dtype));
    let weight = match layout {
        HeadLayout::VocabRows => weight.transpose(),
        HeadLayout::VocabColumns => weight,
    };
    let log_probabilities = log_softmax(hidden.matmul(weight), 1);
    let ignored = targets.clone().lower_elem(0);
    let picked = log_probabilities.gather(1, targets.clamp_min(0).unsqueeze_dim(1)).squeeze_dim(1);
    picked.mask_fill(ignored, 0.0).sum() * -scale
}

/// The backends of [`linear_cross_entropy`].
#[backend_extension(Flex, Autodiff)]
pub trait LinearCrossEntropyOp: Backend {
    /// The scaled sum of the losses of all rows.
    fn fused_linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        layout: HeadLayout,
        targets: IntTensor<Self>,
        scale: f64,
    ) -> FloatTensor<Self>;
}

impl LinearCrossEntropyOp for Flex {
    fn fused_linear_cross_entropy(
        hidden: FlexTensor,
        weight: FlexTensor,
        layout: HeadLayout,
        targets: FlexTensor,
        scale: f64,
    ) -> FlexTensor {
        forward(&hidden, &weight, layout, &targets, scale, [false; 2]).0
    }
}

impl<C: CheckpointStrategy> LinearCrossEntropyOp for Autodiff<Flex, C> {
    fn fused_linear_cross_entropy(
        hidden: Tracked<C>,
        weight: Tracked<C>,
        layout: HeadLayout,
        targets: FlexTensor,
        scale: f64,
    ) -> Tracked<C> {
        let wanted = [hidden.is_tracked(), weight.is_tracked()];
        let (hidden_values, weight_values) = (hidden.primitive(), weight.primitive());
        let (loss, gradients) =
            forward(hidden_values, weight_values, layout, &targets, scale, wanted);
        let nodes = [hidden.node(), weight.node()];
        match CrossEntropyBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let dtypes = [hidden_values.dtype(), weight_values.dtype()];
                prep.finish(Saved { gradients, dtypes }, loss)
            }
            OpsKind::UnTracked(prep) => prep.finish(loss),
        }
    }
}

/// The gradients of the parents for an incoming gradient of 1, in the type they were computed in:
/// an `f16` gradient of a mean over many tokens may vanish before a loss scale has multiplied it.
#[derive(Clone, Debug)]
struct Saved {
    gradients: [Option<FlexTensor>; 2],
    dtypes: [DType; 2],
}

#[derive(Debug)]
struct CrossEntropyBackward;

impl Backward<Flex, 2> for CrossEntropyBackward {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<Flex>(&ops.node);
        let Saved { gradients, dtypes } = ops.state;
        for ((node, gradient), dtype) in ops.parents.into_iter().zip(gradients).zip(dtypes) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                let gradient = with_real!(gradient.dtype(), T => scaled::<T>(gradient, &dy));
                grads.register::<Flex>(node.id, cpu::in_float(gradient, dtype));
            }
        }
    }
}

/// `gradient` times the only value of `factor`, in place where nobody else holds `gradient`.
fn scaled<T: Real>(mut gradient: FlexTensor, factor: &FlexTensor) -> FlexTensor {
    let factor = Values::<T>::of(factor)[0];
    if factor != T::ONE {
        let values = T::storage_mut(&mut gradient).expect("the caller dispatches on this dtype");
        cpu::for_each_block(
            values,
            cpu::BLOCK,
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
    let [rows, d_model] = hidden.layout().shape().dims();
    let [vocab, weight_width] = match (layout, weight.layout().shape().dims()) {
        (HeadLayout::VocabRows, [vocab, width]) => [vocab, width],
        (HeadLayout::VocabColumns, [width, vocab]) => [vocab, width],
    };
    assert_eq!(
        d_model, weight_width,
        "cross entropy: rows of {d_model} values, a weight for {weight_width}"
    );
    let targets = cpu::int_values(targets);
    assert_eq!(rows, targets.len(), "cross entropy: {rows} rows and {} targets", targets.len());
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
            dhidden.map(|values| cpu::tensor_of(values, [rows, d_model], T::DTYPE)),
            dweight.map(|values| cpu::tensor_of(values, weight.layout().shape().clone(), T::DTYPE)),
        ];
        (cpu::tensor_of(vec![T::from_f64(sum * scale)], [1], T::DTYPE), gradients)
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
        let mut dhidden = cpu::room::<T>(wanted[0], rows * d_model);
        let mut dweight = cpu::room::<T>(wanted[1], d_model * vocab);
        let block_rows = block_rows(vocab);
        let mut logits = vec![T::ZERO; block_rows.min(rows) * vocab];
        let mut sum = 0.0;
        for start in (0..rows).step_by(block_rows) {
            let count = block_rows.min(rows - start);
            let hidden = Matrix::rows(&self.hidden[start * d_model..], [count, d_model]);
            let logits = &mut logits[..count * vocab];
            let out = MatrixMut::rows(logits, [count, vocab]);
            gemm(out, Output::Overwrite, T::ONE, hidden, self.weight, Threads::Pool);

            let targets = &self.targets[start..][..count];
            let losses: Vec<f64> = logits
                .par_chunks_mut(vocab)
                .zip(targets)
                .map(|(logits, &target)| {
                    cpu::simd(
                        #[inline(always)]
                        || row_loss(logits, target, self.scale),
                    )
                })
                .collect();
            sum += losses.iter().sum::<f64>();

            let dlogits = Matrix::rows(logits, [count, vocab]);
            if let Some(dhidden) = &mut dhidden {
                let out = MatrixMut::rows(&mut dhidden[start * d_model..], [count, d_model]);
                gemm(out, Output::Overwrite, T::ONE, dlogits, self.weight.t(), Threads::Pool);
            }
            if let Some(dweight) = &mut dweight {
                let (shape, lhs, rhs) = match self.layout {
                    HeadLayout::VocabRows => ([vocab, d_model], dlogits.t(), hidden),
                    HeadLayout::VocabColumns => ([d_model, vocab], hidden.t(), dlogits),
                };
                gemm(MatrixMut::rows(dweight, shape), Output::Add, T::ONE, lhs, rhs, Threads::Pool);
            }
        }
        (sum, [dhidden, dweight])
    }
}

/// Rows whose logits exist at one time: enough for the matrix products to run at full speed, fewer
/// where a large vocabulary would make the logits larger than 64 MiB.
fn block_rows(vocab: usize) -> usize {
    const LOGITS: usize = 1 << 24;
    (LOGITS / vocab.max(1)).clamp(16, 256)
}

/// The loss of one row, whose logits are replaced by their gradient.
#[inline(always)]
fn row_loss<T: Real>(logits: &mut [T], target: i64, scale: T) -> f64 {
    let Ok(target) = usize::try_from(target) else {
        logits.fill(T::ZERO);
        return 0.0;
    };
    let (shift, picked) = (max(logits), logits[target]);
    let sum = exp_sum(logits, shift);
    let factor = scale / sum;
    logits.iter_mut().for_each(|p| *p *= factor);
    logits[target] = logits[target] - scale;
    (sum.ln() + (shift - picked)).to_f64()
}
