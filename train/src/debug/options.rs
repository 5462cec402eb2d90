//! What looks into a run from its start.

use super::hash::HashOptions;
use super::prompt::{Breakpoint, Others};
use super::trace::TraceOptions;

/// What looks into a run from its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DebugOptions {
    /// Where it stops.
    pub breakpoints: Vec<Breakpoint>,
    /// Whether the prompt of a run that is held may be opened on its terminal: `kiln attach` of this program.
    pub has_prompt: bool,
    /// The tensors that are hashed.
    pub hash: Option<HashOptions>,
    /// The steps that are traced.
    pub trace: Option<TraceOptions>,
}

impl DebugOptions {
    /// Whether a run of so many `ranks` and `steps` can have its breakpoints and its trace.
    ///
    /// # Errors
    ///
    /// What is wrong, in words.
    pub(crate) fn check(&self, ranks: usize, steps: u64, with_mpi: bool) -> Result<(), String> {
        for Breakpoint { rank, others, .. } in &self.breakpoints {
            match rank {
                Some(rank) if *rank >= ranks => {
                    return Err(format!("--break: there is no rank {rank}: there are {ranks}"));
                }
                Some(_) if with_mpi && *others == Others::Run => {
                    let problem = "--break: with MPI, the other ranks would time out: hold them as well";
                    return Err(problem.to_owned());
                }
                _ => {}
            }
        }
        match &self.trace {
            Some(trace) if *trace.steps.end() > steps => {
                Err(format!("--trace {trace}: the run has {steps} steps, see train.steps"))
            }
            _ => Ok(()),
        }
    }
}
