//! Small calls of every fused operation, and the same calls of its reference.

use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::ops::{
    self, ExpertProjections, FusedOp, HeadLayout, LogitOptions, Residual, RotaryFrequencies, Routing,
};

/// Parameters, other than dtypes, that kernels are compiled for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shapes {
    /// Kinds of attention layers: head width, and maximum rows that a row attends to.
    pub attention: Vec<(usize, Option<usize>)>,
    /// True if the model has layers of experts.
    pub experts: bool,
}

type Op = Box<dyn Fn(&[Tensor<1>]) -> Tensor<1>>;

/// One call of an operation: functions of flat tensors of these sizes.
pub(super) struct Case {
    pub(super) op: FusedOp,
    pub(super) sizes: Vec<usize>,
    pub(super) fused: Op,
    pub(super) plain: Op,
}

/// Creates a case of `op`: the same call of a function and of its reference.
macro_rules! case {
    ($op:ident, $($rest:tt)+) => {
        case!((FusedOp::$op), $($rest)+)
    };
    (($op:expr), $sizes:expr, |$t:ident, $f:ident| $call:expr, $fused:expr, $plain:expr) => {
        Case {
            op: $op,
            sizes: $sizes.to_vec(),
            fused: Box::new(move |$t: &[Tensor<1>]| {
                let $f = $fused;
                $call
            }),
            plain: Box::new(move |$t: &[Tensor<1>]| {
                let $f = $plain;
                $call
            }),
        }
    };
}

pub(super) fn cases(shapes: &Shapes) -> Vec<Case> {
    // Widths are multiples of kernels' vector sizes, like those of models; numbers of rows are odd.
    let mut cases = Vec::new();
    cases.extend(linear([33, 64, 128]));
    for size in [[33, 64], [5, 1028]] {
        cases.extend(rows(size));
    }
    for &(head_dim, window) in &shapes.attention {
        for size in [[2, 67, 4, 2], [1, 16, 2, 2]] {
            cases.extend(heads(FusedOp::Attention, size, head_dim, window));
        }
        if WARPGROUP_HEADS.contains(&head_dim) {
            // The last one is long enough for loops without masks, and for stages that are reused.
            for size in [[2, 67, 4, 2], [1, 16, 2, 2], [1, 300, 2, 1]] {
                cases.extend(heads(FusedOp::WarpgroupAttention, size, head_dim, window).into_iter().skip(1));
            }
        }
    }
    for layout in [HeadLayout::VocabRows, HeadLayout::VocabColumns] {
        cases.push(cross_entropy(layout, [33, 32, 304]));
    }
    cases.push(embedding([50, 40], [2, 17]));
    if shapes.experts {
        cases.push(experts([19, 16, 24], 3));
    }
    cases
}

fn linear([rows, d_in, d_out]: [usize; 3]) -> [Case; 2] {
    let sizes = [rows * d_in, d_in * d_out, d_out];
    type Linear = fn(Tensor<2>, Tensor<2>, Option<Tensor<1>>) -> Tensor<2>;
    [
        case!(
            MatrixProduct,
            sizes[..2],
            |t, f| f(matrix(&t[0], [rows, d_in]), matrix(&t[1], [d_in, d_out]), None).flatten(0, 1),
            ops::linear as Linear,
            ops::linear_reference as Linear
        ),
        case!(
            Linear,
            sizes,
            |t, f| {
                let (x, weight) = (matrix(&t[0], [rows, d_in]), matrix(&t[1], [d_in, d_out]));
                f(x, weight, Some(t[2].clone())).flatten(0, 1)
            },
            ops::linear as Linear,
            ops::linear_reference as Linear
        ),
    ]
}

fn rows(shape @ [rows, width]: [usize; 2]) -> [Case; 7] {
    let len = rows * width;
    type Norm = fn(Tensor<2>, Tensor<1>, f64) -> Tensor<2>;
    type Stream = fn(Tensor<2>, Tensor<1>, Tensor<2>) -> Tensor<2>;
    let stream: Stream = |x, weight, y| {
        let stream = Residual::new(x);
        let normed = stream.rms_norm(weight, 1e-5);
        stream.add_result(normed * y)
    };
    let plain_stream: Stream = |x, weight, y| x.clone() + ops::rms_norm_reference(x, weight, 1e-5) * y;
    let streams: Stream = |x, weight, y| {
        let (stream, normed) = Residual::new(x).add_result_and_norm(y.clone() * 2.0, weight, 1e-5);
        stream.add_result(normed * y)
    };
    let plain_streams: Stream = |x, weight, y| {
        let x = x + y.clone() * 2.0;
        x.clone() + ops::rms_norm_reference(x, weight, 1e-5) * y
    };
    type Gate = fn(Tensor<1>, Tensor<1>) -> Tensor<1>;
    type Unary = fn(Tensor<1>) -> Tensor<1>;
    type Drop = fn(Tensor<1>, f64, u64, u64) -> Tensor<1>;
    [
        case!(
            RmsNorm,
            [len, width],
            |t, f| f(matrix(&t[0], shape), t[1].clone(), 1e-5).flatten(0, 1),
            ops::rms_norm as Norm,
            ops::rms_norm_reference as Norm
        ),
        case!(
            Residual,
            [len, width, len],
            |t, f| f(matrix(&t[0], shape), t[1].clone(), matrix(&t[2], shape)).flatten(0, 1),
            stream,
            plain_stream
        ),
        case!(
            Residual,
            [len, width, len],
            |t, f| f(matrix(&t[0], shape), t[1].clone(), matrix(&t[2], shape)).flatten(0, 1),
            streams,
            plain_streams
        ),
        case!(
            Swiglu,
            [len, len],
            |t, f| f(t[0].clone(), t[1].clone()),
            ops::swiglu as Gate,
            ops::swiglu_reference as Gate
        ),
        case!(
            Geglu,
            [len, len],
            |t, f| f(t[0].clone(), t[1].clone()),
            ops::geglu as Gate,
            ops::geglu_reference as Gate
        ),
        case!(
            SquaredRelu,
            [len],
            |t, f| f(t[0].clone()),
            ops::squared_relu as Unary,
            ops::squared_relu_reference as Unary
        ),
        case!(
            Dropout,
            [len],
            |t, f| f(t[0].clone(), 0.25, 7, 1_000),
            ops::dropout as Drop,
            ops::dropout_reference as Drop
        ),
    ]
}

