//! Assessing whether something is wrong with a live run.

use std::fmt;

use kiln_collectives::{Lag, Wait, Witness};
use serde::Serialize;

use kiln_sys::words::in_ranges;

/// Waits shorter than this, in seconds, are ignored.
const SHORT: f64 = 1.0;

/// A wait is longer than usual if it is this many times the longest recent step.
const STEPS: f64 = 3.0;

/// Maximum seconds for a rank's activity outside of steps, and for its first step.
const OUTSIDE: f64 = 30.0;

/// A suspicion is raised before this share of the deadline at the latest.
const SHARE_OF_DEADLINE: f64 = 0.5;

/// The activity of a rank before its first step.
const START: &str = "start";

/// Activities of ranks in a step.
const IN_A_STEP: [&str; 4] = ["data loading", "forward", "backward", "optimizer"];

/// The health of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The run is progressing.
    Healthy,
    /// Someone holds ranks of the run, to debug them.
    Held,
    /// The run is progressing, but waits for one rank most of the time.
    Slow,
    /// A rank has been awaited for longer than usual.
    Suspicion,
    /// A process is stopped, gone or does not answer.
    Trouble,
    /// The run has begun, and no rank has reported yet; or it is about to end.
    Starting,
    /// All steps are done.
    Finished,
    /// The run was ended before its last step, and can be resumed.
    Stopped,
    /// The run has ended with an error.
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

/// Information about a rank.
#[derive(Debug)]
pub enum Seen {
    Witness(Witness),
    /// Nothing is known, for this reason; the rank may be well.
    Unknown(String),
}

impl Seen {
    /// Returns the witness of a rank for comparisons with others. An unknown rank counts as gone.
    pub fn witness(&self) -> Witness {
        match self {
            Seen::Witness(witness) => witness.clone(),
            Seen::Unknown(reason) => Witness::Gone { reason: reason.clone() },
        }
    }
}

/// The assessment of a run.
#[derive(Debug, PartialEq)]
pub struct Opinion {
    pub state: State,
    pub text: String,
    /// World ranks to look at first.
    pub culprits: Vec<usize>,
}

