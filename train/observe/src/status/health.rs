//! Assesses the health of a live run.

use std::collections::BTreeSet;
use std::fmt;

use kiln_collectives::{Lag, Wait, Witness};
use kiln_sys::words::in_ranges;
use serde::Serialize;

/// Waits shorter than this, in seconds, are ignored.
const SHORT: f64 = 1.0;

/// A wait is suspicious if it is longer than this many times the longest recent step.
const STEPS: f64 = 3.0;

/// Seconds after which a wait is suspicious if the rank is outside of steps or in its first step.
const OUTSIDE: f64 = 30.0;

/// Share of the deadline after which any wait is suspicious.
const SHARE_OF_DEADLINE: f64 = 0.5;

const START: &str = "start";

const IN_A_STEP: [&str; 4] = ["data loading", "forward", "backward", "optimizer"];

/// The health of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The run is progressing.
    Healthy,
    /// Ranks are held for debugging.
    Held,
    /// The run is progressing, but waits for one rank most of the time.
    Slow,
    /// Ranks have waited for another rank for longer than usual.
    Suspicion,
    /// A process is stopped, gone or does not answer.
    Trouble,
    /// No rank has reported yet, or the run is about to end.
    Starting,
    /// All steps are done.
    Finished,
    /// The run was stopped before its last step, and can be resumed.
    Stopped,
    /// The run ended with an error.
    Failed,
    /// The run was killed.
    Dead,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Healthy => "healthy",
            State::Held => "held",
            State::Slow => "slow",
            State::Suspicion => "suspicion",
            State::Trouble => "trouble",
            State::Starting => "starting or ending",
            State::Finished => "finished",
            State::Stopped => "stopped",
            State::Failed => "failed",
            State::Dead => "dead",
        })
    }
}

impl State {
    /// Returns true if the run has ended.
    pub fn is_over(self) -> bool {
        matches!(self, State::Finished | State::Stopped | State::Failed | State::Dead)
    }

    /// Returns true if someone should look into the run.
    pub fn is_bad(self) -> bool {
        matches!(self, State::Suspicion | State::Trouble | State::Failed | State::Dead)
    }
}

#[derive(Debug, PartialEq)]
pub(super) struct Assessment {
    pub(super) state: State,
    pub(super) text: String,
    pub(super) culprits: Vec<usize>,
}

/// Assesses a run from the `witnesses` of all its ranks. The `unknown` ranks are recorded as gone but may be healthy.
/// A wait longer than `deadline_s` ends the run.
pub(super) fn assess(
    witnesses: &[Witness],
    unknown: &BTreeSet<usize>,
    longest_step_s: Option<f64>,
    deadline_s: Option<f64>,
) -> Assessment {
    let unknown_ranks: Vec<usize> = unknown.iter().copied().collect();
    let Wait { seconds, verdict } = Wait::longest(witnesses);
    let ends = match deadline_s {
        Some(deadline) if seconds > 0.0 => {
            format!("; comm.timeout_s ends the run in {:.0} s", (deadline - seconds).max(0.0))
        }
        _ => String::new(),
    };
    let is_in_trouble =
        |rank: &usize| !unknown.contains(rank) && !matches!(witnesses[*rank], Witness::Answered(_));
    if let Some(first) = (0..witnesses.len()).find(is_in_trouble) {
        let (text, culprits) = match (unknown.is_empty(), &witnesses[first]) {
            (false, Witness::Gone { reason }) => (format!("rank {first} {reason}"), vec![first]),
            (false, _) => (format!("rank {first} is stopped or does not answer"), vec![first]),
            _ => (verdict.text, verdict.culprits),
        };
        return Assessment { state: State::Trouble, text: text + &ends, culprits };
    }
    let culprits = if unknown.is_empty() { verdict.culprits } else { unknown_ranks.clone() };
    if seconds >= patience(witnesses, &culprits, longest_step_s, deadline_s) {
        let text = match unknown.is_empty() {
            true => verdict.text,
            false => format!(
                "ranks are waiting, possibly for {}, whose state is unknown",
                ranks_of(&unknown_ranks)
            ),
        };
        let text = format!("{text}; the longest wait is {seconds:.0} s{ends}");
        return Assessment { state: State::Suspicion, text, culprits };
    }
    if let Some(assessment) = stuck_at_start(witnesses, deadline_s) {
        return assessment;
    }
    let (state, text, culprits) = if !unknown.is_empty() && unknown.len() == witnesses.len() {
        let text = "no rank has started yet, or all are about to exit".to_owned();
        (State::Starting, text, Vec::new())
    } else if !unknown.is_empty() {
        let text = format!(
            "the state of {} is unknown on this machine; the other ranks continue",
            ranks_of(&unknown_ranks)
        );
        (State::Healthy, text, Vec::new())
    } else if let Some(Lag { rank, late, operations, share, .. }) = Lag::find(witnesses) {
        let text = format!(
            "rank {rank} was late for {late} of the last {operations} collectives; the other ranks waited for it \
             {:.0} % of the time",
            share * 100.0
        );
        (State::Slow, text, vec![rank])
    } else {
        (State::Healthy, "no rank has been waiting longer than usual".to_owned(), Vec::new())
    };
    Assessment { state, text, culprits }
}

