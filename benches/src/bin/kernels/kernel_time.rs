//! The time of a kernel launch on a GPU: attention by the machine code of its loop, others by the bytes they move.

use crate::host::Report;
use crate::occupancy;
use crate::ptx::Kernel;
use crate::sass::Mix;
use crate::trace::Call;

/// Multiprocessors of an H100 or H200 (SXM), quarters of each, and FLOPs per cycle of each (NVIDIA's H100 whitepaper).
const MULTIPROCESSORS: f64 = 132.0;
const QUARTERS: f64 = 4.0;
const FLOPS_PER_CYCLE: f64 = 4096.0;

/// Share of the bandwidth that kernels streaming large tensors are expected to reach.
const STREAMING: f64 = 0.85;
/// Expected share of attention's bound. FlashAttention-2 reaches 35 % of an H100's peak, 0.56 of its bound (Shah et
/// al., arXiv:2407.08608). Products of warpgroups reach about the same share of their higher bound: FlashAttention-3
/// without specialized warps reaches 570 of 989 TFLOP/s.
const ATTENTION: f64 = 0.56;

/// Parameters in a block of the optimizer's kernels (`SEGMENT` in `shard/src/optim/segments.rs`).
const SEGMENT: f64 = (1 << 14) as f64;

pub struct Gpu {
    /// FLOP/s in bf16.
    pub flops: f64,
    /// Bytes per second.
    bandwidth: f64,
}

pub struct Shape {
    tokens: f64,
    seq: f64,
    batch: f64,
    model: f64,
    heads: f64,
    vocabulary: f64,
}

impl Shape {
    pub fn of(report: &Report) -> Shape {
        let (batch, seq) = (report.global_batch as f64, report.seq_len as f64);
        Shape {
            tokens: batch * seq,
            seq,
            batch,
            model: report.model.d_model as f64,
            heads: report.model.heads as f64,
            vocabulary: report.model.vocab_size as f64,
        }
    }

    pub fn head_width(&self) -> f64 {
        self.model / self.heads
    }
}

pub struct KernelTime {
    pub operation: &'static str,
    /// Seconds at the data sheet's rates.
    pub least: f64,
    /// Expected seconds.
    pub expected: f64,
    /// Table row about the hot loop, if the loop determines the time.
    pub row: Option<String>,
}

/// Operations, each with the beginning of its kernels' names and another part of the name.
const OPERATIONS: &[(&str, &str, &str)] = &[
    ("forward_kernel_e_", "", "attention forward"),
    ("queries_kernel_", "", "attention backward, queries"),
    ("keys_kernel_", "", "attention backward, keys and values"),
    ("forward_kernel_f_", "_w_", "norms"),
    ("backward_kernel_f_", "_w_", "norms"),
    ("residual_norm_", "", "norms"),
    ("residual_backward_", "", "norms"),
    ("block_sums_", "", "norms"),
    ("forward_kernel_g_", "", "gates"),
    ("backward_kernel_g_", "", "gates"),
    ("squared_relu_", "", "squared ReLU"),
    ("rotate_", "", "rotary"),
    ("forward_kernel_f_", "_i_", "embedding"),
    ("gradient_kernel_", "", "embedding"),
    ("links_", "", "embedding"),
    ("zeros_", "", "embedding"),
    ("row_losses_", "", "cross entropy"),
    ("sum_kernel", "", "cross entropy"),
    ("scaled_", "", "cross entropy"),
    ("adamw", "", "optimizer"),
    ("squares", "", "optimizer"),
    ("chunks", "", "optimizer"),
    ("decide", "", "optimizer"),
    ("accumulate", "", "gradients into f32"),
    ("convert", "", "masters to bf16"),
    ("residual_kernel", "", "residuals and sums"),
    ("kernel_binop", "", "residuals and sums"),
];

impl Gpu {
    pub fn new(flops: f64, bandwidth: f64) -> Gpu {
        Gpu { flops, bandwidth }
    }

    /// Returns the minimum and the expected seconds for moving `bytes` to and from device memory.
    pub fn moves(&self, bytes: f64) -> (f64, f64) {
        let least = bytes / self.bandwidth;
        (least, least / STREAMING)
    }

    /// Returns the clock at which the data sheet's FLOP/s are reached.
    fn clock(&self) -> f64 {
        self.flops / (MULTIPROCESSORS * FLOPS_PER_CYCLE)
    }

    pub fn time(&self, call: Call<'_>, kernel: &Kernel, shape: &Shape) -> KernelTime {
        let fits = |(start, part, _): &&(&str, &str, &str)| {
            kernel.name.starts_with(start) && kernel.name.contains(part)
        };
        let operation = OPERATIONS.iter().find(fits).map_or("other kernels", |(_, _, operation)| operation);
        if let (true, Some(hot)) = (operation.starts_with("attention"), &kernel.code.hot_loop)
            && hot.tensor > 0
        {
            return self.attention(call, kernel, hot, shape, operation);
        }
        let (least, expected) = self.moves(traffic(call, kernel, shape));
        KernelTime { operation, least, expected, row: None }
    }

