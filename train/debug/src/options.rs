use kiln_shard::memory;

use super::hash::HashOptions;
use super::prompt::{Breakpoint, Others};
use super::trace::TraceOptions;

const ON_GPU: &str = "--memory-profile: GPU memory cannot be profiled; see `kiln plan` for a prediction, and \
                      `nsys profile --cuda-memory-usage=true` for a measurement";

const UNCOUNTED: &str =
    "--memory-profile: this program does not count its memory; add `kiln::allocator!();` to its main file";

/// Largest number of steps in a trace: all traced steps stay in memory until the last one ends.
const MOST_TRACED: u64 = 200;

/// Debugging options that are set when a run starts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DebugOptions {
    /// Breakpoints at which the run stops.
    pub breakpoints: Vec<Breakpoint>,
    /// Set if a held run may open the prompt, `kiln attach` of this program, on its terminal.
    pub has_prompt: bool,
    /// The tensors to hash.
    pub hash: Option<HashOptions>,
    /// The steps to trace.
    pub trace: Option<TraceOptions>,
    /// The step whose allocations are recorded.
    pub memory_profile: Option<u64>,
}

impl DebugOptions {
    /// Checks that a run of `ranks` and `steps` can have these breakpoints, trace and profile.
    ///
    /// # Errors
    ///
    /// A description of the problem.
    pub fn check(&self, ranks: usize, steps: u64, with_mpi: bool, on_gpu: bool) -> Result<(), String> {
        for Breakpoint { rank, others, .. } in &self.breakpoints {
            match rank {
                Some(rank) if *rank >= ranks => {
                    return Err(format!("--break: no rank {rank}: the run has {ranks} ranks"));
                }
                Some(_) if with_mpi && *others == Others::Run => {
                    let problem =
                        "--break: with MPI, all ranks must be held, because the others would time out";
                    return Err(problem.to_owned());
                }
                _ => {}
            }
        }
        if let Some(trace) = self.trace.as_ref().filter(|trace| *trace.steps.end() > steps) {
            return Err(format!("--trace {trace}: the run has {steps} steps, see train.steps"));
        }
        let is_long = |trace: &&TraceOptions| trace.steps.end() - trace.steps.start() >= MOST_TRACED;
        if let Some(trace) = self.trace.as_ref().filter(is_long) {
            return Err(format!("--trace {trace}: a trace holds at most {MOST_TRACED} steps"));
        }
        match self.memory_profile {
            Some(step) if step > steps => {
                Err(format!("--memory-profile={step}: the run has {steps} steps, see train.steps"))
            }
            Some(_) if on_gpu => Err(ON_GPU.to_owned()),
            Some(_) if !memory::is_counting() => Err(UNCOUNTED.to_owned()),
            _ => Ok(()),
        }
    }
}
