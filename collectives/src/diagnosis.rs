//! Finds out why a run is stuck, by comparing the flight recorders of all ranks.

mod lag;
mod stuck;
mod witness;

use crate::call::{Call, list_calls, list_distinct, list_ranks};
use crate::flight::Flight;
use crate::verdict::{Finding, Verdict};
pub use lag::Lag;
use stuck::{Stuck, find_stuck, follow, heads_of};
pub use witness::Witness;
use witness::{Moment, flight, view};

impl Verdict {
    /// Compares the flights of the ranks; witness `i` is world rank `i`. Blames ranks that are gone, else silent ranks,
    /// else differing calls, else missing ranks. A missing rank may wait in another group, so the chain of waits is
    /// followed.
    pub fn of(witnesses: &[Witness]) -> Verdict {
        Verdict::about_stuck(witnesses, find_stuck(witnesses), Moment::Unknown)
    }

    /// Like [`Verdict::of`], for a timed-out wait in operation `sequence` of `group` with world ranks `ranks`. Blames
    /// the cause of that delay, even if all ranks have entered or finished the operation in the meantime.
    pub fn for_wait(witnesses: &[Witness], group: &str, ranks: &[usize], sequence: u64) -> Verdict {
        let at = Stuck { group: (group, ranks), sequence };
        let stuck = match at.missing(witnesses).is_empty() {
            true => at,
            false => follow(witnesses, at),
        };
        Verdict::about_stuck(witnesses, Some(stuck), Moment::TimedOut)
    }

    fn about_stuck(witnesses: &[Witness], stuck: Option<Stuck<'_>>, moment: Moment) -> Verdict {
        let at = stuck.map_or_else(String::new, |stuck| {
            let waiting = stuck.waiting(witnesses);
            let wait = match waiting.len() {
                0 => return String::new(),
                1 => "waits",
                _ => "wait",
            };
            format!("; {} {wait} in {}", list_ranks(&waiting), stuck.name(witnesses))
        });
        let of_each = |reason: fn(&Witness) -> Option<[String; 2]>| {
            let ranks = witnesses.iter().enumerate();
            ranks.filter_map(|(rank, witness)| Some((rank, reason(witness)?))).collect::<Vec<_>>()
        };
        let gone = of_each(|witness| match witness {
            Witness::Gone { reason } => Some([reason.clone(), reason.clone()]),
            _ => None,
        });
        let silent = of_each(|witness| {
            let Witness::Silent { seconds } = witness else { return None };
            let seconds = whole(*seconds);
            Some([
                format!(
                    "has not answered for {seconds} s: its process is stopped or its machine cannot \
                     be reached"
                ),
                format!(
                    "have not answered for {seconds} s: their processes are stopped or their machines \
                     cannot be reached"
                ),
            ])
        });
        let halted = of_each(|witness| match witness {
            Witness::Halted => {
                let by = "as by Ctrl-Z, SIGSTOP or a debugger";
                Some([format!("is stopped, {by}"), format!("are stopped, {by}")])
            }
            _ => None,
        });
        for (finding, ranks) in [(Finding::Died, gone), (Finding::Stopped, halted), (Finding::Silent, silent)]
        {
            if !ranks.is_empty() {
                let culprits = ranks.iter().map(|(rank, _)| *rank).collect();
                let text =
                    list_distinct(ranks, |[one, several], count| if count == 1 { one } else { several });
                return Verdict { finding, culprits, text: text + &at };
            }
        }
        match stuck {
            Some(stuck) => stuck.explain(witnesses, moment),
            None => Verdict {
                finding: Finding::Nothing,
                culprits: Vec::new(),
                text: "no rank waits for another".into(),
            },
        }
    }

    /// Returns the verdict on flights read from files: the ranks' own verdict, if they reached one.
    pub fn from_flights(flights: &[Flight]) -> Verdict {
        if let Some(verdict) = flights.iter().find_map(|flight| flight.verdict.clone()) {
            return verdict;
        }
        let world_size = flights.iter().map(|flight| flight.world_size).max().unwrap_or(0);
        let witnesses: Vec<Witness> = (0..world_size.min(1 << 16))
            .map(|rank| match flights.iter().find(|flight| flight.rank == rank) {
                Some(flight) => Witness::Answered(Box::new(flight.clone())),
                None => Witness::Gone { reason: "left no record: died or was stopped".into() },
            })
            .collect();
        Verdict::of(&witnesses)
    }
}