/// Compares the ranks; `seen` has all of them. `longest_step_s` is the longest recent step, `deadline_s` the
/// time after which a wait ends the run.
pub fn opinion(seen: &[Seen], longest_step_s: Option<f64>, deadline_s: Option<f64>) -> Opinion {
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
        // Ranks that cannot be seen from here may be well, and the verdict counts them as gone.
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
    if let Some(opinion) = stuck_at_start(&witnesses, deadline_s) {
        return opinion;
    }
    if !unknown.is_empty() {
        let state = if unknown.len() == seen.len() { State::Starting } else { State::Healthy };
        let text = format!("nothing is known here of {}; the others go on", ranks_of(&unknown));
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

/// Returns the opinion on ranks that have been starting for too long, if any. It does not require that other
/// ranks wait for them.
fn stuck_at_start(witnesses: &[Witness], deadline_s: Option<f64>) -> Option<Opinion> {
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
    let text = format!("{} {has} been starting for {longest:.0} s, before {first}", ranks_of(&ranks));
    Some(Opinion { state: State::Suspicion, text, culprits: ranks })
}

fn is_well(witness: &Witness) -> bool {
    matches!(witness, Witness::Answered(_))
}

/// Returns the length of a wait, in seconds, above which it is longer than usual.
fn patience(
    witnesses: &[Witness],
    culprits: &[usize],
    longest_step_s: Option<f64>,
    deadline_s: Option<f64>,
) -> f64 {
    let is_in_a_step = |rank: &usize| match witnesses.get(*rank) {
        Some(Witness::Answered(flight)) => IN_A_STEP.contains(&flight.activity.name.as_str()),
        // Unknown, so the ranks that wait for it are in a step.
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

    /// Returns ranks where rank 0 has waited for `seconds` for rank 1, which is in `activity`.
    fn ranks(seconds: f64, activity: &str) -> Vec<Seen> {
        let group = LocalGroup::new(2);
        let _work = group[0].barrier(Label::new("step", Phase::Other));
        let mut flights: Vec<_> = group.iter().map(|rank| rank.view().flight(8)).collect();
        flights[0].groups[0].pending[0].seconds = seconds;
        flights[1].activity.name = activity.to_owned();
        flights.into_iter().map(|flight| Seen::Witness(Witness::Answered(Box::new(flight)))).collect()
    }

    #[test]
    fn a_wait_is_suspect_when_it_is_longer_than_usual_and_long_before_the_deadline() {
        let state = |seconds, activity, longest, deadline| {
            let Opinion { state, culprits, .. } = opinion(&ranks(seconds, activity), longest, deadline);
            assert_eq!(culprits == [1], state == State::Suspicion, "{culprits:?}");
            state
        };
        for (seconds, activity, longest, deadline, expected) in [
            // Three times the longest step, and more than a second.
            (0.9, "backward", Some(0.1), None, State::Healthy),
            (1.1, "backward", Some(0.1), None, State::Suspicion),
            (5.0, "forward", Some(2.0), None, State::Healthy),
            (6.5, "forward", Some(2.0), None, State::Suspicion),
            // Before half of the deadline.
            (5.5, "forward", Some(2.0), Some(10.0), State::Suspicion),
            // Saves and first steps take long.
            (29.0, "checkpoint", Some(0.1), None, State::Healthy),
            (31.0, "checkpoint", Some(0.1), Some(600.0), State::Suspicion),
            (29.0, "forward", None, None, State::Healthy),
            (11.0, "start", None, Some(20.0), State::Suspicion),
        ] {
            assert_eq!(state(seconds, activity, longest, deadline), expected, "{seconds} in {activity}");
        }
        let text = opinion(&ranks(14.2, "backward"), Some(0.1), Some(20.0)).text;
        assert!(
            text.starts_with("rank 1 has not entered #0 barrier(step); it has been in backward for"),
            "{text}"
        );
        let end = "rank 0 waits; the longest wait is 14 s; comm.timeout_s ends the run in 6 s";
        assert!(text.ends_with(end), "{text}");
    }

    #[test]
    fn a_start_that_takes_long_is_suspect_though_nobody_waits() {
        let starting = |seconds: f64, deadline| {
            let group = LocalGroup::new(2);
            let mut flights: Vec<_> = group.iter().map(|rank| rank.view().flight(8)).collect();
            flights.iter_mut().for_each(|flight| flight.activity.name = "forward".to_owned());
            flights[1].activity.name = START.to_owned();
            flights[1].activity.seconds = seconds;
            let seen = |flight| Seen::Witness(Witness::Answered(Box::new(flight)));
            opinion(&flights.into_iter().map(seen).collect::<Vec<_>>(), None, deadline)
        };
        assert_eq!(starting(29.0, Some(600.0)).state, State::Healthy);
        let stuck = starting(31.4, Some(600.0));
        assert_eq!((stuck.state, stuck.culprits.as_slice()), (State::Suspicion, &[1][..]));
        assert_eq!(stuck.text, "rank 1 has been starting for 31 s, before its first step");
        assert_eq!(starting(11.0, Some(20.0)).state, State::Suspicion);
    }

    #[test]
    fn ranks_that_do_not_run_are_trouble_at_once_and_unknown_ones_are_not() {
        let with = |second: Seen, seconds| {
            let mut seen = ranks(seconds, "forward");
            seen[1] = second;
            opinion(&seen, Some(0.1), Some(60.0))
        };
        let stopped = with(Seen::Witness(Witness::Halted), 0.1);
        assert_eq!((stopped.state, stopped.culprits.as_slice()), (State::Trouble, &[1][..]));
        assert!(stopped.text.starts_with("rank 1 is stopped"), "{}", stopped.text);
        let gone = with(Seen::Witness(Witness::Gone { reason: "died: nobody knows why".into() }), 0.1);
        assert_eq!(gone.state, State::Trouble);
        assert!(gone.text.starts_with("rank 1 died: nobody knows why; rank 0 waits in #0"), "{}", gone.text);

        let unknown = || Seen::Unknown("is on another machine".into());
        let well = with(unknown(), 0.1);
        let text = "nothing is known here of rank 1; the others go on";
        assert_eq!((well.state, well.text.as_str()), (State::Healthy, text));
        let waiting = with(unknown(), 2.0);
        assert_eq!((waiting.state, waiting.culprits.as_slice()), (State::Suspicion, &[1][..]));
        let text = "ranks wait, perhaps for rank 1, of which nothing is known here; the longest wait is 2 s";
        assert!(waiting.text.starts_with(text), "{}", waiting.text);
        assert_eq!(opinion(&[unknown(), unknown()], None, None).state, State::Starting);
        let both = [unknown(), Seen::Witness(Witness::Halted)];
        assert_eq!(opinion(&both, None, None).culprits, [1]);
    }
}