/// Assesses ranks that have been starting for too long, even if no other rank waits for them.
fn stuck_at_start(witnesses: &[Witness], deadline_s: Option<f64>) -> Option<Assessment> {
    let patience = deadline_s.map_or(OUTSIDE, |deadline| OUTSIDE.min(SHARE_OF_DEADLINE * deadline));
    let seconds_of = |witness: &Witness| match witness {
        Witness::Answered(flight) if flight.activity.name == START => Some(flight.activity.seconds),
        _ => None,
    };
    let times = witnesses.iter().map(seconds_of).enumerate();
    let stuck = times.filter_map(|(rank, seconds)| Some((rank, seconds.filter(|s| *s >= patience)?)));
    let (ranks, seconds): (Vec<_>, Vec<_>) = stuck.unzip();
    let longest = seconds.into_iter().reduce(f64::max)?;
    let (has, first) =
        if ranks.len() == 1 { ("has", "its first step") } else { ("have", "their first step") };
    let text =
        format!("{} {has} been starting for {longest:.0} s and {has} not begun {first}", ranks_of(&ranks));
    Some(Assessment { state: State::Suspicion, text, culprits: ranks })
}

fn patience(
    witnesses: &[Witness],
    culprits: &[usize],
    longest_step_s: Option<f64>,
    deadline_s: Option<f64>,
) -> f64 {
    let is_in_a_step = |rank: &usize| match witnesses.get(*rank) {
        Some(Witness::Answered(flight)) => IN_A_STEP.contains(&flight.activity.name.as_str()),
        // An unknown rank is assumed to be in a step, like the ranks that wait for it.
        _ => true,
    };
    let usual = longest_step_s.map(|longest| SHORT.max(STEPS * longest));
    let patience = match usual {
        Some(usual) if culprits.iter().all(is_in_a_step) => usual,
        Some(usual) => usual.max(OUTSIDE),
        None => OUTSIDE,
    };
    deadline_s.map_or(patience, |deadline| patience.min(SHARE_OF_DEADLINE * deadline))
}

/// Formats ranks, as in `rank 1` or `ranks 0, 2-3`.
pub fn ranks_of(ranks: &[usize]) -> String {
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, in_ranges(ranks))
}

#[cfg(test)]
mod tests {
    use kiln_collectives::{Communicator, Label, LocalGroup, Phase};

    use super::*;

    fn ranks(seconds: f64, activity: &str) -> Vec<Witness> {
        let group = LocalGroup::new(2);
        let _work = group[0].barrier(Label::new("step", Phase::Other));
        let mut flights: Vec<_> = group.iter().map(|rank| rank.view().flight(8)).collect();
        flights[0].groups[0].pending[0].seconds = seconds;
        flights[1].activity.name = activity.to_owned();
        flights.into_iter().map(|flight| Witness::Answered(Box::new(flight))).collect()
    }

