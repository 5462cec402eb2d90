//! The wording of a report that both a rank and its launcher write.

use std::fmt::{self, Write};

/// Name of the file with the text of a crash, for people.
pub const TEXT: &str = "crash.txt";

/// Name of the file with the samples that a rank was working on.
pub const BATCH: &str = "batch.json";

/// Writes the lines that name rank and step; step 0 is before the first one.
///
/// # Errors
///
/// If `out` accepts no more.
pub fn write_step(out: &mut dyn Write, rank: usize, step: u64) -> fmt::Result {
    let note = if step == 0 { ", before the first one of this start" } else { "" };
    writeln!(out, "rank     {rank}\nstep     {step}{note}")
}

/// Writes the line with the samples of a micro-batch: its number in the step, its first sample in the global
/// order, and the number of its samples.
///
/// # Errors
///
/// If `out` accepts no more.
pub fn write_samples(out: &mut dyn Write, micro_batch: Option<(u64, u64, u64)>) -> fmt::Result {
    match micro_batch {
        None => writeln!(out, "batch    none was fetched yet"),
        Some((index, first, 1)) => {
            writeln!(out, "batch    micro-batch {index}, sample {first} of the global order")
        }
        Some((index, first, samples)) => {
            let last = first + samples - 1;
            writeln!(out, "batch    micro-batch {index}, samples {first} to {last} of the global order")
        }
    }
}

/// Writes the same information in machine-readable form.
///
/// # Errors
///
/// If `out` accepts no more.
pub fn write_batch(
    out: &mut dyn Write,
    rank: usize,
    step: u64,
    (index, first, samples): (u64, u64, u64),
) -> fmt::Result {
    write!(out, "{{\"rank\":{rank},\"step\":{step},\"micro_batch\":{index},")?;
    writeln!(out, "\"first_sample\":{first},\"last_sample\":{}}}", first + samples - 1)
}
