//! Looking into runs that go on: `kiln status`, breakpoints, and the prompt of a rank that is held.
//!
//! Each process of a run keeps a socket in the run folder (`socket.rs`), and answers whoever asks there
//! (`server.rs`) what its ranks are doing (`status.rs`). Nothing is done for it while nobody asks. The one who
//! asks (`client.rs`) puts the answers of all processes together, with what the machine knows of those that do
//! not answer (`machine.rs`) and the names of functions (`symbols.rs`), and says whether something is wrong (`opinion.rs`). What is left of a run that has
//! ended is read from its folder (`ended.rs`).
//!
//! A request is one line of JSON, and so is a reply (`message.rs`). A new kind of request is a variant of
//! `message::Request` and an arm of `answer` in `server.rs`. `prompt/` has breakpoints and what is typed at
//! the prompt of `kiln attach`.

mod attach;
mod client;
mod command;
mod ended;
pub(crate) mod hash;
mod look;
mod machine;
mod message;
mod nonfinite;
mod opinion;
mod options;
mod prompt;
mod server;
mod show;
mod socket;
mod status;
mod symbols;

pub use attach::AttachArgs;
pub use command::StatusArgs;
pub use hash::{HashOptions, HashOptionsError, HashedKind};
pub(crate) use nonfinite::NonFiniteFinder;
pub use options::DebugOptions;
pub(crate) use prompt::DebuggedRank;
pub use prompt::{
    BREAKPOINTS_IN_CODE, Breakpoint, BreakpointError, Desk, Number, Others, Part, Pass, ToPrompt, Trigger,
};
pub(crate) use server::Server;
pub(crate) use socket::clear;
pub(crate) use status::About;

use hash::{HashedRun, Hasher};

use crate::error::{Result, TrainError};
use crate::run::Observer;
use prompt::Debugger;

/// What looks at the steps of one rank of `run`, in the order in which it is called.
pub(crate) fn observers(
    options: &DebugOptions,
    run: HashedRun<'_>,
    rank: DebuggedRank,
) -> Result<Vec<Box<dyn Observer>>> {
    let objection = options.breakpoints.iter().find_map(|breakpoint| match breakpoint.rank {
        Some(held) if held >= rank.ranks => {
            Some(format!("there is no rank {held}: there are {}", rank.ranks))
        }
        Some(_) if rank.with_mpi && breakpoint.others == Others::Run => {
            Some("with MPI, the other ranks would time out: leave out `run`, or --others".to_owned())
        }
        _ => None,
    });
    if let Some(objection) = objection {
        return Err(TrainError::usage(format!("--break: {objection}")));
    }
    let hasher = options.hash.clone().map(|options| Box::new(Hasher::new(options, run)) as Box<dyn Observer>);
    let debugger: Box<dyn Observer> = Box::new(Debugger::new(options, rank));
    Ok(hasher.into_iter().chain([debugger]).collect())
}
