//! Devices and threads.

use std::num::NonZero;
use std::time::Instant;

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_model::ops;

use crate::config::DeviceSection;

/// Side of the matrices that the peak is measured with.
const PEAK_SIDE: usize = 768;

/// Products timed; the fastest counts, since other programs can only slow one down.
const PEAK_TRIES: usize = 20;

/// The device of plain computation; `.autodiff()` makes it one for training.
pub fn plain() -> Device {
    Device::flex()
}

/// Compute threads of each of `ranks` ranks.
pub fn threads_per_rank(section: &DeviceSection, ranks: usize) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, NonZero::get);
    (section.threads.unwrap_or_else(cores) / ranks.max(1)).max(1)
}

/// Token ids `[rows, seq_len]` as a tensor.
pub fn tokens(ids: Vec<i32>, rows: usize, seq_len: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(ids, [rows, seq_len]), device)
}

/// FLOP/s that `threads` threads reach in an f32 matrix product, the yardstick of `mfu` on a CPU.
pub fn measure_peak_flops(threads: usize) -> f64 {
    let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(threads).build() else { return 0.0 };
    pool.install(|| {
        let device = plain();
        let a = Tensor::<2>::ones([PEAK_SIDE, PEAK_SIDE], &device);
        let b = Tensor::<2>::ones([PEAK_SIDE, PEAK_SIDE], &device);
        let flops = 2.0 * (PEAK_SIDE as f64).powi(3);
        (0..PEAK_TRIES)
            .map(|_| {
                let start = Instant::now();
                drop(ops::linear(a.clone(), b.clone(), None));
                flops / start.elapsed().as_secs_f64()
            })
            .fold(0.0, f64::max)
    })
}
