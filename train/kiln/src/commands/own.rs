//! The commands that a program adds with [`Registry::command`](kiln_train::registry::Registry::command).

use std::ffi::OsString;

use kiln_config::Config;
use kiln_launch::place::{self, Flags, Role};
use kiln_train::command::Command;
use kiln_train::launch;
use kiln_train::world::Ranks;

use crate::error::{CommandError, Result};

/// Runs `command` on one rank: the only one, or that of this process if a launcher has placed it. Returns the exit
/// code.
pub(crate) fn run(command: &Command, arguments: &[OsString]) -> Result<u8> {
    let text = |argument: &OsString| {
        let problem = || format!("{}: the argument {argument:?} is not UTF-8", command.name);
        argument.to_str().map(str::to_owned).ok_or_else(|| CommandError::usage(problem()))
    };
    let arguments = arguments.iter().map(text).collect::<Result<Vec<_>>>()?;
    let place = match place::find_here(&Flags::default())? {
        Role::Node(node) => return Ok(launch::run_node(node)?),
        Role::Rank(place) => Some(place),
        Role::Alone(_) => None,
    };
    // A single rank, and the defaults of `[comm]` and `[device]`.
    let config = Config::default();
    let ranks = Ranks::join(&config, place.as_ref())?;
    ranks.run(&config, |world| command.run(&arguments, world))?;
    Ok(0)
}
