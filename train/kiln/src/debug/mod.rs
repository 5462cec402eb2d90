//! Inspecting runs in progress: `kiln status`, breakpoints, and the prompt of a held rank.
//!
//! Each process of a run answers requests at its socket (`server.rs`), which costs nothing while there are
//! none. Requests, replies and the client are in `kiln_observe::ask`: a new kind of request is a variant of
//! `Request` there and an arm of `serve` in `server.rs`. `prompt/` has breakpoints and the commands of the
//! prompt, which `kiln attach` (`attach.rs`) shows. `hash/` writes the hashes for `kiln diff`, `nonfinite.rs`
//! searches for the first NaN, and `shapes.rs` logs shapes.

mod attach;
pub(crate) mod hash;
mod memory;
mod nonfinite;
mod options;
mod prompt;
mod server;
mod shapes;
mod share;
mod status;
mod steps;
mod trace;

pub use attach::AttachArgs;
pub use hash::{HashOptions, HashOptionsError, HashedKind};
pub(crate) use kiln_observe::ask::clear;
pub(crate) use nonfinite::NonFiniteFinder;
pub use options::DebugOptions;
pub use prompt::{
    BREAKPOINTS_IN_CODE, Breakpoint, BreakpointError, Desk, Number, Others, Part, Pass, Trigger,
};
pub(crate) use prompt::{DebuggedRank, Reach};
pub(crate) use server::Server;
pub(crate) use status::About;
pub use status::StatusArgs;
pub(crate) use status::look_at_runs;
pub use trace::{TraceArgs, TraceCommand, TraceOptions, TraceOptionsError};

use hash::Hasher;
use memory::MemoryProfiler;

use crate::run::Observer;
use prompt::Debugger;
use shapes::ShapeLog;
use trace::Tracer;

/// The observers of a rank's steps, in the order in which they are called.
pub(crate) fn observers(options: &DebugOptions, of: DebuggedRank) -> Vec<Box<dyn Observer>> {
    let hasher = |options: HashOptions| Box::new(Hasher::new(options, &of.out, of.rows)) as Box<dyn Observer>;
    let hasher = options.hash.clone().map(hasher);
    let tracer = |options: TraceOptions| Box::new(Tracer::new(options, &of)) as Box<dyn Observer>;
    let tracer = options.trace.clone().map(tracer);
    let profiler = |step: u64| Box::new(MemoryProfiler::new(step, &of.out, of.rank)) as Box<dyn Observer>;
    let profiler = options.memory_profile.map(profiler);
    let debugger: Box<dyn Observer> = Box::new(Debugger::new(options, of));
    let shapes: Box<dyn Observer> = Box::new(ShapeLog::default());
    hasher.into_iter().chain(tracer).chain(profiler).chain([debugger, shapes]).collect()
}
