//! The state of a run, in a form for people and programs.

use std::collections::{BTreeMap, BTreeSet};

use kiln_collectives::{Activity, Flight, Operation, Phase, Witness, waits_for};
use serde::Serialize;

use super::opinion::{Opinion, Seen, State, opinion, ranks_of};
use crate::ask::{Answer, Answers, Process};
use crate::ask::{ProcessStatus, RankStatus, Thread};

/// A run at one moment.
#[derive(Debug, Serialize)]
pub struct Look {
    /// The run folder.
    pub run: String,
    pub state: State,
    /// A description of the state.
    pub text: String,
    /// World ranks to look at first.
    pub culprits: Vec<usize>,
    /// The step of the foremost rank, or the last step that was logged.
    pub step: Option<u64>,
    pub steps: Option<u64>,
    /// The step of the newest checkpoint.
    pub saved: Option<u64>,
    pub loss: Option<f64>,
    pub tokens_per_s: Option<f64>,
    /// Seconds that a rank may wait for the others in one collective.
    pub deadline_s: Option<f64>,
    pub ranks: Vec<RankLook>,
    pub processes: Vec<ProcessLook>,
}

/// A rank at one moment.
#[derive(Debug, Default, Serialize)]
pub struct RankLook {
    pub rank: usize,
    /// The reason why nothing is known about the rank; `None` if it has answered.
    pub silent: Option<String>,
    pub step: Option<u64>,
    pub activity: Option<Activity>,
    /// The pending collective that was called first.
    pub pending: Option<Call>,
    /// The collective that it called last.
    pub last: Option<Call>,
    pub waits_for: Vec<usize>,
    pub bytes: Option<u64>,
    pub peak_bytes: Option<u64>,
}

/// A collective, as called by a rank.
#[derive(Debug, Serialize)]
pub struct Call {
    pub group: String,
    pub sequence: u64,
    pub operation: Operation,
    pub unit: String,
    pub phase: Phase,
    /// Seconds since it was called.
    pub seconds: f64,
}

/// A process at one moment.
#[derive(Debug, Serialize)]
pub struct ProcessLook {
    pub host: String,
    pub process: i32,
    pub ranks: Vec<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<Vec<Thread>>,
}

/// Combines the answers of the processes of the run in the folder `run`.
pub fn look(run: String, answers: Answers) -> Look {
    let Answers { processes, all } = answers;
    let statuses = || processes.iter().filter_map(|process| status_of(&process.answer));
    let first = statuses().next();
    let (steps, deadline_s) = first.map_or((None, None), |status| (Some(status.steps), status.deadline_s));
    // If no process answers, only the ranks that have a socket are known.
    let named: BTreeSet<usize> =
        processes.iter().flat_map(|process| process.owner.ranks.iter().copied()).collect();
    let world_size = first.map_or(named.last().map_or(0, |last| last + 1), |status| status.world_size);
    let mut seen: Vec<Seen> = match all {
        Some(all) => all.into_iter().map(|known| Seen::Witness(Witness::from(known))).collect(),
        None => Vec::new(),
    };
    seen.resize_with(world_size, || {
        Seen::Unknown("has not begun, is about to end, or is on another machine".to_owned())
    });
    let mut told: BTreeMap<usize, &RankStatus> = BTreeMap::new();
    for Process { owner, answer, .. } in &processes {
        match answer {
            Answer::Status(status) => {
                for rank in &status.ranks {
                    told.insert(rank.rank, rank);
                    set(
                        &mut seen,
                        rank.rank,
                        Seen::Witness(Witness::Answered(Box::new(rank.flight.clone()))),
                    );
                }
            }
            Answer::Elsewhere => {
                let on = format!("is on {}, and not seen from here", owner.process.host);
                for rank in &owner.ranks {
                    if let Some(unknown @ Seen::Unknown(_)) = seen.get_mut(*rank) {
                        *unknown = Seen::Unknown(on.clone());
                    }
                }
            }
            Answer::Stopped => owner.ranks.iter().for_each(|rank| {
                set(&mut seen, *rank, Seen::Witness(Witness::Halted));
            }),
            Answer::Gone => owner.ranks.iter().for_each(|rank| {
                let reason = format!("died: its process {} is gone", owner.process.pid);
                set(&mut seen, *rank, Seen::Witness(Witness::Gone { reason }));
            }),
            Answer::Silent(why) => owner.ranks.iter().for_each(|rank| {
                let reason = format!("does not answer: {why} (process {})", owner.process.pid);
                set(&mut seen, *rank, Seen::Witness(Witness::Gone { reason }));
            }),
        }
    }
    let longest = told
        .values()
        .filter_map(|rank| rank.longest_step_s)
        .fold(None, |most: Option<f64>, step| Some(most.map_or(step, |most| most.max(step))));
    let Opinion { state, text, culprits } = match held(statuses()) {
        // Ranks that wait for held ranks wait for a person. A process that is gone still means trouble.
        Some(text) if opinion(&seen, longest, deadline_s).state != State::Trouble => Opinion {
            state: State::Held,
            text: format!("{text}; look into it with: kiln attach {run}"),
            culprits: Vec::new(),
        },
        _ => opinion(&seen, longest, deadline_s),
    };
    let witnesses: Vec<Witness> = seen.iter().map(Seen::witness).collect();
    let ranks: Vec<_> = seen
        .iter()
        .enumerate()
        .filter(|(rank, _)| first.is_some() || named.contains(rank))
        .map(|(rank, seen)| rank_look(rank, seen, told.get(&rank), &witnesses))
        .collect();
    let newest =
        |of: fn(&RankStatus) -> u64| told.values().map(|rank| of(rank)).max().filter(|step| *step > 0);
    Look {
        run,
        state,
        text,
        culprits,
        step: newest(|rank| rank.step),
        steps,
        saved: newest(|rank| rank.saved),
        loss: told.values().find_map(|rank| rank.loss),
        tokens_per_s: told.values().find_map(|rank| rank.tokens_per_s),
        deadline_s,
        ranks,
        processes: processes.into_iter().map(process_look).collect(),
    }
}

