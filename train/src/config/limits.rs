//! The largest numbers that a configuration and the command line take: far more than any run has, and little
//! enough that nothing overflows, no loop goes on for ever, and a slip of the pen is an error at once.

use std::ops::RangeInclusive;

use crate::device::{cores, cores_of_machine};
use crate::place::MAX_RANKS_PER_NODE;

/// The most optimizer steps. With [`MAX_BATCH`], positions in the data fit into 64 bits.
pub const MAX_STEPS: u64 = 1_000_000_000_000;

/// The most sequences of a step or of a micro-batch.
pub const MAX_BATCH: usize = 10_000_000;

/// The most tokens of a sequence.
pub const MAX_SEQ_LEN: usize = 10_000_000;

/// The longest context of a model; models of Hugging Face have longer ones than runs train on.
pub(super) const MAX_CONTEXT: u64 = 1 << 40;

/// The most Newton–Schulz iterations of a step.
pub(super) const MAX_NS_STEPS: u64 = 100;

/// The most compute threads of a machine.
pub const MAX_THREADS: usize = 4096;

/// The most ranks that are threads of one process, which is as many as one launcher starts.
pub const MAX_THREAD_RANKS: usize = MAX_RANKS_PER_NODE;

/// What is wrong with `value` for `key`, a key or a flag, if it is not in `range`.
pub(crate) fn out_of_range(key: &str, value: u64, range: RangeInclusive<u64>) -> Option<String> {
    let (least, most) = range.into_inner();
    match value {
        value if value < least => Some(format!("{key} = {value}: must be at least {least}")),
        value if value > most => Some(format!("{key} = {value}: must be at most {most}")),
        _ => None,
    }
}

/// What is wrong with `device.threads` here: far more threads than cores get in each other's way.
pub(crate) fn too_many_threads(threads: usize) -> Option<String> {
    let (mine, all) = (cores(), cores_of_machine());
    // A process may be held to some cores, and the number is meant for all ranks of the machine.
    let most = mine.saturating_mul(16).max(all.unwrap_or(mine).saturating_mul(2)).max(64);
    (most < threads && threads <= MAX_THREADS).then(|| {
        format!(
            "device.threads = {threads}: at most {most} here, where this process has {mine} cores; leave it \
             out to have one for each core"
        )
    })
}

/// What is wrong with a number of ranks that are threads, if anything; `key` is where it was said.
pub(crate) fn thread_ranks(key: &str, ranks: usize) -> Option<String> {
    (ranks > MAX_THREAD_RANKS).then(|| {
        format!(
            "{key} = {ranks}: one process has at most {MAX_THREAD_RANKS} ranks as threads; use fewer, or \
             start ranks as processes, as `kiln launch` does"
        )
    })
}
