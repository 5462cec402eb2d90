//! The ends of ranks.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kiln_sys::launcher::Word;
use kiln_sys::page::Seen;

/// Exit code of ranks that were preempted and have saved their state.
pub const PREEMPTED: u8 = 75;

/// Exit code of a failure.
pub(super) const FAILED: u8 = 1;

/// Exit code for wrong arguments or configuration.
pub(super) const USAGE: u8 = 2;

/// The end of a rank.
#[derive(Debug)]
pub(super) struct End {
    pub(super) rank: usize,
    pub(super) pid: i32,
    /// Exit code; `None` if a signal ended it.
    pub(super) code: Option<i32>,
    /// The signal that ended it.
    pub(super) signal: Option<i32>,
    /// Time of its end since its start.
    pub(super) after: Duration,
    /// Time of its end, for the order of events.
    pub(super) at: Instant,
    /// True if the launcher had told it to end.
    pub(super) told: bool,
    /// Reason why the launcher has killed it, if it has.
    pub(super) killed: Option<String>,
    /// Messages that it has sent to the launcher.
    pub(super) words: Vec<(Word, String)>,
    /// The optimizer step that it was in, if it had reached one and reported it.
    pub(super) step: Option<u64>,
    /// Its last known position.
    pub(super) seen: Seen,
    /// The crash folder of its run.
    pub(super) crashes: Option<PathBuf>,
    /// The crash report, if the launcher had to write it.
    pub(super) crash: Option<PathBuf>,
    /// The id of the run whose folder it has locked.
    pub(super) run: Option<String>,
    /// Ranks of the job that it waited for in vain.
    pub(super) absent: Vec<usize>,
    /// Its last lines on stderr.
    pub(super) last_lines: Vec<String>,
    /// The file with all lines.
    pub(super) stderr: PathBuf,
}

/// The ends of all ranks, and signals to the launcher meanwhile.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// In the order of their ends.
    pub(super) ranks: Vec<End>,
    /// The first signal that told the launcher to end.
    pub(super) signal: Option<i32>,
    /// Other nodes whose ranks did not meet those of this one.
    pub(super) absent: Vec<usize>,
    /// True if the ranks were informed that they are about to be preempted.
    pub(super) preempted: bool,
}

impl End {
    /// Returns whether this end is a failure.
    pub(super) fn failed(&self) -> bool {
        self.code != Some(0) && self.code != Some(PREEMPTED.into())
    }

    /// Returns whether the rank reports that it, or a rank that it has met, received a stop request before
    /// there was anything to save.
    pub(super) fn was_stopped(&self) -> bool {
        self.words.iter().any(|(word, _)| *word == Word::Stopped)
    }

    /// Returns whether it reports that another rank is the cause.
    pub(super) fn is_consequence(&self) -> bool {
        let last = self.words.iter().rfind(|(word, _)| *word != Word::Note);
        last.is_some_and(|(word, _)| *word == Word::Consequence)
    }
}