    #[test]
    fn unusually_long_waits_are_suspect() {
        let state = |seconds, activity, longest, deadline| {
            let ranks = ranks(seconds, activity);
            let Assessment { state, culprits, .. } = assess(&ranks, &BTreeSet::new(), longest, deadline);
            assert_eq!(culprits == [1], state == State::Suspicion, "{culprits:?}");
            state
        };
        for (seconds, activity, longest, deadline, expected) in [
            // Limit: three times the longest step, and at least one second.
            (0.9, "backward", Some(0.1), None, State::Healthy),
            (1.1, "backward", Some(0.1), None, State::Suspicion),
            (5.0, "forward", Some(2.0), None, State::Healthy),
            (6.5, "forward", Some(2.0), None, State::Suspicion),
            (5.5, "forward", Some(2.0), Some(10.0), State::Suspicion),
            // Saves and first steps may take 30 seconds.
            (29.0, "checkpoint", Some(0.1), None, State::Healthy),
            (31.0, "checkpoint", Some(0.1), Some(600.0), State::Suspicion),
            (29.0, "forward", None, None, State::Healthy),
            (11.0, "start", None, Some(20.0), State::Suspicion),
        ] {
            assert_eq!(state(seconds, activity, longest, deadline), expected, "{seconds} in {activity}");
        }
        let text = assess(&ranks(14.2, "backward"), &BTreeSet::new(), Some(0.1), Some(20.0)).text;
        assert!(
            text.starts_with("rank 1 has not entered #0 barrier(step); it has been in backward for"),
            "{text}"
        );
        let end = "rank 0 waits; the longest wait is 14 s; comm.timeout_s ends the run in 6 s";
        assert!(text.ends_with(end), "{text}");
    }

    #[test]
    fn long_start_is_suspect_without_waits() {
        let starting = |seconds: f64, deadline| {
            let group = LocalGroup::new(2);
            let mut flights: Vec<_> = group.iter().map(|rank| rank.view().flight(8)).collect();
            flights.iter_mut().for_each(|flight| flight.activity.name = "forward".to_owned());
            flights[1].activity.name = START.to_owned();
            flights[1].activity.seconds = seconds;
            let answered = flights.into_iter().map(|flight| Witness::Answered(Box::new(flight)));
            assess(&answered.collect::<Vec<_>>(), &BTreeSet::new(), None, deadline)
        };
        assert_eq!(starting(29.0, Some(600.0)).state, State::Healthy);
        let stuck = starting(31.4, Some(600.0));
        assert_eq!((stuck.state, stuck.culprits.as_slice()), (State::Suspicion, &[1][..]));
        assert_eq!(stuck.text, "rank 1 has been starting for 31 s and has not begun its first step");
        assert_eq!(starting(11.0, Some(20.0)).state, State::Suspicion);
    }

    #[test]
    fn dead_ranks_are_trouble_unknown_ones_are_not() {
        let with = |second: Witness, unknown: &[usize], seconds| {
            let mut witnesses = ranks(seconds, "forward");
            witnesses[1] = second;
            assess(&witnesses, &unknown.iter().copied().collect(), Some(0.1), Some(60.0))
        };
        let stopped = with(Witness::Halted, &[], 0.1);
        assert_eq!((stopped.state, stopped.culprits.as_slice()), (State::Trouble, &[1][..]));
        assert!(stopped.text.starts_with("rank 1 is stopped"), "{}", stopped.text);
        let gone = with(Witness::Gone { reason: "died: nobody knows why".into() }, &[], 0.1);
        assert_eq!(gone.state, State::Trouble);
        assert!(gone.text.starts_with("rank 1 died: nobody knows why; rank 0 waits in #0"), "{}", gone.text);

        let unknown = || Witness::Gone { reason: "is on another machine".into() };
        let well = with(unknown(), &[1], 0.1);
        let text = "the state of rank 1 is unknown on this machine; the other ranks continue";
        assert_eq!((well.state, well.text.as_str()), (State::Healthy, text));
        let waiting = with(unknown(), &[1], 2.0);
        assert_eq!((waiting.state, waiting.culprits.as_slice()), (State::Suspicion, &[1][..]));
        let text = "ranks are waiting, possibly for rank 1, whose state is unknown; the longest wait is 2 s";
        assert!(waiting.text.starts_with(text), "{}", waiting.text);
        let none = assess(&[unknown(), unknown()], &BTreeSet::from([0, 1]), None, None);
        assert_eq!(none.state, State::Starting);
        let one = assess(&[unknown(), Witness::Halted], &BTreeSet::from([0]), None, None);
        assert_eq!(one.culprits, [1]);
    }
}