impl Stuck<'_> {
    fn explain(&self, witnesses: &[Witness], moment: Moment) -> Verdict {
        let asked = moment != Moment::Unknown;
        let calls = self.calls(witnesses);
        let known: Vec<&Call> = calls.iter().flatten().copied().collect();
        let differ = known.iter().any(|call| !call.agrees_with(known[0]));
        let invalid = known.iter().any(|call| call.problem.is_some());
        if differ || invalid {
            return self.explain_mismatch(&calls);
        }
        if asked && let Some((stalled, seconds)) = self.stalled(witnesses) {
            return self.explain_stalled(witnesses, stalled, seconds);
        }
        let waiting = self.waiting(witnesses);
        let missing = self.missing(witnesses);
        if missing.is_empty()
            && moment == Moment::TimedOut
            && let Some((late, seconds)) = self.late(witnesses)
        {
            return self.explain_late(witnesses, late, seconds);
        }
        if missing.is_empty() {
            let name = self.name(witnesses);
            let text = match moment {
                Moment::SoFar => format!("all ranks are in {name}, but the transfer has not finished"),
                _ => format!(
                    "all ranks entered {name}, but the transfer did not finish in time: look at the network, \
                     or allow more time with comm.timeout_s"
                ),
            };
            return Verdict { finding: Finding::Transfer, culprits: Vec::new(), text };
        }
        let activities: Vec<String> = missing
            .iter()
            .filter_map(|rank| Some((rank, flight(witnesses, *rank)?)))
            .map(|(rank, flight)| {
                let subject = if missing.len() == 1 { "it".to_owned() } else { format!("rank {rank}") };
                let activity = &flight.activity;
                format!("{subject} has been in {} for {} s", activity.name, whole(activity.seconds))
            })
            .collect();
        let wait = if waiting.len() == 1 { "waits" } else { "wait" };
        let entered = match moment {
            Moment::SoFar if missing.len() == 1 => "has not entered",
            Moment::SoFar => "have not entered",
            _ => "never entered",
        };
        Verdict {
            finding: Finding::Missing,
            text: format!(
                "{} {entered} {}; {}; {} {wait}",
                list_ranks(&missing),
                self.name(witnesses),
                activities.join(", "),
                list_ranks(&waiting)
            ),
            culprits: missing,
        }
    }

    fn explain_stalled(&self, witnesses: &[Witness], stalled: Vec<usize>, seconds: f64) -> Verdict {
        let (processes, were) =
            if stalled.len() == 1 { ("process", "it was") } else { ("processes", "they were") };
        Verdict {
            finding: Finding::Stopped,
            text: format!(
                "the {processes} of {} did not run for about {} s, in which {} was to be done: {were} \
                 stopped, as by Ctrl-Z, SIGSTOP or a debugger, or frozen with the machine; the network is not to \
                 blame",
                list_ranks(&stalled),
                whole(seconds),
                self.name(witnesses),
            ),
            culprits: stalled,
        }
    }

    fn explain_late(&self, witnesses: &[Witness], late: Vec<usize>, seconds: f64) -> Verdict {
        let others: Vec<usize> = self.group.1.iter().filter(|rank| !late.contains(rank)).copied().collect();
        let (up_to, them) = if late.len() == 1 { ("", "it") } else { ("up to ", "them") };
        Verdict {
            finding: Finding::Late,
            text: format!(
                "{} entered {} {up_to}{} s late; {} had waited for {them}: look at what {} did before, \
                 or allow more time with comm.timeout_s",
                list_ranks(&late),
                self.name(witnesses),
                whole(seconds),
                list_ranks(&others),
                if late.len() == 1 { "it" } else { "they" },
            ),
            culprits: late,
        }
    }

    /// Blames the ranks that disagree with the majority, or all ranks without a majority.
    fn explain_mismatch(&self, calls: &[Option<&Call>]) -> Verdict {
        let ranks = || self.group.1.iter().copied().zip(calls);
        let known: Vec<(usize, &Call)> = ranks().filter_map(|(rank, call)| Some((rank, (*call)?))).collect();
        let agreeing = |call: &Call| known.iter().filter(|(_, other)| call.agrees_with(other)).count();
        let most = known.iter().map(|(_, call)| agreeing(call)).max().unwrap_or(0);
        let is_majority = 2 * most > known.len();
        let culprits = known
            .iter()
            .filter(|(_, call)| call.problem.is_some() || !is_majority || agreeing(call) < most)
            .map(|(rank, _)| *rank)
            .collect();
        let (group, calls) = (self.group_suffix(), list_calls(known.into_iter()));
        let text = format!("#{}{group} differs between ranks: {calls}", self.sequence);
        Verdict { finding: Finding::Mismatch, culprits, text }
    }
}

fn whole(seconds: f64) -> u64 {
    seconds.max(0.0).round() as u64
}

/// The longest wait in progress, which may still end.
#[derive(Clone, Debug, PartialEq)]
pub struct Wait {
    /// Seconds since the first waiting rank issued its operation; 0 if no rank waits.
    pub seconds: f64,
    /// The verdict that applies if the wait does not end.
    pub verdict: Verdict,
}

impl Wait {
    /// Returns the longest wait of all ranks. Witness `i` is world rank `i`; all are of about the same time.
    pub fn longest(witnesses: &[Witness]) -> Wait {
        let waits = (0..witnesses.len()).flat_map(|rank| heads_of(witnesses, rank));
        let seconds = waits.map(|(seconds, _)| seconds).fold(0.0, f64::max);
        let verdict = Verdict::about_stuck(witnesses, find_stuck(witnesses), Moment::SoFar);
        Wait { seconds, verdict }
    }
}

/// Returns the world ranks that `rank` waits for, ascending: ranks that have not issued its operation or did not
/// answer. Witness `i` is world rank `i`.
pub fn waits_for(witnesses: &[Witness], rank: usize) -> Vec<usize> {
    let mut awaited: Vec<usize> = heads_of(witnesses, rank)
        .flat_map(|(_, stuck)| {
            let has_not = move |other: &usize| match flight(witnesses, *other) {
                None => true,
                Some(_) => {
                    view(witnesses, *other, stuck.group).is_none_or(|group| group.issued <= stuck.sequence)
                }
            };
            stuck.group.1.iter().copied().filter(has_not)
        })
        .collect();
    awaited.sort_unstable();
    awaited.dedup();
    awaited
}

#[cfg(test)]
mod tests;
