use std::fmt;
use std::sync::OnceLock;

/// Facts for reports and log lines that this crate cannot determine itself. The functions must be async-signal-safe.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Returns the rank that the calling thread works for, if any.
    pub rank_of_thread: fn() -> Option<usize>,
    /// Writes the name of the module that the rank entered last, if any.
    pub write_module_of: fn(usize, &mut dyn fmt::Write) -> fmt::Result,
    /// Writes a table of memory by owner, after an allocation of the given number of bytes has failed.
    pub write_holders: fn(&mut dyn fmt::Write, usize) -> fmt::Result,
    /// Version, commit and features of the program.
    pub version: &'static str,
}

/// The first call of [`set`] wins.
static FACTS: OnceLock<Facts> = OnceLock::new();

pub(crate) fn facts() -> Facts {
    let nothing = Facts {
        rank_of_thread: || None,
        write_module_of: |_, _| Ok(()),
        write_holders: |_, _| Ok(()),
        version: "unknown",
    };
    FACTS.get().copied().unwrap_or(nothing)
}

pub(crate) fn set(facts: Facts) {
    FACTS.get_or_init(|| facts);
}
