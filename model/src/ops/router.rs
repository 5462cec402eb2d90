//! The operations of a router of experts, from its logits to the experts' weights.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{
    Backend, Dispatch, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{BoolDType, DType, FloatDType, IndexingUpdateOp, Int, Shape, Tensor};
use burn_backend::{AutodiffBackend, TensorMetadata, get_device_settings};

use super::tape::{Tracked, record};

/// Computes the softmax of each row of `logits` `[tokens, experts]`. As in transformers, it is computed in f32 if the
/// logits are in half precision.
///
/// burn's own softmax gives different bits with and without autodiff, but a block that is recomputed in backward must
/// reproduce the bits of its first run. Backward, for a row `p`: `dlogits = p · (dp − Σ dp · p)`.
pub fn router_softmax(logits: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::fused_router_softmax(logits.into_dispatch()))
}

/// Returns the `probabilities` `[tokens, experts]` of each token's `chosen` experts `[tokens, k]`, divided by their
/// sum if `normalized`: `[tokens, k]`.
///
/// Backward, for a token with weights `w` whose sum was `s` before the division: `dp = (dw − Σ dw · w) / s` for the
/// chosen experts, or `dw` if weights are not normalized.
pub fn router_weights(probabilities: Tensor<2>, chosen: Tensor<2, Int>, normalized: bool) -> Tensor<2> {
    let (probabilities, chosen) = (probabilities.into_dispatch(), chosen.into_dispatch());
    Tensor::from_dispatch(Dispatch::fused_router_weights(probabilities, chosen, normalized))
}

/// Returns how often each expert is `chosen`, `[tokens, k]`, as a float: `[experts]`. `probabilities` `[tokens,
/// experts]` are those that experts were chosen by. The result has no gradient.
pub fn router_load(probabilities: Tensor<2>, chosen: Tensor<2, Int>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::fused_router_load(probabilities.into_dispatch(), chosen.into_dispatch()))
}

/// Returns the mean of each expert's `probabilities` `[tokens, experts]`: `[experts]`.
pub fn router_means(probabilities: Tensor<2>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::fused_router_means(probabilities.into_dispatch()))
}

/// Sums of [`router_load`] and of [`router_means`] over the routers of one forward pass. Clones share the sums. A
/// layer that runs again in backward counts once.
#[derive(Clone, Default)]
pub struct RouterSums(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// The layers that have been added.
    layers: Vec<usize>,
    /// The sums of loads and means, as tensors of the backend.
    sums: Option<Box<dyn Any + Send>>,
}

impl RouterSums {
    /// Adds a layer, and returns the sums before and after. Returns `None` if the layer was added before.
    #[expect(clippy::type_complexity, reason = "two pairs of tensors")]
    fn add<B: Backend>(
        &self,
        layer: usize,
        load: FloatTensor<B>,
        means: FloatTensor<B>,
    ) -> Option<(Option<[FloatTensor<B>; 2]>, [FloatTensor<B>; 2])> {
        // Each statement leaves the state valid, so it is valid after a panic.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.layers.contains(&layer) {
            return None;
        }
        state.layers.push(layer);
        let before = state.get::<B>();
        let after = match before.clone() {
            Some([loads, all]) => [B::float_add(loads, load), B::float_add(all, means)],
            None => [load, means],
        };
        state.sums = Some(Box::new(after.clone()));
        Some((before, after))
    }

    /// Returns the sum of the loads so far.
    fn loads<B: Backend>(&self) -> Option<FloatTensor<B>> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.get::<B>().map(|[loads, _]| loads)
    }
}

impl State {
    fn get<B: Backend>(&self) -> Option<[FloatTensor<B>; 2]> {
        self.sums.as_ref()?.downcast_ref::<[FloatTensor<B>; 2]>().cloned()
    }
}

impl fmt::Debug for RouterSums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RouterSums")
    }
}

/// Returns the contribution of `layer` to the product of both sums over all layers of a pass, `[1]`. The
/// contributions of all layers add up to `Σ_e (Σ_l load_l) (Σ_l means_l)`. `means` `[experts]` are those of
/// [`router_means`], and `load` `[experts]`, in the same dtype, is [`router_load`] in any scale.
///
/// The sum of all loads is known only after the last layer, so backward reads it: `dmeans_l = dy · Σ_m load_m`. The
/// load has no gradient. A second run of a layer returns 0, and has the same gradient.
pub fn router_balance(means: Tensor<1>, load: Tensor<1>, sums: &RouterSums, layer: usize) -> Tensor<1> {
    let (means, load) = (means.into_dispatch(), load.into_dispatch());
    Tensor::from_dispatch(Dispatch::fused_router_balance(means, load, sums.clone(), layer))
}

