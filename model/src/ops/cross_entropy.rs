//! Output projection and cross-entropy loss in one operation.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{
    Backend, Dispatch, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, FloatDType, Int, Tensor, activation::log_softmax};
use burn_backend::TensorMetadata;

use super::plain::{FusedOp, is_plain};
use super::tape::{Tracked, record};

/// The layout of the weight of an output projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadLayout {
    /// `[vocab, d_model]`, as in the embedding, which a tied head shares.
    VocabRows,
    /// `[d_model, vocab]`, as in the weight of a [`linear`](super::linear()).
    VocabColumns,
}

/// Options of [`linear_cross_entropy_with`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogitOptions {
    /// Positive bound `c` that turns logits into `c · tanh(logits / c)` (Gemma 2, Gemma Team, 2024).
    pub softcap: Option<f64>,
    /// Weight of the z-loss `ln²(Σ exp(logits))` of a row, which keeps logits from drifting (PaLM, Chowdhery
    /// et al., 2022).
    pub z_loss: Option<f64>,
}

/// The results of [`linear_cross_entropy_with`], tensors of shape `[1]`.
#[derive(Clone, Debug)]
pub struct LogitLoss {
    /// The sum of cross-entropy and z-loss.
    pub total: Tensor<1>,
    /// The z-loss times its weight and `scale`, if there is one; without gradient.
    pub z_loss: Option<Tensor<1>>,
}

/// Computes `scale · Σ_rows −log softmax(hidden · W)[target]`, a tensor of one value.
///
/// `hidden` is `[rows, d_model]`, `targets` `[rows]`; a row with a negative target is ignored. The CPU sums in double
/// precision, a GPU in a tree of `f32`. The result is `f32` (`f64` for `f64` operands) for every dtype of the
/// operands.
///
/// Logits exist for one block of rows at a time and are never saved. If `hidden` or `weight` is tracked, the
/// gradients of the block, `dlogits = scale · (softmax − onehot(target))`, `dhidden = dlogits · Wᵀ` and `dW +=
/// hiddenᵀ · dlogits`, are computed immediately, and backward only multiplies them by the incoming gradient (Hsu et
/// al., 2024, "Liger Kernel"). This takes three matrix products in total, and backward does not read the weight.
///
/// # Panics
///
/// If a target is not below the size of the vocabulary. On a GPU, where the check would have to wait for the device,
/// the loss is NaN instead.
pub fn linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    layout: HeadLayout,
    targets: Tensor<1, Int>,
    scale: f64,
) -> Tensor<1> {
    linear_cross_entropy_with(hidden, weight, layout, targets, None, scale, LogitOptions::default()).total
}

/// Computes [`linear_cross_entropy`] with capped logits and a z-loss: `scale · Σ_rows (−log softmax(l)[target] + z ·
/// ln²(Σ exp(l)))`, where `l = c · tanh(hidden · W / c)`. Both losses ignore rows without a target, and multiply each
/// row by its weight in `row_weights` `[rows]`, in f32, if given; the weights are constants. Neither adds matrix products.
///
/// # Panics
///
/// As for [`linear_cross_entropy`].
pub fn linear_cross_entropy_with(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    layout: HeadLayout,
    targets: Tensor<1, Int>,
    row_weights: Option<Tensor<1>>,
    scale: f64,
    options: LogitOptions,
) -> LogitLoss {
    let row_weights = row_weights.map(Tensor::detach);
    if is_plain(FusedOp::CrossEntropy) {
        return linear_cross_entropy_with_reference(
            hidden,
            weight,
            layout,
            targets,
            row_weights,
            scale,
            options,
        );
    }
    let row_weights = row_weights.map(Tensor::into_dispatch);
    let (hidden, weight) = (hidden.into_dispatch(), weight.into_dispatch());
    let targets = targets.into_dispatch();
    let losses = Tensor::<1>::from_dispatch(match row_weights {
        None => Dispatch::fused_linear_cross_entropy(hidden, weight, layout, targets, scale, options),
        Some(weights) => Dispatch::fused_weighted_linear_cross_entropy(
            hidden, weight, layout, targets, weights, scale, options,
        ),
    });
    match options.z_loss {
        None => LogitLoss { total: losses, z_loss: None },
        Some(_) => LogitLoss {
            total: losses.clone().narrow(0, 0, 1),
            z_loss: Some(losses.without_autodiff().narrow(0, 1, 1)),
        },
    }
}

/// Computes [`linear_cross_entropy`] in plain burn, with all logits at once.
pub fn linear_cross_entropy_reference(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    layout: HeadLayout,
    targets: Tensor<1, Int>,
    scale: f64,
) -> Tensor<1> {
    let options = LogitOptions::default();
    linear_cross_entropy_with_reference(hidden, weight, layout, targets, None, scale, options).total
}

