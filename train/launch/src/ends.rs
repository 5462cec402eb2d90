//! Evaluates how the ranks ended: their reports, the outcome of the job, and its description.

use kiln_sys::launcher::Message;
use signal_hook::consts::SIGKILL;

use super::child::{End, Job};
use super::{print, signal_name};

/// Exit code of ranks that were preempted and saved their state.
pub const PREEMPTED: u8 = 75;

const FAILED: u8 = 1;

const USAGE: u8 = 2;

const COMPARED: usize = 200;

impl End {
    pub(super) fn failed(&self) -> bool {
        self.code != Some(0) && self.code != Some(PREEMPTED.into())
    }

    pub(super) fn last(&self, kind: Message) -> Option<&str> {
        self.words.iter().rfind(|(word, _)| *word == kind).map(|(_, text)| text.as_str())
    }

    pub(super) fn step(&self) -> Option<u64> {
        self.last(Message::Step)?.parse().ok()
    }

    pub(super) fn absent(&self) -> impl Iterator<Item = usize> {
        self.last(Message::Absent).unwrap_or_default().split(',').flat_map(str::parse)
    }

    fn reasons(&self) -> impl DoubleEndedIterator<Item = &(Message, String)> {
        let is_reason = |word| matches!(word, Message::Failure | Message::Consequence | Message::Stopped);
        self.words.iter().filter(move |(word, _)| is_reason(*word))
    }

    /// Returns whether a stop request came before there was anything to save, at this rank or at one that it met.
    pub(super) fn was_stopped(&self) -> bool {
        self.last(Message::Stopped).is_some()
    }

    pub(super) fn is_consequence(&self) -> bool {
        self.reasons().next_back().is_some_and(|(word, _)| *word == Message::Consequence)
    }

    fn describe(&self) -> String {
        let what = match (self.code, self.signal) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("killed by {}", signal_name(signal)),
            (None, None) => "ended in an unknown way".to_owned(),
        };
        let hint = match (self.signal, &self.killed) {
            (Some(SIGKILL), Some(why)) => format!(", by this launcher: {why}"),
            (Some(SIGKILL), None) if !self.asked_to_end => {
                "; unless someone killed it by hand, it was probably out of memory: see `dmesg` and `kiln \
                 explain out-of-memory`"
                    .to_owned()
            }
            _ => String::new(),
        };
        format!("{what} after {:.1} s{hint}", self.after.as_secs_f64())
    }

    /// Prints the reasons of the failure that the rank's log does not show.
    fn print_reasons(&self) {
        for (_, text) in self.reasons() {
            let first = text.lines().next().unwrap_or_default();
            let first: String = first.chars().take(COMPARED).collect();
            if !self.last_lines.iter().any(|line| line.contains(&first)) {
                text.lines().for_each(|line| print(&format!("  its message: {line}")));
            }
        }
    }

    fn print_last_lines(&self) {
        let path = self.stderr.display();
        if !self.last_lines.is_empty() {
            print(&format!("  its last lines on stderr (all lines are in {path}):"));
            self.last_lines.iter().for_each(|line| print(&format!("  | {line}")));
        } else if self.reasons().next().is_none() {
            print(&format!("  it wrote nothing to stderr ({path})"));
        }
    }
}

/// The ends of the ranks, and the signals that came before the last end.
#[derive(Debug, Default)]
pub(super) struct Ends {
    pub(super) ranks: Vec<End>,
    pub(super) signal: Option<i32>,
    /// Other nodes whose ranks did not meet this node's ranks.
    pub(super) absent: Vec<usize>,
    pub(super) preempted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Done,
    /// Ranks received a stop request and saved their state, if any.
    Preempted,
    Usage,
    /// This signal asked the launcher to end, and the ranks did not save.
    Signalled(i32),
    NotSaved,
    Failed,
}

impl Verdict {
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

impl Ends {
    pub(super) fn verdict(&self) -> Verdict {
        let failed = || self.ranks.iter().filter(|end| end.failed());
        let saved = self.ranks.iter().any(|end| end.code == Some(PREEMPTED.into()));
        // Ranks that the launcher ended say nothing about the cause, nor do ranks that blame another, unless the fault
        // is common to all.
        let is_usage = |end: &End| end.code == Some(USAGE.into());
        let is_cause = |end: &&End| !end.asked_to_end && (is_usage(end) || !end.is_consequence());
        let mut causes = failed().filter(is_cause).peekable();
        // A rank that received a stop request does not meet the others, which then fail.
        let stopped = self.ranks.iter().find(|end| end.was_stopped());
        let follows = |end: &End| end.asked_to_end || stopped.is_some_and(|first| end.at >= first.at);
        match (failed().next(), self.signal) {
            (None, _) if saved => Verdict::Preempted,
            (None, _) => Verdict::Done,
            (Some(_), Some(signal)) => Verdict::Signalled(signal),
            _ if stopped.is_some() && failed().all(follows) => Verdict::Preempted,
            _ if self.preempted => Verdict::NotSaved,
            _ if causes.peek().is_some() && causes.all(is_usage) => Verdict::Usage,
            _ => Verdict::Failed,
        }
    }

    /// Prints how the ranks ended, the root cause first, unless all ended successfully.
    pub(super) fn print(&self, job: &Job, verdict: Verdict) {
        for end in &self.ranks {
            for (_, note) in end.words.iter().filter(|(word, _)| *word == Message::Note) {
                print(&format!("rank {}: {note}", end.rank));
            }
        }
        match verdict {
            Verdict::Done => return,
            Verdict::Preempted if self.ranks.iter().any(End::was_stopped) => {
                return print("a rank was asked to stop before there was anything to save; start it again");
            }
            Verdict::Preempted => return print("stopped on request; the ranks have saved their state"),
            _ => {}
        }
        let mut failed: Vec<&End> = self.ranks.iter().filter(|end| end.failed()).collect();
        // The cause is the earliest failure of a rank that was not asked to end and blames no other rank.
        failed.sort_by_key(|end| (end.asked_to_end, end.is_consequence(), end.at));
        let Some((cause, others)) = failed.split_first() else { return };
        let first = if cause.asked_to_end { "failed when asked to end" } else { "failed first" };
        print(&format!("rank {} (pid {}) {first}: {}", cause.rank, cause.pid, cause.describe()));
        cause.print_reasons();
        if let Some(folder) = &cause.crash {
            print(&format!("  crash report: {}", folder.display()));
        }
        cause.print_last_lines();
        for end in others {
            let why = match end.asked_to_end {
                // The launcher also ended the first rank, so all get the same words.
                true if cause.asked_to_end => first,
                true => "stopped by the launcher",
                false => "failed after it",
            };
            print(&format!("rank {} (pid {}) {why}: {}", end.rank, end.pid, end.describe()));
            if end.asked_to_end {
                continue;
            }
            if end.last_lines.is_empty() {
                end.print_reasons();
            }
            match end.last_lines == cause.last_lines && !end.last_lines.is_empty() {
                true => print(&format!("  same output ({})", end.stderr.display())),
                false => end.print_last_lines(),
            }
        }
        if verdict == Verdict::Failed && job.node.nodes > 1 && cause.code == Some(1) {
            print("the cause may lie on another node: compare with the output of its launcher");
        }
    }
}
