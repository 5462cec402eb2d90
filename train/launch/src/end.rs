//! How ranks ended.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kiln_process::launcher::Word;
use kiln_process::page::Seen;

/// Exit code of ranks that were preempted and have saved their state.
pub const PREEMPTED: u8 = 75;

/// Exit code of a failure.
pub(super) const FAILED: u8 = 1;

/// Exit code for wrong arguments or configuration.
pub(super) const USAGE: u8 = 2;

/// How a rank ended.
#[derive(Debug)]
pub(super) struct End {
    pub(super) rank: usize,
    pub(super) pid: i32,
    /// Exit code; `None` if a signal ended it.
    pub(super) code: Option<i32>,
    /// The signal that ended it.
    pub(super) signal: Option<i32>,
    /// When, since its start.
    pub(super) after: Duration,
    /// When, for the order of events.
    pub(super) at: Instant,
    /// Whether the launcher had told it to end.
    pub(super) told: bool,
    /// Why the launcher has killed it, if it has.
    pub(super) killed: Option<String>,
    /// What it has told the launcher itself.
    pub(super) words: Vec<(Word, String)>,
    /// The optimizer step that it was in, if it has come to one and could say so.
    pub(super) step: Option<u64>,
    /// Where it was last, as far as the launcher has seen.
    pub(super) seen: Seen,
    /// The folder of crashes of its run.
    pub(super) crashes: Option<PathBuf>,
    /// What is known of its crash, if the launcher had to write that.
    pub(super) crash: Option<PathBuf>,
    /// The id of the run whose folder it has taken.
    pub(super) run: Option<String>,
    /// The ranks of the job that it has waited for in vain.
    pub(super) absent: Vec<usize>,
    /// Its last lines on stderr.
    pub(super) last_lines: Vec<String>,
    /// Where all of them are.
    pub(super) stderr: PathBuf,
}

/// How all ranks ended, and what the launcher was told meanwhile.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// In the order in which they ended.
    pub(super) ranks: Vec<End>,
    /// The first signal that told the launcher to end.
    pub(super) signal: Option<i32>,
    /// Other nodes whose ranks did not come to meet those of this one.
    pub(super) absent: Vec<usize>,
    /// Whether the ranks were told that they are about to be preempted.
    pub(super) preempted: bool,
}

impl End {
    /// Whether this end is a failure.
    pub(super) fn failed(&self) -> bool {
        self.code != Some(0) && self.code != Some(PREEMPTED.into())
    }

    /// Whether it says that it, or a rank that it has met, was asked to stop before there was anything to
    /// save.
    pub(super) fn was_stopped(&self) -> bool {
        self.words.iter().any(|(word, _)| *word == Word::Stopped)
    }

    /// Whether it says itself that another rank is the cause.
    pub(super) fn is_consequence(&self) -> bool {
        let last = self.words.iter().rfind(|(word, _)| *word != Word::Note);
        last.is_some_and(|(word, _)| *word == Word::Consequence)
    }
}