/// Head widths for which there are warpgroup kernels.
const WARPGROUP_HEADS: [usize; 2] = [64, 128];

/// Returns cases of rotary embedding, and of attention under the name `attention`.
fn heads(
    attention: FusedOp,
    [batch, seq, heads, kv_heads]: [usize; 4],
    head_dim: usize,
    window: Option<usize>,
) -> [Case; 2] {
    let (q, kv) = (batch * seq * heads * head_dim, batch * seq * kv_heads * head_dim);
    let frequencies = RotaryFrequencies { theta: 10_000.0, scaling: None };
    type Rotary = fn(Tensor<4>, RotaryFrequencies, usize) -> Tensor<4>;
    type Attention = fn(Tensor<4>, Tensor<4>, Tensor<4>, Option<usize>) -> Tensor<4>;
    [
        case!(
            Rotary,
            [q],
            |t, f| f(t[0].clone().reshape([batch, seq, heads, head_dim]), frequencies, 5).flatten(0, 3),
            ops::rotary as Rotary,
            ops::rotary_reference as Rotary
        ),
        case!(
            (attention),
            [q, kv, kv],
            |t, f| {
                let q = t[0].clone().reshape([batch, seq, heads, head_dim]);
                let [k, v] = [1, 2].map(|i| t[i].clone().reshape([batch, seq, kv_heads, head_dim]));
                f(q, k, v, window).flatten(0, 3)
            },
            ops::causal_attention as Attention,
            ops::causal_attention_reference as Attention
        ),
    ]
}

fn cross_entropy(layout: HeadLayout, [rows, d_model, vocab]: [usize; 3]) -> Case {
    let options = LogitOptions { softcap: Some(30.0), z_loss: Some(1e-2) };
    type Loss = fn(
        Tensor<2>,
        Tensor<2>,
        HeadLayout,
        Tensor<1, Int>,
        Option<Tensor<1>>,
        f64,
        LogitOptions,
    ) -> ops::LogitLoss;
    case!(
        CrossEntropy,
        [rows * d_model, d_model * vocab],
        |t, f| {
            let shape = match layout {
                HeadLayout::VocabRows => [vocab, d_model],
                HeadLayout::VocabColumns => [d_model, vocab],
            };
            let target = |i: usize| if i % 5 == 3 { -100 } else { (i * 7 % vocab) as i64 };
            let targets = ints((0..rows).map(target).collect(), [rows], &t[0].device());
            let (hidden, weight) = (matrix(&t[0], [rows, d_model]), matrix(&t[1], shape));
            f(hidden, weight, layout, targets, Some(row_weights(rows, &t[0].device())), 0.37, options).total
        },
        ops::linear_cross_entropy_with as Loss,
        ops::linear_cross_entropy_with_reference as Loss
    )
}

/// Weights of 0.25 to 1.75.
fn row_weights(rows: usize, device: &Device) -> Tensor<1> {
    let weights: Vec<f32> = (0..rows).map(|row| 0.25 + 0.5 * (row % 4) as f32).collect();
    Tensor::from_data(TensorData::new(weights, [rows]), &device.clone().inner())
}

fn embedding([vocab, width]: [usize; 2], [batch, seq]: [usize; 2]) -> Case {
    type Lookup = fn(Tensor<2>, Tensor<2, Int>) -> Tensor<3>;
    case!(
        Embedding,
        [vocab * width],
        |t, f| {
            let ids = (0..batch * seq).map(|i| (i * i % vocab) as i64).collect();
            f(matrix(&t[0], [vocab, width]), ints(ids, [batch, seq], &t[0].device())).flatten(0, 2)
        },
        ops::embedding as Lookup,
        ops::embedding_reference as Lookup
    )
}

fn experts([tokens, d_model, d_ff]: [usize; 3], count: usize) -> Case {
    let projection = count * d_model * d_ff;
    type Mixture = fn(Tensor<2>, Routing, ExpertProjections) -> Tensor<2>;
    case!(
        Experts,
        [tokens * d_model, tokens * 2, projection, projection, projection],
        |t, f| {
            let chosen = (0..tokens * 2).map(|i| ((i / 2 + i % 2) % count) as i64).collect();
            let experts = ints(chosen, [tokens, 2], &t[0].device());
            let routing = Routing { experts, weights: matrix(&t[1], [tokens, 2]) };
            let stacked = |i: usize, shape: [usize; 3]| t[i].clone().reshape(shape);
            let projections = ExpertProjections {
                gate: stacked(2, [count, d_model, d_ff]),
                up: stacked(3, [count, d_model, d_ff]),
                down: stacked(4, [count, d_ff, d_model]),
            };
            f(matrix(&t[0], [tokens, d_model]), routing, projections).flatten(0, 1)
        },
        ops::experts as Mixture,
        ops::experts_reference as Mixture
    )
}

fn matrix(x: &Tensor<1>, shape: [usize; 2]) -> Tensor<2> {
    x.clone().reshape(shape)
}

fn ints<const D: usize>(values: Vec<i64>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), &device.clone().inner())
}
