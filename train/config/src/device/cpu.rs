use std::io;
use std::num::NonZero;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use kiln_model::ops;

use crate::{DeviceDefaults, DeviceSection, Precision};
use kiln_launch::place::{RankEnv, Source};

const PEAK_SIDE: usize = 768;

/// Number of timed products; the fastest counts, since other programs can only slow a product down.
const PEAK_TRIES: usize = 20;

/// Maximum measuring time; no further product starts after it.
const PEAK_TIME: Duration = Duration::from_secs(1);

/// Returns the defaults for the CPU: bf16 if the CPU multiplies it with AMX, else f32.
pub fn cpu_defaults() -> DeviceDefaults {
    match ops::bf16_instructions() {
        Some("AMX") => DeviceDefaults { precision: Precision::Bf16, ..DeviceDefaults::CPU },
        _ => DeviceDefaults::CPU,
    }
}

/// Returns the number of cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Returns the number of compute threads of each of `ranks` ranks.
pub fn threads_per_rank(section: &DeviceSection, ranks: usize) -> usize {
    (section.threads.unwrap_or_else(cores) / ranks.max(1)).max(1)
}

/// Returns the number of ranks that share the cores of this process. `srun` and `mpirun` commonly bind every
/// process to its own cores; other launchers leave all cores to all processes.
pub fn ranks_sharing_cores(place: &RankEnv) -> usize {
    let mine = cores();
    let may_bind = matches!(place.source, Source::Slurm | Source::OpenMpi | Source::Pmi);
    if may_bind && cores_of_machine().is_some_and(|all| mine < all) {
        return 1;
    }
    place.local_world_size.max(1)
}

/// Returns the number of online cores of the machine, including those that this process may not use.
pub fn cores_of_machine() -> Option<usize> {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    count_cpus(online.trim())
}

/// Returns the number of CPUs in a list such as `0-3,8`.
fn count_cpus(list: &str) -> Option<usize> {
    let count = |range: &str| match range.split_once('-') {
        None => range.parse::<usize>().ok().map(|_| 1),
        Some((first, last)) => {
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            last.checked_sub(first)?.checked_add(1)
        }
    };
    list.split(',').map(count).try_fold(0, |sum: usize, count| sum.checked_add(count?))
}

pub(super) fn peak_dtype(precision: Precision) -> FloatDType {
    match precision {
        Precision::Bf16 if ops::bf16_instructions().is_some() => FloatDType::BF16,
        _ => FloatDType::F32,
    }
}

/// Measures the FLOP/s of `threads` threads in a matrix product in [`peak_dtype`]; fails if they cannot start.
pub(super) fn measure_peak_flops(precision: Precision, threads: usize) -> io::Result<f64> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(io::Error::other)?;
    Ok(pool.install(|| measure_flops_of(&plain(), peak_dtype(precision).into())))
}

pub(super) fn measure_flops_of(device: &Device, dtype: DType) -> f64 {
    let a = Tensor::<2>::ones([PEAK_SIDE, PEAK_SIDE], (device, dtype));
    let b = Tensor::<2>::ones([PEAK_SIDE, PEAK_SIDE], (device, dtype));
    let flops = 2.0 * (PEAK_SIDE as f64).powi(3);
    let begin = Instant::now();
    (0..PEAK_TRIES)
        .take_while(|tries| *tries == 0 || begin.elapsed() < PEAK_TIME)
        .map(|_| {
            let start = Instant::now();
            drop(ops::linear(a.clone(), b.clone(), None));
            let _ = device.sync();
            flops / start.elapsed().as_secs_f64()
        })
        .fold(0.0, f64::max)
}

/// Returns burn's device for computing on the CPU without gradients; `.autodiff()` makes it one for training.
pub fn plain() -> Device {
    Device::flex()
}

/// Returns token ids `[rows, seq_len]` as a tensor.
pub fn tokens(ids: Vec<i32>, rows: usize, seq_len: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(ids, [rows, seq_len]), device)
}

#[cfg(test)]
mod tests {
    use super::count_cpus;

    #[test]
    fn cpu_lists_are_counted() {
        assert_eq!(count_cpus("0"), Some(1));
        assert_eq!(count_cpus("0-3,8,10-11"), Some(7));
        for wrong in ["", "a", "3-0", "0-18446744073709551615"] {
            assert_eq!(count_cpus(wrong), None, "{wrong}");
        }
    }
}
