//! Why a run cannot be watched in this terminal.

use std::io;

/// Watching did not begin, or could not go on.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// No run was named.
    #[error(
        "no run is named: kiln watch RUN, where RUN is the folder that --out has named, or a folder of some"
    )]
    NoRuns,
    /// There is no terminal to draw on.
    #[error(
        "kiln watch draws on a whole terminal, and {what} is none; use kiln status RUN for text, kiln status RUN \
         --follow for text that goes on, or kiln watch RUN --http for a page in a browser"
    )]
    NoTerminal {
        /// Standard input or output.
        what: &'static str,
    },
    /// The terminal refuses.
    #[error("cannot draw on the terminal: {0}")]
    Terminal(#[from] io::Error),
    /// A thread that looks at runs has panicked.
    #[error("a thread that looks at runs has panicked: that is a bug of kiln")]
    Panicked,
}
