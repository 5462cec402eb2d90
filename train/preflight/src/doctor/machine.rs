//! Cores and memory available to this process.

use std::ffi::OsStr;
use std::fs;
use std::num::NonZero;

use kiln_model::ops;
use serde_json::json;

use super::diagnosis::Section;
use kiln_config::device::Memory;
use kiln_sys::words::number_of;

/// Describes this machine, shared by `ranks` ranks.
pub(super) fn examine(ranks: usize) -> Section {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let all = info.lines().filter(|line| line.starts_with("processor")).count();
    let mut lines = Vec::new();
    if cores < all {
        // Either mpirun or srun has bound each rank, or a container binds all of them.
        lines.push(format!(
            "{cores} of {} for this process, its own or shared by {}",
            number_of(all, "core"),
            number_of(ranks, "rank")
        ));
    } else {
        let threads = (cores / ranks.max(1)).max(1);
        lines.push(format!(
            "{} for this process; {threads} for each of {}",
            number_of(cores, "core"),
            number_of(ranks, "rank")
        ));
        if ranks > cores {
            lines.push(format!("more ranks than cores: {ranks} take turns on {}", number_of(cores, "core")));
        }
    }
    let choice = std::env::var_os(ops::BF16_CHOICE).filter(|choice| !choice.is_empty());
    lines.push(bf16(ops::bf16_instructions(), choice.as_deref()));
    let memory = Memory::of_machine();
    lines.push(describe(memory));
    let facts = json!({
        "cores": cores,
        "cores_of_machine": all.max(cores),
        "ranks": ranks,
        "bf16_instructions": ops::bf16_instructions(),
        "memory_bytes": memory.map(|memory| memory.total),
        "memory_free_bytes": memory.map(|memory| memory.free),
    });
    Section::new(facts, lines)
}

/// The instructions that multiply bf16 matrices: `instructions`, or the one that the variable's value
/// `choice` names.
fn bf16(instructions: Option<&str>, choice: Option<&OsStr>) -> String {
    let choice = choice.map(|choice| format!("{}={}", ops::BF16_CHOICE, choice.display()));
    match (instructions, choice) {
        (Some(name), None) => format!("products of bf16 by {name}"),
        (Some(name), Some(choice)) => format!("products of bf16 by {name} ({choice})"),
        (None, None) => {
            "no instructions for products of bf16 that Kiln knows: they are computed in f32".to_owned()
        }
        (None, Some(choice)) => format!(
            "products of bf16 are computed in f32: {choice} names no instructions that this \
             processor has; unset it, and Kiln chooses"
        ),
    }
}

fn describe(memory: Option<Memory>) -> String {
    match memory {
        None => "memory: unknown".to_owned(),
        Some(Memory { total, free }) => {
            format!("memory: {} of {} GiB available, swap included", gib(free), gib(total))
        }
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::bf16;

    #[test]
    fn a_variable_that_chooses_is_named() {
        assert_eq!(bf16(Some("AMX"), None), "products of bf16 by AMX");
        let chosen = bf16(Some("AVX512-BF16"), Some(OsStr::new("avx512")));
        assert_eq!(chosen, "products of bf16 by AVX512-BF16 (KILN_BF16=avx512)");
        let mistyped = bf16(None, Some(OsStr::new("axm")));
        assert!(mistyped.contains("KILN_BF16=axm names no instructions"), "{mistyped}");
        assert!(!bf16(None, None).contains("KILN_BF16"));
    }
}