/// Describes which ranks are held, and where.
fn held<'a>(statuses: impl Iterator<Item = &'a ProcessStatus>) -> Option<String> {
    let (mut ranks, mut places) = (BTreeSet::new(), Vec::new());
    for status in statuses {
        ranks.extend(status.held.iter().copied());
        places.extend(status.held_at.iter().cloned());
    }
    let ranks: Vec<_> = ranks.into_iter().collect();
    match (places.is_empty(), ranks.len()) {
        (_, 0) => None,
        (false, _) => Some(places.join("; ")),
        (true, 1) => Some(format!("{} is held", ranks_of(&ranks))),
        (true, _) => Some(format!("{} are held", ranks_of(&ranks))),
    }
}

fn set(seen: &mut [Seen], rank: usize, now: Seen) {
    if let Some(seen) = seen.get_mut(rank) {
        *seen = now;
    }
}

fn status_of(answer: &Answer) -> Option<&ProcessStatus> {
    match answer {
        Answer::Status(status) => Some(status),
        _ => None,
    }
}

fn process_look(process: Process) -> ProcessLook {
    let Process { owner, answer, threads } = process;
    let told = match answer {
        Answer::Status(status) => status.threads,
        _ => None,
    };
    ProcessLook {
        host: owner.process.host,
        process: owner.process.pid,
        ranks: owner.ranks,
        threads: told.or(threads),
    }
}

fn rank_look(rank: usize, seen: &Seen, told: Option<&&RankStatus>, witnesses: &[Witness]) -> RankLook {
    let flight = match seen {
        Seen::Witness(Witness::Answered(flight)) => flight,
        Seen::Witness(Witness::Halted) => {
            return RankLook { rank, silent: Some("is stopped".to_owned()), ..RankLook::default() };
        }
        Seen::Witness(Witness::Gone { reason }) | Seen::Unknown(reason) => {
            return RankLook { rank, silent: Some(reason.clone()), ..RankLook::default() };
        }
        Seen::Witness(Witness::Silent { seconds }) => {
            let silent = Some(format!("has said nothing for {seconds:.0} s"));
            return RankLook { rank, silent, ..RankLook::default() };
        }
    };
    RankLook {
        rank,
        silent: None,
        step: told.map(|told| told.step),
        activity: Some(flight.activity.clone()),
        pending: pending(flight),
        last: last(flight),
        waits_for: waits_for(witnesses, rank),
        bytes: told.and_then(|told| told.bytes),
        peak_bytes: told.and_then(|told| told.peak_bytes),
    }
}

/// Returns the collective that a rank has been in for the longest time.
fn pending(flight: &Flight) -> Option<Call> {
    let first = |group: &'_ kiln_collectives::GroupFlight| {
        let pending = group.pending.first()?;
        Some(Call {
            group: group.name.clone(),
            sequence: pending.sequence,
            operation: pending.call.operation,
            unit: pending.call.label.scope.to_string(),
            phase: pending.call.label.phase,
            seconds: pending.seconds,
        })
    };
    flight.groups.iter().filter_map(first).max_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

fn last(flight: &Flight) -> Option<Call> {
    let record = flight.records.last()?;
    Some(Call {
        group: record.group.to_string(),
        sequence: record.sequence,
        operation: record.operation,
        unit: record.label.scope.to_string(),
        phase: record.label.phase,
        seconds: flight.clock - record.enqueued.map_or(flight.clock, |at| at.as_secs_f64()),
    })
}

#[cfg(test)]
mod tests {
    use kiln_sys::ProcessId;

    use super::*;
    use crate::ask::Owner;

    /// Returns a process with these ranks, which does not answer.
    fn silent(ranks: Vec<usize>) -> Process {
        let owner = Owner { process: ProcessId::this(), ranks };
        Process { owner, answer: Answer::Silent("it says nothing in time".to_owned()), threads: None }
    }

    #[test]
    fn a_file_with_a_huge_rank_makes_no_long_list() {
        let last = (1 << 16) - 1;
        let answers = Answers { processes: vec![silent(vec![0, 1]), silent(vec![last])], all: None };
        let look = look("run".to_owned(), answers);
        assert_eq!(look.ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [0, 1, last]);
        let status = ProcessStatus {
            world_size: 1 << 16,
            steps: 5,
            deadline_s: None,
            ranks: Vec::new(),
            held: Vec::new(),
            held_at: Vec::new(),
            all: None,
            threads: None,
        };
        let mut first = silent(vec![0, 1]);
        first.answer = Answer::Status(Box::new(status));
        let look =
            super::look("run".to_owned(), Answers { processes: vec![first, silent(vec![last])], all: None });
        let text = super::super::show::text(&look);
        assert!(text.lines().count() < 10 && text.contains("0-65534 has not begun"), "{text}");
    }
}
