//! Root-mean-square normalisation (Zhang and Sennrich, 2019, "Root Mean Square Layer
//! Normalization").

use burn::backend::autodiff::{
    Autodiff, NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::Tracked;
use super::cpu::real::{Real, dot};
use super::cpu::{self, Values, with_real};

/// `y = x · r · weight` with `r = 1 / sqrt(mean(x²) + eps)` over the last dimension.
///
/// `x` is `[.., d]`, `weight` `[d]`. Backward, with `x̂ = x · r`:
/// `dx = r · (dy · weight − x̂ · mean(dy · weight · x̂))`, `dW = Σ_rows dy · x̂`. `r` is computed
/// again rather than saved: it costs one pass over a row that has to be read anyway.
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(<Dispatch as RmsNormOp>::fused_rms_norm(x, weight, eps))
}

/// [`rms_norm`] in plain burn.
pub fn rms_norm_reference<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    let mean_square = (x.clone() * x.clone()).mean_dim(D - 1);
    x / (mean_square + eps).sqrt() * weight.unsqueeze()
}

/// The backends of [`rms_norm`].
#[backend_extension(Flex, Autodiff)]
pub trait RmsNormOp: Backend {
    /// `x` normalised over its last dimension, times `weight`.
    fn fused_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;
}

impl RmsNormOp for Flex {
    fn fused_rms_norm(x: FlexTensor, weight: FlexTensor, eps: f64) -> FlexTensor {
        forward(&x, &weight, eps)
    }
}

impl<C: CheckpointStrategy> RmsNormOp for Autodiff<Flex, C> {
    fn fused_rms_norm(x: Tracked<C>, weight: Tracked<C>, eps: f64) -> Tracked<C> {
        let y = forward(x.primitive(), weight.primitive(), eps);
        match RmsNormBackward.prepare::<C>([x.node(), weight.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let saved = Saved { x: prep.checkpoint(&x), weight: prep.checkpoint(&weight), eps };
                prep.finish(saved, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Clone, Debug)]
struct Saved {
    x: NodeId,
    weight: NodeId,
    eps: f64,
}

#[derive(Debug)]
struct RmsNormBackward;

impl Backward<Flex, 2> for RmsNormBackward {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<Flex>(&ops.node);
        let [x_node, weight_node] = ops.parents;
        let x = checkpointer.retrieve_node_output::<FlexTensor>(ops.state.x);
        let weight = checkpointer.retrieve_node_output::<FlexTensor>(ops.state.weight);
        let wanted = [x_node.is_some(), weight_node.is_some()];
        let [dx, dw] = gradients(&x, &weight, &dy, ops.state.eps, wanted);
        for (node, gradient) in [(x_node, dx), (weight_node, dw)] {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<Flex>(node.id, gradient);
            }
        }
    }
}

/// `1 / sqrt(mean(x²) + eps)` of one row.
#[inline(always)]
fn inverse_rms<T: Real>(x: &[T], eps: T) -> T {
    let mean_square = dot(x, x) / T::from_f64(x.len() as f64);
    T::ONE / (mean_square + eps).sqrt()
}

fn width_of(x: &FlexTensor, weight: &FlexTensor) -> usize {
    let width = x.layout().shape().iter().last().copied().unwrap_or(0);
    let [weight_width] = weight.layout().shape().dims();
    assert_eq!(
        width, weight_width,
        "rms_norm: rows of {width} values and a weight for {weight_width}"
    );
    assert!(width > 0, "rms_norm: rows without values");
    width
}

fn forward(x: &FlexTensor, weight: &FlexTensor, eps: f64) -> FlexTensor {
    let width = width_of(x, weight);
    let shape = x.layout().shape().clone();
    with_real!(x.dtype(), T => {
        let (x_values, weight) = (Values::<T>::of(x), Values::<T>::of(weight));
        let (x_values, weight, eps): (&[T], &[T], T) = (&x_values, &weight, T::from_f64(eps));
        let mut y = vec![T::ZERO; x_values.len()];
        let size = cpu::rows_per_block(width) * width;
        cpu::for_each_block(&mut y, size, #[inline(always)] |start, block| {
            let rows = x_values[start..].chunks_exact(width);
            for (y, x) in block.chunks_exact_mut(width).zip(rows) {
                let r = inverse_rms(x, eps);
                for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
                    *y = x * r * w;
                }
            }
        });
        cpu::tensor_of(y, shape, x.dtype())
    })
}

fn gradients(
    x: &FlexTensor,
    weight: &FlexTensor,
    dy: &FlexTensor,
    eps: f64,
    wanted: [bool; 2],
) -> [Option<FlexTensor>; 2] {
    let width = width_of(x, weight);
    with_real!(x.dtype(), T => {
        let x_values = Values::<T>::of(x);
        let (weight_values, dy_values) = (Values::<T>::of(weight), Values::<T>::of(dy));
        let operands: [&[T]; 3] = [&x_values, &weight_values, &dy_values];
        let [dx, dw] = gradient_values(operands, width, T::from_f64(eps), wanted);
        [
            dx.map(|dx| cpu::tensor_of(dx, x.layout().shape().clone(), x.dtype())),
            dw.map(|dw| cpu::tensor_of(dw, [width], weight.dtype())),
        ]
    })
}

fn gradient_values<T: Real>(
    [x, weight, dy]: [&[T]; 3],
    width: usize,
    eps: T,
    wanted: [bool; 2],
) -> [Option<Vec<T>>; 2] {
    // At least 16 rows, so that the partial sums of dW stay small beside x itself.
    let size = cpu::rows_per_block(width).max(16) * width;
    let count = x.len().div_ceil(size);
    let mut dx = cpu::room::<T>(wanted[0], x.len());
    let mut partial_dw = cpu::room::<T>(wanted[1], count * width);
    cpu::blocks(&mut dx, size, count)
        .into_par_iter()
        .zip(cpu::blocks(&mut partial_dw, width, count))
        .enumerate()
        .for_each(|(i, (mut dx, mut dw))| {
            let rows = i * size..x.len().min((i + 1) * size);
            let (x, dy) = (&x[rows.clone()], &dy[rows]);
            cpu::simd(
                #[inline(always)]
                || {
                    for (row, (x, dy)) in
                        x.chunks_exact(width).zip(dy.chunks_exact(width)).enumerate()
                    {
                        let r = inverse_rms(x, eps);
                        if let Some(dw) = &mut dw {
                            for ((dw, &x), &dy) in dw.iter_mut().zip(x).zip(dy) {
                                *dw += dy * (x * r);
                            }
                        }
                        if let Some(dx) = &mut dx {
                            let dx = &mut dx[row * width..][..width];
                            for ((dx, &dy), &w) in dx.iter_mut().zip(dy).zip(weight) {
                                *dx = dy * w;
                            }
                            let shift = dot(dx, x) * r / T::from_f64(width as f64);
                            for (dx, &x) in dx.iter_mut().zip(x) {
                                *dx = r * (*dx - x * r * shift);
                            }
                        }
                    }
                },
            );
        });
    let dw = partial_dw.map(|partial| {
        let mut dw = vec![T::ZERO; width];
        for partial in partial.chunks_exact(width) {
            for (dw, &partial) in dw.iter_mut().zip(partial) {
                *dw += partial;
            }
        }
        dw
    });
    [dx, dw]
}
