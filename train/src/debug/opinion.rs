//! Whether something is wrong with a run that goes on.

use kiln_collectives::{Lag, Wait, Witness};
use serde::Serialize;

use crate::words::in_ranges;

/// Waits of less than this are nothing to talk about, in seconds.
const SHORT: f64 = 1.0;

/// A wait is longer than usual if it is this many times the longest step of late.
const STEPS: f64 = 3.0;

/// What a rank does outside of steps may take this long, in seconds, and so may its first step.
const OUTSIDE: f64 = 30.0;

/// A suspicion comes before this share of the deadline at the latest.
const SHARE_OF_DEADLINE: f64 = 0.5;

/// What ranks do in a step.
const IN_A_STEP: [&str; 4] = ["data loading", "forward", "backward", "optimizer"];

/// How a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    /// It goes on.
    Healthy,
    /// It goes on, and waits for one rank most of the time.
    Slow,
    /// A rank has been waited for longer than usual.
    Suspicion,
    /// A process is stopped, gone or does not answer.
    Trouble,
    /// It has begun, and no rank has said anything yet; or it is about to end.
    Starting,
    /// All of its steps are done.
    Finished,
    /// It was ended before its last step, and can go on from there.
    Stopped,
    /// It has ended with an error.
    Failed,
    /// It was killed.
    Dead,
}

impl State {
    /// Whether there is nothing more to see.
    pub(super) fn is_over(self) -> bool {
        matches!(self, State::Finished | State::Stopped | State::Failed | State::Dead)
    }

    /// Whether somebody should look after it.
    pub(super) fn is_bad(self) -> bool {
        matches!(self, State::Suspicion | State::Trouble | State::Failed | State::Dead)
    }
}

/// What is known of a rank.
#[derive(Debug)]
pub(super) enum Seen {
    Witness(Witness),
    /// Nothing, for this reason; it may be well.
    Unknown(String),
}

impl Seen {
    /// The witness of a rank for comparisons with others. Of an unknown rank nothing can be said.
    pub(super) fn witness(&self) -> Witness {
        match self {
            Seen::Witness(witness) => witness.clone(),
            Seen::Unknown(reason) => Witness::Gone { reason: reason.clone() },
        }
    }
}

/// What there is to say about a run.
#[derive(Debug, PartialEq)]
pub(super) struct Opinion {
    pub(super) state: State,
    pub(super) text: String,
    /// World ranks to look at first.
    pub(super) culprits: Vec<usize>,
}

/// Compares the ranks; `seen` has all of them. `longest_step_s` is the longest step of late, `deadline_s` the time
/// after which a wait ends the run.
pub(super) fn opinion(seen: &[Seen], longest_step_s: Option<f64>, deadline_s: Option<f64>) -> Opinion {
    let unknown: Vec<usize> =
        (0..seen.len()).filter(|rank| matches!(seen[*rank], Seen::Unknown(_))).collect();
    let witnesses: Vec<Witness> = seen.iter().map(Seen::witness).collect();
    let is_in_trouble = |seen: &Seen| matches!(seen, Seen::Witness(witness) if !is_well(witness));
    let Wait { seconds, verdict } = Wait::longest(&witnesses);
    let ends = match deadline_s {
        Some(deadline) if seconds > 0.0 => {
            format!("; comm.timeout_s ends the run in {:.0} s", (deadline - seconds).max(0.0))
        }
        _ => String::new(),
    };
    if let Some(first) = seen.iter().position(is_in_trouble) {
        // Ranks that are not seen from here may be well, and the verdict counts them as gone.
        let (text, culprits) = match (unknown.is_empty(), &witnesses[first]) {
            (false, Witness::Gone { reason }) => (format!("rank {first} {reason}"), vec![first]),
            (false, _) => (format!("rank {first} is stopped or does not answer"), vec![first]),
            _ => (verdict.text, verdict.culprits),
        };
        return Opinion { state: State::Trouble, text: text + &ends, culprits };
    }
    let culprits = if unknown.is_empty() { verdict.culprits } else { unknown.clone() };
    if seconds >= patience(&witnesses, &culprits, longest_step_s, deadline_s) {
        let text = match unknown.is_empty() {
            true => verdict.text,
            false => {
                format!("ranks wait, perhaps for {}, of which nothing is known here", ranks_of(&unknown))
            }
        };
        let text = format!("{text}; the longest wait is {seconds:.0} s{ends}");
        return Opinion { state: State::Suspicion, text, culprits };
    }
    if !unknown.is_empty() {
        let state = if unknown.len() == seen.len() { State::Starting } else { State::Healthy };
        let text = format!("nothing is known of {}; the others go on", ranks_of(&unknown));
        let text = if state == State::Starting {
            "no rank has begun yet, or all are about to end".into()
        } else {
            text
        };
        return Opinion { state, text, culprits: Vec::new() };
    }
    match Lag::find(&witnesses) {
        Some(Lag { rank, late, operations, share, .. }) => Opinion {
            state: State::Slow,
            text: format!(
                "rank {rank} came late to {late} of the last {operations} collectives, and the others waited for it \
                 {:.0} % of the time",
                share * 100.0
            ),
            culprits: vec![rank],
        },
        None => {
            let text = "no rank waits for another for longer than usual".to_owned();
            Opinion { state: State::Healthy, text, culprits: Vec::new() }
        }
    }
}

fn is_well(witness: &Witness) -> bool {
    matches!(witness, Witness::Answered(_))
}

/// The length of a wait from which on it is longer than usual, in seconds.
fn patience(
    witnesses: &[Witness],
    culprits: &[usize],
    longest_step_s: Option<f64>,
    deadline_s: Option<f64>,
) -> f64 {
    let is_in_a_step = |rank: &usize| match witnesses.get(*rank) {
        Some(Witness::Answered(flight)) => IN_A_STEP.contains(&flight.activity.name.as_str()),
        _ => false,
    };
    let usual = longest_step_s.map(|longest| SHORT.max(STEPS * longest));
    let patience = match usual {
        Some(usual) if culprits.iter().all(is_in_a_step) => usual,
        Some(usual) => usual.max(OUTSIDE),
        None => OUTSIDE,
    };
    deadline_s.map_or(patience, |deadline| patience.min(SHARE_OF_DEADLINE * deadline))
}

/// Such as `rank 1` or `ranks 0, 2-3`.
pub(super) fn ranks_of(ranks: &[usize]) -> String {
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, in_ranges(ranks))
}
