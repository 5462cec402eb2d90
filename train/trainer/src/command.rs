//! The commands that a program adds to the command line.

use std::error::Error;
use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;

use kiln_collectives::Communicator;

use crate::error::TrainError;

/// The result of a custom command: nothing, or any error.
pub type CommandResult = Result<(), Box<dyn Error + Send + Sync>>;

type Run = dyn Fn(&[String], Arc<dyn Communicator>) -> CommandResult + Send + Sync;

/// A command that a program adds.
#[derive(Clone)]
pub struct Command {
    /// Name of the command: the first argument of the program.
    pub name: &'static str,
    /// The text of `--help`, if the program has added one: a line about the command, then its arguments.
    pub help: Option<&'static str>,
    run: Arc<Run>,
}

impl Command {
    /// Runs the command on one rank of `world`, with the `arguments` after its name.
    ///
    /// # Errors
    ///
    /// The error of the command, with its name.
    pub fn run(&self, arguments: &[String], world: Arc<dyn Communicator>) -> Result<(), TrainError> {
        (self.run)(arguments, world).map_err(|source| TrainError::Command { name: self.name, source })
    }
}

/// The commands that a program adds.
#[derive(Clone, Default)]
pub struct Commands(Vec<Command>);

impl Commands {
    /// Adds a command; see [`Registry::command`](crate::registry::Registry::command).
    ///
    /// # Panics
    ///
    /// If the name is empty or taken.
    #[must_use]
    pub fn with(
        mut self,
        name: &'static str,
        run: impl Fn(&[String], Arc<dyn Communicator>) -> CommandResult + Send + Sync + 'static,
    ) -> Self {
        assert!(!name.is_empty(), "a command needs a name");
        assert!(self.find(name.as_ref()).is_none(), "`{name}` is a command already: choose another name");
        self.0.push(Command { name, help: None, run: Arc::new(run) });
        self
    }

    /// Adds a help text; see [`Registry::command_help`](crate::registry::Registry::command_help).
    ///
    /// # Panics
    ///
    /// If there is no command of this name.
    #[must_use]
    pub fn with_help(mut self, name: &str, help: &'static str) -> Self {
        match self.0.iter_mut().find(|command| command.name == name) {
            Some(command) => command.help = Some(help),
            None => panic!("`{name}` is not a command of this program: add it first"),
        }
        self
    }

    /// Returns the command of this name.
    pub fn find(&self, name: &OsStr) -> Option<&Command> {
        self.0.iter().find(|command| command.name == name)
    }

    /// Iterates over the commands, in the order of addition.
    pub fn iter(&self) -> impl Iterator<Item = &Command> {
        self.0.iter()
    }
}

impl fmt::Debug for Commands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(|command| command.name)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "`mine` is a command already: choose another name")]
    fn command_cannot_be_added_twice() {
        let _ = Commands::default().with("mine", |_, _| Ok(())).with("mine", |_, _| Ok(()));
    }
}