/// Computes [`linear_cross_entropy_with`] in plain burn, with all logits at once.
pub fn linear_cross_entropy_with_reference(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    layout: HeadLayout,
    targets: Tensor<1, Int>,
    row_weights: Option<Tensor<1>>,
    scale: f64,
    options: LogitOptions,
) -> LogitLoss {
    let dtype = match hidden.dtype() {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    };
    let (hidden, weight) = (hidden.cast(dtype), weight.cast(dtype));
    let weight = match layout {
        HeadLayout::VocabRows => weight.transpose(),
        HeadLayout::VocabColumns => weight,
    };
    let logits = match options.softcap {
        Some(cap) => soft_cap(hidden.matmul(weight), cap),
        None => hidden.matmul(weight),
    };
    let log_probabilities = log_softmax(logits.clone(), 1);
    let ignored = targets.clone().lower_elem(0);
    let targets = targets.clamp_min(0).unsqueeze_dim(1);
    let picked = log_probabilities.clone().gather(1, targets.clone()).squeeze_dim::<1>(1);
    let row_weights = row_weights.map(|weights| weights.detach().cast(dtype));
    let weighted = |losses: Tensor<1>| match &row_weights {
        Some(weights) => losses * weights.clone(),
        None => losses,
    };
    let total = weighted(picked.mask_fill(ignored.clone(), 0.0)).sum() * -scale;
    let Some(weight) = options.z_loss else { return LogitLoss { total, z_loss: None } };
    // For any column: the logit minus its log-probability.
    let log_sums = (logits - log_probabilities).gather(1, targets).squeeze_dim::<1>(1);
    let z_loss = weighted(log_sums.powi_scalar(2).mask_fill(ignored, 0.0)).sum() * (scale * weight);
    LogitLoss { total: total + z_loss.clone(), z_loss: Some(z_loss.without_autodiff()) }
}

/// Returns `cap · tanh(logits / cap)`, which lies between `-cap` and `cap`.
pub fn soft_cap<const D: usize>(logits: Tensor<D>, cap: f64) -> Tensor<D> {
    logits.div_scalar(cap).tanh().mul_scalar(cap)
}

/// A backend that can compute [`linear_cross_entropy`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait LinearCrossEntropyOp: Backend {
    /// Returns the scaled sum of the losses of all rows, `[1]`. With a z-loss, returns `[2]`, where the second value
    /// is only the z-loss, without gradient.
    fn fused_linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        layout: HeadLayout,
        targets: IntTensor<Self>,
        scale: f64,
        options: LogitOptions,
    ) -> FloatTensor<Self>;

    /// Like [`LinearCrossEntropyOp::fused_linear_cross_entropy`], with a weight for each row, which is a constant.
    fn fused_weighted_linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        layout: HeadLayout,
        targets: IntTensor<Self>,
        row_weights: FloatTensor<Self>,
        scale: f64,
        options: LogitOptions,
    ) -> FloatTensor<Self>;
}

/// A loss, and the gradients of `hidden` and `weight` for an incoming gradient of 1.
pub type LossAndGradients<B> = (FloatTensor<B>, [Option<FloatTensor<B>>; 2]);

/// The targets of all rows.
pub struct Targets<'a, B: Backend> {
    /// A token id for each row; a row with a negative id is ignored.
    pub ids: &'a IntTensor<B>,
    /// A factor for the losses of each row, in f32.
    pub weights: Option<&'a FloatTensor<B>>,
}

/// The kernels that a backend implements for [`linear_cross_entropy`].
pub trait CrossEntropyKernels: Backend {
    /// Returns the losses and the requested gradients, in the type in which they were computed. They are not rounded
    /// to `f16` yet, because a gradient of a mean over many tokens could vanish before it is multiplied by the loss
    /// scale.
    fn cross_entropy_forward(
        hidden: &FloatTensor<Self>,
        weight: &FloatTensor<Self>,
        layout: HeadLayout,
        targets: Targets<'_, Self>,
        scale: f64,
        options: LogitOptions,
        wanted: [bool; 2],
    ) -> LossAndGradients<Self>;
    /// Multiplies `gradient` by the first value of `dy`, and converts it to `dtype`; in place if nothing else
    /// holds `gradient`.
    fn cross_entropy_backward(
        gradient: FloatTensor<Self>,
        dy: &FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self>;
}

impl<B: CrossEntropyKernels> LinearCrossEntropyOp for B {
    fn fused_linear_cross_entropy(
        hidden: FloatTensor<B>,
        weight: FloatTensor<B>,
        layout: HeadLayout,
        targets: IntTensor<B>,
        scale: f64,
        options: LogitOptions,
    ) -> FloatTensor<B> {
        let targets = Targets { ids: &targets, weights: None };
        B::cross_entropy_forward(&hidden, &weight, layout, targets, scale, options, [false; 2]).0
    }

