use std::time::Duration;

use kiln_sys::launcher::Message;
use kiln_sys::words::number_of;

use super::child::End;
use super::ends::{Ends, Verdict};

/// First and maximum pause before a restart.
const PAUSE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// A life that reached a step and lasted this long counts as progress. Without a step, its ranks may only have waited
/// for another node.
const LASTED: Duration = Duration::from_secs(300);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    End,
    GiveUp(String),
    Again(Duration),
}

#[derive(Debug)]
pub(super) struct Restarts {
    most: u64,
    done: u64,
    in_vain: u32,
    farthest: Option<u64>,
    before: Vec<Failure>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    rank: usize,
    code: Option<i32>,
    signal: Option<i32>,
    step: u64,
    words: Vec<String>,
}

impl Failure {
    /// Returns the failure that the rank reports as its own. Only such failures can be recognised when they repeat: a
    /// killed rank reports nothing, and a rank that blames another reports a consequence.
    fn of(end: &End) -> Option<Failure> {
        let step = end.step().filter(|_| end.failed() && !end.asked_to_end && !end.is_consequence())?;
        let own = end.words.iter().filter(|(word, _)| *word == Message::Failure);
        let words: Vec<_> = own.map(|(_, text)| text.clone()).collect();
        let End { rank, code, signal, .. } = *end;
        (!words.is_empty()).then_some(Failure { rank, code, signal, step, words })
    }
}

impl Restarts {
    pub(super) fn new(most: u64) -> Self {
        Restarts { most, done: 0, in_vain: 0, farthest: None, before: Vec::new() }
    }

    pub(super) fn done(&self) -> u64 {
        self.done
    }