    fn attention(
        &self,
        call: Call<'_>,
        kernel: &Kernel,
        hot: &Mix,
        shape: &Shape,
        operation: &'static str,
    ) -> KernelTime {
        // Products of a query tile with a key tile: scores and values; in backward, scores and the gradient of
        // probabilities again, and the gradients.
        let products = match operation {
            "attention forward" => 2.0,
            "attention backward, queries" => 3.0,
            _ => 4.0,
        };
        let (blocks, threads) = (call.volume("grid") as f64, call.volume("block"));
        let warps = (threads as f64 / 32.0).max(1.0);
        let of_score = products * 2.0 * shape.head_width();
        let rows = shape.seq / call.extent("grid")[2] as f64;
        // For a round of all warps of a block.
        let columns = hot.tensor_flops() * warps / (of_score * rows);
        let computed = computed_share(shape.seq, rows, columns);
        let all = of_score * shape.seq * shape.seq * shape.heads * shape.batch;
        let rounds = all * computed / hot.tensor_flops();
        let (cycles, unit) = hot.cycles();
        let shared_out = rounds * cycles / (MULTIPROCESSORS * QUARTERS);
        // The block with the most tiles, alone on a multiprocessor.
        let longest = rounds / computed / (blocks * warps) * cycles * (warps / QUARTERS).max(1.0);
        let mut least = shared_out.max(longest) / self.clock();
        if operation == "attention backward, queries" {
            // Before its loop, the kernel multiplies the result by its gradient.
            least += self.moves(2.0 * shape.tokens * shape.model).0;
        }
        let shared = u64::from(kernel.shared_fixed) + call.number("shared");
        let row = format!(
            "| {}, heads of {} | {} | {shared} | {} | {} | {} | {} | {} | {} | {} | {cycles:.0} | {unit} | {:.0} % |",
            operation,
            shape.head_width(),
            kernel.registers,
            occupancy::blocks(threads, u64::from(kernel.registers), shared),
            hot.all,
            hot.tensor,
            hot.special,
            hot.float,
            hot.integer,
            hot.l1_bytes,
            100.0 * hot.tensor_flops() * QUARTERS / (cycles * FLOPS_PER_CYCLE)
        );
        KernelTime { operation, least, expected: least / ATTENTION, row: Some(row) }
    }
}

/// Returns the share of scores computed in tiles of `rows` and `columns`: half, and parts above the diagonal.
fn computed_share(seq: f64, rows: f64, columns: f64) -> f64 {
    let tiles = (seq / rows).round().max(1.0) as u32;
    let ends = (1..=tiles).map(|tile| (f64::from(tile) * rows / columns).ceil() * columns);
    ends.map(|end| end.min(seq)).sum::<f64>() * rows / (seq * seq)
}

/// Returns the minimum bytes that a launch moves to and from device memory. Cached small tables do not count.
fn traffic(call: Call<'_>, kernel: &Kernel, shape: &Shape) -> f64 {
    let blocks = call.volume("grid") as f64;
    let threads = blocks * call.volume("block") as f64;
    let name = kernel.name.as_str();
    let stored = threads * f64::from(kernel.code.once.written);
    let of = |start: &str, part: &str| name.starts_with(start) && name.contains(part);
    // Two bytes of each activation.
    if of("forward_kernel_f_", "_w_") {
        // Reads and writes one row per block.
        blocks * shape.model * 4.0
    } else if name.starts_with("residual_norm_") {
        // Also reads the result of a layer, and writes the stream.
        blocks * shape.model * 8.0
    } else if of("backward_kernel_f_", "_w_") {
        // Reads input and gradient, writes the gradient.
        shape.tokens * shape.model * 6.0
    } else if name.starts_with("residual_backward_") {
        // Also reads the gradient of the stream.
        shape.tokens * shape.model * 8.0
    } else if name.starts_with("rotate_") || of("forward_kernel_f_", "_i_") {
        2.0 * stored
    } else if name.starts_with("gradient_kernel_") {
        // Reads two tensors, or reads one and writes as much.
        shape.tokens * shape.model * 4.0
    } else if name.starts_with("row_losses_") {
        // One block per row of scores: reads scores in f32, and writes their gradient in bf16.
        blocks * shape.vocabulary * 6.0
    } else if name.starts_with("squares") {
        blocks * SEGMENT * 4.0
    } else if name.starts_with("adamw_c_f32_") {
        // Reads the gradient; reads and writes the weight and both moments.
        blocks * SEGMENT * 28.0
    } else if name.starts_with("adamw_c_") {
        // Also writes the weight in the compute dtype.
        blocks * SEGMENT * 30.0
    } else {
        threads * f64::from(kernel.code.once.read + kernel.code.once.written)
    }
}
