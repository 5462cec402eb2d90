//! Debugging of runs: breakpoints, hashes, traces, replay, and the first difference of two runs.
//!
//! [`DebugTools`] adds these tools to a run. Each process of a run answers requests at its socket, which costs nothing
//! without clients; `kiln_observe::ask` defines the requests.

pub mod diff;
pub mod error;
pub mod hash;
mod memory;
mod options;
mod prompt;
pub mod replay;
mod report;
mod server;
mod shapes;
mod share;
mod steps;
mod trace;

use std::sync::Arc;

pub use error::DebugError;
pub use hash::{HashOptions, HashOptionsError, HashedKind};
pub use options::DebugOptions;
pub use prompt::{BREAKPOINTS_IN_CODE, Breakpoint, BreakpointError, Number, Others, Part, Prompts, Trigger};
pub use trace::{TraceArgs, TraceCommand, TraceOptions, TraceOptionsError};

use kiln_train::run::{AttachedTools, ObservedRank, Observer, RunFacts, Tools};

use hash::Hasher;
use memory::MemoryProfiler;
use prompt::Debugger;
use report::About;
use server::Server;
use shapes::ShapeLog;
use trace::Tracer;

/// The debugging tools of a run: its socket for `kiln status` and `kiln attach`, and the observers of its steps.
#[derive(Clone, Debug, Default)]
pub struct DebugTools(pub DebugOptions);

impl Tools for DebugTools {
    fn check(&self, ranks: usize, steps: u64, with_mpi: bool, on_gpu: bool) -> Result<(), String> {
        self.0.check(ranks, steps, with_mpi, on_gpu)
    }

    fn attach(&self, run: &RunFacts<'_>) -> Box<dyn AttachedTools> {
        let prompts = Arc::new(Prompts::default());
        let about = About {
            world_size: run.world_size,
            steps: run.steps,
            deadline: run.deadline,
            on_gpu: run.on_gpu,
            prompts: prompts.clone(),
        };
        let server = Server::start(run.out, run.ranks.to_vec(), about);
        Box::new(Attached { options: self.0.clone(), prompts, _server: server })
    }
}

struct Attached {
    options: DebugOptions,
    prompts: Arc<Prompts>,
    _server: Server,
}

impl AttachedTools for Attached {
    fn observers(&self, rank: ObservedRank) -> Vec<Box<dyn Observer>> {
        let options = &self.options;
        let mut observers: Vec<Box<dyn Observer>> = Vec::new();
        if let Some(hash) = &options.hash {
            observers.push(Box::new(Hasher::new(hash.clone(), &rank.out, rank.rows)));
        }
        if let Some(trace) = &options.trace {
            observers.push(Box::new(Tracer::new(trace.clone(), &rank)));
        }
        if let Some(step) = options.memory_profile {
            observers.push(Box::new(MemoryProfiler::new(step, &rank.out, rank.rank)));
        }
        observers.push(Box::new(Debugger::new(
            &options.breakpoints,
            options.has_prompt,
            self.prompts.clone(),
            rank,
        )));
        observers.push(Box::new(ShapeLog::default()));
        observers
    }
}
