//! The outcome of a job: its exit code, and whether another attempt makes sense.

use super::end::{End, Ends, FAILED, PREEMPTED, USAGE};

/// The outcome of one life of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Every rank ended well.
    Done,
    /// Ranks were told to end, and have saved their state, if any.
    Preempted,
    /// The configuration is invalid; another attempt would end the same way.
    Usage,
    /// The launcher was told to end by this signal, and ranks did not save.
    Signalled(i32),
    /// The ranks were informed of a preemption and did not save.
    NotSaved,
    /// A rank failed.
    Failed,
}

impl Verdict {
    pub(super) fn of(ends: &Ends) -> Verdict {
        let failed = || ends.ranks.iter().filter(|end| end.failed());
        let saved = ends.ranks.iter().any(|end| end.code == Some(PREEMPTED.into()));
        // Ranks that the launcher has ended say nothing about the cause, and neither do ranks that blame
        // another, unless the fault applies to all.
        let is_usage = |end: &End| end.code == Some(USAGE.into());
        let says = |end: &&End| !end.told && (is_usage(end) || !end.is_consequence());
        let mut own = failed().filter(says).peekable();
        // A rank that received a stop request does not meet the others, which fail because of that.
        let stopped = ends.ranks.iter().find(|end| end.was_stopped());
        let follows = |end: &End| end.told || stopped.is_some_and(|first| end.at >= first.at);
        match (failed().next(), ends.signal) {
            (None, _) if saved => Verdict::Preempted,
            (None, _) => Verdict::Done,
            (Some(_), Some(signal)) => Verdict::Signalled(signal),
            _ if stopped.is_some() && failed().all(follows) => Verdict::Preempted,
            _ if ends.preempted => Verdict::NotSaved,
            _ if own.peek().is_some() && own.all(is_usage) => Verdict::Usage,
            _ => Verdict::Failed,
        }
    }

    /// Returns the launcher's exit code.
    pub(super) fn code(self) -> u8 {
        match self {
            Verdict::Done => 0,
            Verdict::Preempted => PREEMPTED,
            Verdict::Usage => USAGE,
            Verdict::Signalled(signal) => u8::try_from(128 + signal).unwrap_or(FAILED),
            Verdict::NotSaved | Verdict::Failed => FAILED,
        }
    }
}
