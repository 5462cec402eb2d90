//! What looks into a run from its start.

use super::hash::HashOptions;
use super::prompt::{Breakpoint, Others};

/// What looks into a run from its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DebugOptions {
    /// Where it stops.
    pub breakpoints: Vec<Breakpoint>,
    /// Whether the prompt of a run that is held may be opened on its terminal: `kiln attach` of this program.
    pub has_prompt: bool,
    /// The tensors that are hashed.
    pub hash: Option<HashOptions>,
}

impl DebugOptions {
    /// Whether a run of so many `ranks` can have its breakpoints.
    ///
    /// # Errors
    ///
    /// What is wrong, in words.
    pub(crate) fn check(&self, ranks: usize, with_mpi: bool) -> Result<(), String> {
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
        Ok(())
    }
}