/// A backend that can compute the operations of a router.
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait RouterOp: Backend {
    /// Computes [`router_softmax`].
    fn fused_router_softmax(logits: FloatTensor<Self>) -> FloatTensor<Self>;
    /// Computes [`router_weights`].
    fn fused_router_weights(
        probabilities: FloatTensor<Self>,
        chosen: IntTensor<Self>,
        normalized: bool,
    ) -> FloatTensor<Self>;
    /// Computes [`router_load`].
    fn fused_router_load(probabilities: FloatTensor<Self>, chosen: IntTensor<Self>) -> FloatTensor<Self>;
    /// Computes [`router_means`].
    fn fused_router_means(probabilities: FloatTensor<Self>) -> FloatTensor<Self>;
    /// Computes [`router_balance`].
    fn fused_router_balance(
        means: FloatTensor<Self>,
        load: FloatTensor<Self>,
        sums: RouterSums,
        layer: usize,
    ) -> FloatTensor<Self>;
}

/// The kernels of the operations of a router. By default, they use burn's operations.
pub trait RouterKernels: Backend {
    /// Returns the probabilities.
    fn softmax_forward(logits: FloatTensor<Self>) -> FloatTensor<Self> {
        let logits = match logits.dtype() {
            DType::F16 | DType::BF16 => Self::float_cast(logits, FloatDType::F32),
            _ => logits,
        };
        let largest = Self::float_max_dim(logits.clone(), 1);
        let powers = Self::float_exp(Self::float_sub(logits, largest));
        Self::float_div(powers.clone(), Self::float_sum_dim(powers, 1))
    }

    /// Returns the gradient of the logits, in `dtype`.
    fn softmax_backward(
        probabilities: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        let mean = Self::float_sum_dim(Self::float_mul(gradient.clone(), probabilities.clone()), 1);
        let gradient = Self::float_mul(probabilities, Self::float_sub(gradient, mean));
        if gradient.dtype() == dtype { gradient } else { Self::float_cast(gradient, dtype.into()) }
    }

    /// Returns the weights.
    fn weights_forward(
        probabilities: FloatTensor<Self>,
        chosen: IntTensor<Self>,
        normalized: bool,
    ) -> FloatTensor<Self> {
        let weights = Self::float_gather(1, probabilities, chosen);
        if !normalized {
            return weights;
        }
        Self::float_div(weights.clone(), Self::float_sum_dim(weights, 1))
    }

    /// Returns the gradient of the probabilities.
    fn weights_backward(
        probabilities: FloatTensor<Self>,
        chosen: IntTensor<Self>,
        gradient: FloatTensor<Self>,
        normalized: bool,
    ) -> FloatTensor<Self> {
        let (shape, dtype) = (probabilities.shape(), probabilities.dtype());
        let zeros = Self::float_zeros(shape, &probabilities.device(), dtype.into());
        let gradient = if normalized {
            let weights = Self::float_gather(1, probabilities, chosen.clone());
            let sum = Self::float_sum_dim(weights.clone(), 1);
            let mean = Self::float_sum_dim(Self::float_mul(gradient.clone(), weights), 1);
            let mean = Self::float_div(mean, sum.clone());
            Self::float_div(Self::float_sub(gradient, mean), sum)
        } else {
            gradient
        };
        Self::float_scatter(1, zeros, chosen, gradient, IndexingUpdateOp::Add)
    }

    /// Returns the number of choices of each expert.
    fn load(probabilities: FloatTensor<Self>, chosen: IntTensor<Self>) -> FloatTensor<Self> {
        let (device, dtype) = (probabilities.device(), FloatDType::F32);
        let settings = get_device_settings::<Self>(&device);
        let [_, experts] = probabilities.shape().dims();
        let count = chosen.shape().num_elements();
        // Indices are compared as floats, which are exact: two integer tensors need not have the same type.
        let indices = Self::int_arange(0..experts as i64, &device, settings.int_dtype);
        let indices = Self::float_reshape(Self::int_into_float(indices, dtype), Shape::new([1, experts]));
        let chosen = Self::float_reshape(Self::int_into_float(chosen, dtype), Shape::new([count, 1]));
        let [indices, chosen] =
            [indices, chosen].map(|tensor| Self::float_expand(tensor, Shape::new([count, experts])));
        let equal: BoolDType = settings.bool_dtype;
        let hits = Self::bool_into_float(Self::float_equal(chosen, indices, equal), dtype);
        Self::float_reshape(Self::float_sum_dim(hits, 0), Shape::new([experts]))
    }

    /// Returns the means.
    fn means_forward(probabilities: FloatTensor<Self>) -> FloatTensor<Self> {
        let [_, experts] = probabilities.shape().dims();
        Self::float_reshape(Self::float_mean_dim(probabilities, 0), Shape::new([experts]))
    }

