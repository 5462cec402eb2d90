//! Ends a run that needs more memory than the machine has with a report of what holds the memory, before the
//! kernel kills the process silently.

use std::process;
use std::sync::OnceLock;

use kiln_model::{Decoder, Key};
use kiln_shard::memory;

use super::memory::what_helps;
use super::plan::Plan;
use crate::process::keep;
use crate::process::launcher::{self, Message};
use crate::process::output::{self, eprint_line};
use kiln_config::device::{self, Memory};
use kiln_launch::place::RankEnv;

/// Suggestions for reducing memory, for the error message.
static HELPS: OnceLock<String> = OnceLock::new();

/// Memory of a process outside of its ranks and their heaps, in bytes.
const SPARE: u64 = 40 << 20;

/// Exit code of a run that failed.
const FAILED: i32 = 1;

/// Limits the memory of this process's ranks to the memory of the machine, if the host computes.
pub(super) fn limit(plan: &Plan, place: Option<&RankEnv>) {
    let Plan { config, model, optimizer, registry, device, .. } = plan;
    if device.is_gpu() {
        return;
    }
    let decoder = Decoder::new(registry.layers(), model, Key::new(0), &device::plain());
    let Ok(decoder) = decoder else { return };
    let helps = what_helps(config, model, &decoder, optimizer, false, place);
    let processes = place.map_or(1, |place| place.local_world_size.max(1));
    // Under an address space limit, an allocation fails before the process would be killed.
    let Some(machine) = Memory::for_machine() else { return };
    let share = config.device.memory_fraction.unwrap_or(1.0) / processes as f64;
    // Cached file pages and the kernel's pages count as well.
    let bytes = machine.total as f64 * share - SPARE as f64;
    let _ = HELPS.set(helps);
    memory::limit(bytes.max(1.0) as usize, told);
}

fn told(text: &str) {
    let helps = HELPS.get().map_or("", String::as_str);
    keep(text, |folder| {
        let known = folder.map_or_else(String::new, |folder| format!("crash report: {}\n", folder.display()));
        eprint_line(&format!(
            "error: {text}\n{known}What would help:\n{helps}more: kiln explain out-of-memory"
        ));
    });
    launcher::send(Message::Failure, text.lines().next().unwrap_or(text));
    output::finish();
    process::exit(FAILED);
}