    /// Decides what to do after a life that `lasted` this long and ended as in `ends`. Counts a restart.
    pub(super) fn after(&mut self, ends: &Ends, verdict: Verdict, lasted: Duration) -> Next {
        if verdict != Verdict::Failed || self.most == 0 {
            return Next::End;
        }
        let failures: Vec<_> = ends.ranks.iter().filter_map(Failure::of).collect();
        if let Some(again) = failures.iter().find(|failure| self.before.contains(failure)) {
            return Next::GiveUp(format!(
                "giving up: rank {} failed in step {} with the same error as before the last restart: \
                 another restart would end the same way. Fix the cause, and start the job again",
                again.rank, again.step
            ));
        }
        // The node was, or could have been, in the previous life: further waiting is pointless.
        if self.done > 0 && !ends.absent.is_empty() {
            let nodes: Vec<_> = ends.absent.iter().map(usize::to_string).collect();
            return Next::GiveUp(format!(
                "giving up: node {} did not join this restart. Its launcher has given up or has ended, and \
                 reports why, or its machine cannot be reached. If a node needs longer to return, raise \
                 comm.join_timeout_s",
                nodes.join(" and node ")
            ));
        }
        if self.done >= self.most {
            return Next::GiveUp(format!("giving up after {}", number_of(self.done, "restart")));
        }
        let reached = ends.ranks.iter().filter_map(End::step).max();
        let got_farther =
            self.done == 0 || reached > self.farthest || (reached.is_some() && lasted >= LASTED);
        self.farthest = self.farthest.max(reached);
        self.in_vain = if got_farther { 0 } else { self.in_vain + 1 };
        self.before = failures;
        self.done += 1;
        Next::Again(PAUSE[0].saturating_mul(1 << self.in_vain.min(16)).min(PAUSE[1]))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Instant;

    use super::*;

    fn end(rank: usize, step: u64, words: &[(Message, &str)]) -> End {
        let step = Some((Message::Step, step.to_string())).filter(|_| step > 0);
        let words = words.iter().map(|(word, text)| (*word, (*text).to_owned())).chain(step).collect();
        End {
            rank,
            pid: 1,
            code: Some(1),
            signal: None,
            after: Duration::ZERO,
            at: Instant::now(),
            asked_to_end: false,
            killed: None,
            words,
            crash: None,
            last_lines: Vec::new(),
            stderr: PathBuf::new(),
        }
    }

    fn life(ranks: Vec<End>) -> Ends {
        Ends { ranks, ..Ends::default() }
    }

    fn after(restarts: &mut Restarts, ranks: Vec<End>) -> Next {
        restarts.after(&life(ranks), Verdict::Failed, Duration::from_secs(1))
    }

    const NAN: &[(Message, &str)] = &[(Message::Failure, "step 4: loss is NaN")];

    #[test]
    fn the_same_failure_in_the_same_step_is_not_tried_a_third_time() {
        let mut restarts = Restarts::new(5);
        let both = || vec![end(1, 4, NAN), end(0, 4, NAN)];
        assert!(matches!(after(&mut restarts, both()), Next::Again(_)));
        let Next::GiveUp(why) = after(&mut restarts, vec![end(0, 4, NAN)]) else { panic!() };
        assert!(why.contains("rank 0 failed in step 4 with the same error as before"), "{why}");
    }

    #[test]
    fn another_failure_is() {
        let others: [(&str, Vec<End>); 5] = [
            ("another step", vec![end(0, 5, NAN)]),
            ("another error", vec![end(0, 4, &[(Message::Failure, "step 4: no space left")])]),
            ("another rank", vec![end(1, 4, NAN)]),
            ("another rank's fault", vec![end(0, 4, &[(Message::Consequence, "rank 1 died")])]),
            ("before the first step", vec![end(0, 0, NAN)]),
        ];
        for (what, other) in others {
            let mut restarts = Restarts::new(5);
            after(&mut restarts, vec![end(0, 4, NAN)]);
            assert!(matches!(after(&mut restarts, other), Next::Again(_)), "{what}");
        }
    }

    #[test]
    fn only_reported_failures_are_compared() {
        let quiet = || end(0, 4, &[]);
        let ended = || End { asked_to_end: true, ..end(0, 4, NAN) };
        let early = || end(0, 0, NAN);
        for again in [quiet as fn() -> End, ended, early] {
            let mut restarts = Restarts::new(5);
            assert!(matches!(after(&mut restarts, vec![again()]), Next::Again(_)));
            assert!(matches!(after(&mut restarts, vec![again()]), Next::Again(_)));
        }
    }

    #[test]
    fn pauses_double_without_progress() {
        let seconds = |next: Next| match next {
            Next::Again(pause) => pause.as_secs(),
            other => panic!("{other:?}"),
        };
        let mut restarts = Restarts::new(100);
        let mut pause = |step: u64, lasted: u64| {
            let ends = life(vec![end(0, step, &[])]);
            seconds(restarts.after(&ends, Verdict::Failed, Duration::from_secs(lasted)))
        };
        // No rank reports progress, as when all are killed.
        let first: Vec<_> = (0..8).map(|_| pause(0, 1)).collect();
        assert_eq!(first, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pause(7, 1), 1);
        assert_eq!([pause(7, 1), pause(6, 1), pause(8, 1), pause(8, 1)], [2, 4, 1, 2]);
        // Long, but without a step: another node's ranks did not arrive.
        assert_eq!([pause(8, 1000), pause(0, 1000), pause(0, 1)], [1, 2, 4]);
    }

    #[test]
    fn an_absent_node_ends_the_job() {
        let alone = || Ends { absent: vec![1, 2], ..life(vec![end(0, 0, &[])]) };
        let mut restarts = Restarts::new(5);
        let mut after = || restarts.after(&alone(), Verdict::Failed, Duration::from_secs(1));
        assert!(matches!(after(), Next::Again(_)));
        let Next::GiveUp(why) = after() else { panic!() };
        assert!(why.starts_with("giving up: node 1 and node 2 did not join this restart"), "{why}");
    }

    #[test]
    fn only_failures_are_restarted() {
        let mut restarts = Restarts::new(2);
        for done in 1..=2 {
            assert!(matches!(after(&mut restarts, vec![end(0, done, &[])]), Next::Again(_)));
            assert_eq!(restarts.done(), done);
        }
        let why = "giving up after 2 restarts".to_owned();
        assert_eq!(after(&mut restarts, vec![end(0, 9, &[])]), Next::GiveUp(why));
        assert_eq!(after(&mut Restarts::new(0), vec![end(0, 9, &[])]), Next::End);
        let mut restarts = Restarts::new(2);
        for verdict in [Verdict::Done, Verdict::Usage, Verdict::Preempted, Verdict::NotSaved] {
            assert_eq!(restarts.after(&life(vec![]), verdict, Duration::ZERO), Next::End);
        }
    }
}