    fn fused_weighted_linear_cross_entropy(
        hidden: FloatTensor<B>,
        weight: FloatTensor<B>,
        layout: HeadLayout,
        targets: IntTensor<B>,
        row_weights: FloatTensor<B>,
        scale: f64,
        options: LogitOptions,
    ) -> FloatTensor<B> {
        let targets = Targets { ids: &targets, weights: Some(&row_weights) };
        B::cross_entropy_forward(&hidden, &weight, layout, targets, scale, options, [false; 2]).0
    }
}

impl<B: CrossEntropyKernels, C: CheckpointStrategy> LinearCrossEntropyOp for Autodiff<B, C> {
    fn fused_linear_cross_entropy(
        hidden: Tracked<B, C>,
        weight: Tracked<B, C>,
        layout: HeadLayout,
        targets: IntTensor<B>,
        scale: f64,
        options: LogitOptions,
    ) -> Tracked<B, C> {
        let targets = Targets { ids: &targets, weights: None };
        on_tape::<B, C>(&hidden, &weight, layout, targets, scale, options)
    }

    fn fused_weighted_linear_cross_entropy(
        hidden: Tracked<B, C>,
        weight: Tracked<B, C>,
        layout: HeadLayout,
        targets: IntTensor<B>,
        row_weights: Tracked<B, C>,
        scale: f64,
        options: LogitOptions,
    ) -> Tracked<B, C> {
        let targets = Targets { ids: &targets, weights: Some(row_weights.primitive()) };
        on_tape::<B, C>(&hidden, &weight, layout, targets, scale, options)
    }
}

/// Computes the loss and the gradients, and records the loss on the tape.
fn on_tape<B: CrossEntropyKernels, C: CheckpointStrategy>(
    hidden: &Tracked<B, C>,
    weight: &Tracked<B, C>,
    layout: HeadLayout,
    targets: Targets<'_, B>,
    scale: f64,
    options: LogitOptions,
) -> Tracked<B, C> {
    let wanted = [hidden.is_tracked(), weight.is_tracked()];
    let (x, w) = (hidden.primitive(), weight.primitive());
    let (loss, gradients) = B::cross_entropy_forward(x, w, layout, targets, scale, options, wanted);
    record::<B, C, _, _>(
        [hidden.node(), weight.node()],
        loss,
        |_| (gradients, [hidden.dtype(), weight.dtype()]),
        |mut step, dy, (gradients, dtypes)| {
            for (parent, gradient) in gradients.into_iter().enumerate() {
                if let Some(gradient) = gradient {
                    let gradient = B::cross_entropy_backward(gradient, &dy, dtypes[parent]);
                    step.register::<B>(parent, gradient);
                }
            }
        },
    )
}

/// Returns the number of rows whose logits exist at a time: enough for the matrix products to run at full speed, but
/// fewer if a large vocabulary would make the logits larger than 64 MiB (512 MiB on a GPU).
pub(crate) fn logit_rows(vocab: usize, on_host: bool) -> usize {
    let (elements, least, most) =
        if on_host { (1 << 24, 16, 256) } else { (1 << 27, DEVICE_ROWS, 16 * DEVICE_ROWS) };
    let rows = (elements / vocab.max(1)).clamp(least, most);
    if on_host { rows } else { rows / DEVICE_ROWS * DEVICE_ROWS }
}

/// Alignment, in rows, of blocks of rows on a GPU, so that a block begins at a multiple of 512 bytes, as devices
/// require of the offset of a buffer.
const DEVICE_ROWS: usize = 256;

impl HeadLayout {
    /// Returns the number of rows of `hidden`, their width, and the size of the vocabulary.
    pub(super) fn sizes(
        self,
        hidden: &impl TensorMetadata,
        weight: &impl TensorMetadata,
        targets: &impl TensorMetadata,
    ) -> [usize; 3] {
        let [rows, d_model] = hidden.shape().dims();
        let [vocab, weight_width] = match (self, weight.shape().dims()) {
            (HeadLayout::VocabRows, [vocab, width]) => [vocab, width],
            (HeadLayout::VocabColumns, [width, vocab]) => [vocab, width],
        };
        assert_eq!(
            d_model, weight_width,
            "cross entropy: rows of {d_model} values, a weight for {weight_width}"
        );
        let count = targets.shape().num_elements();
        assert_eq!(rows, count, "cross entropy: {rows} rows and {count} targets");
        [rows, d_model, vocab]
    }
}
