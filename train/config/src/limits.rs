//! The largest numbers that a configuration and the command line accept: far beyond any real run, yet small
//! enough that nothing overflows, no loop is endless, and a typo is an error at once.

use std::ops::RangeInclusive;

use crate::device::{cores, cores_of_machine};
use kiln_launch::place::MAX_RANKS_PER_NODE;

/// Maximum number of optimizer steps. With [`MAX_BATCH`], positions in the data fit into 64 bits.
pub const MAX_STEPS: u64 = 1_000_000_000_000;

/// Maximum number of sequences in a step or a micro-batch.
pub const MAX_BATCH: usize = 10_000_000;

/// Maximum number of tokens in a sequence.
pub const MAX_SEQ_LEN: usize = 10_000_000;

/// Longest context of a model; models from Hugging Face have longer contexts than runs train on.
pub(super) const MAX_CONTEXT: u64 = 1 << 40;

/// Maximum number of Newton–Schulz iterations in a step.
pub(super) const MAX_NS_STEPS: u64 = 100;

/// Maximum number of compute threads on a machine.
pub const MAX_THREADS: usize = 4096;

/// Maximum number of ranks that are threads of one process; a launcher starts at most as many.
pub const MAX_THREAD_RANKS: usize = MAX_RANKS_PER_NODE;

/// Returns an error message for `value` of `key`, a key or a flag, if it is not in `range`.
pub fn out_of_range(key: &str, value: u64, range: RangeInclusive<u64>) -> Option<String> {
    let (least, most) = range.into_inner();
    match value {
        value if value < least => Some(format!("{key} = {value}: must be at least {least}")),
        value if value > most => Some(format!("{key} = {value}: must be at most {most}")),
        _ => None,
    }
}

/// Returns an error message if `device.threads` is too large for this machine: far more threads than cores slow
/// each other down.
pub fn too_many_threads(threads: usize) -> Option<String> {
    let (mine, all) = (cores(), cores_of_machine());
    // The process may be restricted to some cores, and the number applies to all ranks of the machine.
    let most = mine.saturating_mul(16).max(all.unwrap_or(mine).saturating_mul(2)).max(64);
    (most < threads && threads <= MAX_THREADS).then(|| {
        format!(
            "device.threads = {threads}: at most {most} here, where this process has {mine} cores; leave it \
             out to have one for each core"
        )
    })
}

/// Returns an error message if there are too many ranks as threads; `key` names where the number was set.
pub fn thread_ranks(key: &str, ranks: usize) -> Option<String> {
    (ranks > MAX_THREAD_RANKS).then(|| {
        format!(
            "{key} = {ranks}: one process has at most {MAX_THREAD_RANKS} ranks as threads; use fewer, or \
             start ranks as processes, as `kiln launch` does"
        )
    })
}
