//! Facts for reports and log lines that this crate cannot find out by itself.

use std::fmt;
use std::sync::OnceLock;

/// Facts that the engine and the program provide for reports and log lines. The functions may be called in a
/// signal handler.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Returns the rank that the calling thread works for, if any.
    pub rank_of_thread: fn() -> Option<usize>,
    /// Writes the name of the module that the rank entered last, if any.
    pub write_module_of: fn(usize, &mut dyn fmt::Write) -> fmt::Result,
    /// Writes a table of the memory that each owner holds, after a request for the given number of bytes has
    /// failed.
    pub write_holders: fn(&mut dyn fmt::Write, usize) -> fmt::Result,
    /// Version, commit and features of the program.
    pub version: &'static str,
}

/// The facts, once they are set; the first call of [`set`] wins.
static FACTS: OnceLock<Facts> = OnceLock::new();

/// Returns the facts, or empty ones if they are not set yet.
pub(crate) fn facts() -> Facts {
    let nothing = Facts {
        rank_of_thread: || None,
        write_module_of: |_, _| Ok(()),
        write_holders: |_, _| Ok(()),
        version: "unknown",
    };
    FACTS.get().copied().unwrap_or(nothing)
}

/// Sets the facts.
pub(crate) fn set(facts: Facts) {
    FACTS.get_or_init(|| facts);
}
