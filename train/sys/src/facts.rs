//! Facts for reports and log lines that only the rest of Kiln knows.

use std::fmt;
use std::sync::OnceLock;

/// Facts known to the engine and the program. All of them can be queried in a signal handler.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Returns the rank that the calling thread works for, if any.
    pub rank_of_thread: fn() -> Option<usize>,
    /// Writes the name of the module that a rank has entered last, if any.
    pub write_module_of: fn(usize, &mut dyn fmt::Write) -> fmt::Result,
    /// Writes a table of the memory that each owner holds, after a request for the given number of bytes has
    /// failed.
    pub write_holders: fn(&mut dyn fmt::Write, usize) -> fmt::Result,
    /// Version, commit and features of the program.
    pub version: &'static str,
}

static FACTS: OnceLock<(Facts, String)> = OnceLock::new();

/// Registers the facts; the first call wins.
pub(super) fn know(facts: Facts) {
    FACTS.get_or_init(|| {
        let system = rustix::system::uname();
        (facts, system.nodename().to_string_lossy().into_owned())
    });
}

/// Returns the rank that the calling thread works for.
pub(super) fn rank_of_thread() -> Option<usize> {
    FACTS.get().and_then(|(facts, _)| (facts.rank_of_thread)())
}

/// Writes the name of the module that `rank` has entered last; nothing if there is none.
pub(super) fn write_module_of(rank: usize, out: &mut dyn fmt::Write) -> fmt::Result {
    FACTS.get().map_or(Ok(()), |(facts, _)| (facts.write_module_of)(rank, out))
}

/// Writes a table of the memory that each owner holds, after a request for `bytes` has failed.
pub(super) fn write_holders(out: &mut dyn fmt::Write, bytes: usize) -> fmt::Result {
    FACTS.get().map_or(Ok(()), |(facts, _)| (facts.write_holders)(out, bytes))
}

/// Version, commit and features of the program.
pub(super) fn version() -> &'static str {
    FACTS.get().map_or("unknown", |(facts, _)| facts.version)
}

/// The name of this machine.
pub(super) fn host() -> &'static str {
    FACTS.get().map_or("unknown", |(_, host)| host)
}