    /// Returns the gradient of the probabilities of `tokens` tokens.
    fn means_backward(gradient: FloatTensor<Self>, tokens: usize) -> FloatTensor<Self> {
        let [experts] = gradient.shape().dims();
        let share = Self::float_div_scalar(gradient, (tokens as f64).into());
        let row = Self::float_reshape(share, Shape::new([1, experts]));
        Self::float_expand(row, Shape::new([tokens, experts]))
    }
}

/// Returns the contribution of a layer to the product of the sums; see [`router_balance`].
fn balance_forward<B: Backend>(
    means: FloatTensor<B>,
    load: FloatTensor<B>,
    sums: &RouterSums,
    layer: usize,
) -> FloatTensor<B> {
    let dot = |a, b| B::float_sum(B::float_mul(a, b));
    match sums.add::<B>(layer, load.clone(), means.clone()) {
        None => B::float_mul_scalar(B::float_sum(means), 0.0.into()),
        Some((None, _)) => dot(load, means),
        Some((Some([loads, _]), [_, all])) => B::float_add(dot(loads, means), dot(load, all)),
    }
}

#[cfg(feature = "cube")]
impl RouterKernels for burn_cubecl::CubeBackend {}

impl<B: RouterKernels> RouterOp for B {
    fn fused_router_softmax(logits: FloatTensor<B>) -> FloatTensor<B> {
        B::softmax_forward(logits)
    }

    fn fused_router_weights(
        probabilities: FloatTensor<B>,
        chosen: IntTensor<B>,
        normalized: bool,
    ) -> FloatTensor<B> {
        B::weights_forward(probabilities, chosen, normalized)
    }

    fn fused_router_load(probabilities: FloatTensor<B>, chosen: IntTensor<B>) -> FloatTensor<B> {
        B::load(probabilities, chosen)
    }

    fn fused_router_means(probabilities: FloatTensor<B>) -> FloatTensor<B> {
        B::means_forward(probabilities)
    }

    fn fused_router_balance(
        means: FloatTensor<B>,
        load: FloatTensor<B>,
        sums: RouterSums,
        layer: usize,
    ) -> FloatTensor<B> {
        balance_forward::<B>(means, load, &sums, layer)
    }
}

impl<B: RouterKernels, C: CheckpointStrategy> RouterOp for Autodiff<B, C> {
    fn fused_router_softmax(logits: Tracked<B, C>) -> Tracked<B, C> {
        let dtype = logits.dtype();
        let (logits, node) = logits.into_parts();
        let probabilities = B::softmax_forward(logits);
        let saved = probabilities.clone();
        record::<B, C, _, _>(
            [node],
            probabilities,
            |_| (saved, dtype),
            |mut step, dy, (probabilities, dtype)| {
                step.register::<B>(0, B::softmax_backward(probabilities, dy, dtype));
            },
        )
    }

    fn fused_router_weights(
        probabilities: Tracked<B, C>,
        chosen: IntTensor<B>,
        normalized: bool,
    ) -> Tracked<B, C> {
        let weights = B::weights_forward(probabilities.primitive().clone(), chosen.clone(), normalized);
        record::<B, C, _, _>(
            [probabilities.node()],
            weights,
            |save| (save(&probabilities), chosen, normalized),
            |mut step, dy, (probabilities, chosen, normalized)| {
                let probabilities = step.value::<B>(probabilities);
                step.register::<B>(0, B::weights_backward(probabilities, chosen, dy, normalized));
            },
        )
    }

    fn fused_router_load(probabilities: Tracked<B, C>, chosen: IntTensor<B>) -> Tracked<B, C> {
        Self::from_inner(B::load(probabilities.into_primitive(), chosen))
    }

    fn fused_router_means(probabilities: Tracked<B, C>) -> Tracked<B, C> {
        let [tokens, _] = probabilities.shape().dims();
        let (probabilities, node) = probabilities.into_parts();
        record::<B, C, _, _>(
            [node],
            B::means_forward(probabilities),
            |_| tokens,
            |mut step, dy, tokens| step.register::<B>(0, B::means_backward(dy, tokens)),
        )
    }

    fn fused_router_balance(
        means: Tracked<B, C>,
        load: Tracked<B, C>,
        sums: RouterSums,
        layer: usize,
    ) -> Tracked<B, C> {
        let (means, node) = means.into_parts();
        let shape = means.shape();
        record::<B, C, _, _>(
            [node],
            balance_forward::<B>(means, load.into_primitive(), &sums, layer),
            |_| (sums, shape),
            |mut step, dy, (sums, shape)| {
                if let Some(loads) = sums.loads::<B>() {
                    step.register::<B>(0, B::float_mul(B::float_expand(dy, shape), loads));
                }
            },
        )
    }
}
