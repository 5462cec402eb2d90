//! The state of a run, for people and programs.

use std::collections::{BTreeMap, BTreeSet};

use kiln_collectives::{Activity, Operation, Phase, Witness, waits_for};
use serde::Serialize;

use super::health::{Assessment, State, assess, ranks_of};
use crate::ask::{Answer, Answers, Process, ProcessStatus, RankStatus, Thread};

/// The state of a run at one moment.
#[derive(Debug, Serialize)]
pub struct Look {
    /// The run folder.
    pub run: String,
    pub state: State,
    /// A description of the state.
    pub text: String,
    pub culprits: Vec<usize>,
    /// Step of the foremost rank, or the last step logged.
    pub step: Option<u64>,
    pub steps: Option<u64>,
    /// Step of the newest checkpoint.
    pub saved: Option<u64>,
    pub loss: Option<f64>,
    pub tokens_per_s: Option<f64>,
    /// Maximum seconds that a rank may wait in one collective.
    pub deadline_s: Option<f64>,
    pub ranks: Vec<RankLook>,
    pub processes: Vec<ProcessLook>,
}

/// The state of a rank.
#[derive(Debug, Default, Serialize)]
pub struct RankLook {
    pub rank: usize,
    /// The reason why the rank has not answered; `None` if it has.
    pub silent: Option<String>,
    pub step: Option<u64>,
    pub activity: Option<Activity>,
    /// The oldest pending collective.
    pub pending: Option<Call>,
    /// The collective that the rank called last.
    pub last: Option<Call>,
    pub waits_for: Vec<usize>,
    pub bytes: Option<u64>,
    pub peak_bytes: Option<u64>,
}

/// A collective called by a rank.
#[derive(Debug, Serialize)]
pub struct Call {
    pub group: String,
    pub sequence: u64,
    pub operation: Operation,
    pub module: String,
    pub phase: Phase,
    pub seconds: f64,
}

/// The state of a process.
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
    let statuses: Vec<&ProcessStatus> = processes
        .iter()
        .filter_map(|process| match &process.answer {
            Answer::Status(status) => Some(&**status),
            _ => None,
        })
        .collect();
    let first = statuses.first();
    // If no process answers, only ranks with a socket are known.
    let named: BTreeSet<usize> =
        processes.iter().flat_map(|process| process.owner.ranks.iter().copied()).collect();
    let world_size = first.map_or(named.last().map_or(0, |last| last + 1), |status| status.world_size);
    let mut witnesses: Vec<Witness> = all.into_iter().flatten().map(Witness::from).collect();
    // Ranks that no process on this machine has reported; they may be healthy.
    let mut unknown: BTreeSet<usize> = (witnesses.len()..world_size).collect();
    witnesses.resize_with(world_size, || Witness::Gone {
        reason: "has not started, is about to exit, or is on another machine".to_owned(),
    });
    let mut ranks: BTreeMap<usize, &RankStatus> = BTreeMap::new();
    for Process { owner, answer, .. } in &processes {
        let pid = owner.process.pid;
        let mut set = |ranks: &[usize], witness: Witness| {
            for rank in ranks {
                if let Some(known) = witnesses.get_mut(*rank) {
                    *known = witness.clone();
                    unknown.remove(rank);
                }
            }
        };
        match answer {
            Answer::Status(status) => {
                for rank in &status.ranks {
                    ranks.insert(rank.rank, rank);
                    set(&[rank.rank], Witness::Answered(Box::new(rank.flight.clone())));
                }
            }
            Answer::Elsewhere => {
                for rank in owner.ranks.iter().filter(|rank| unknown.contains(rank)) {
                    let reason =
                        format!("is on {} and cannot be reached from this machine", owner.process.host);
                    witnesses[*rank] = Witness::Gone { reason };
                }
            }
            Answer::Stopped => set(&owner.ranks, Witness::Halted),
            Answer::Gone => {
                set(&owner.ranks, Witness::Gone { reason: format!("died: its process {pid} is gone") });
            }
            Answer::Silent(why) => {
                let reason = format!("does not answer: {why} (process {pid})");
                set(&owner.ranks, Witness::Gone { reason });
            }
        }
    }
    let longest = ranks.values().filter_map(|rank| rank.longest_step_s).reduce(f64::max);
    let deadline_s = first.and_then(|status| status.deadline_s);
    let assessment = assess(&witnesses, &unknown, longest, deadline_s);
    let Assessment { state, text, culprits } = match held(&statuses) {
        // Waits for a held rank are expected, but a missing process still means trouble.
        Some(text) if assessment.state != State::Trouble => Assessment {
            state: State::Held,
            text: format!("{text}; inspect with: kiln attach {run}"),
            culprits: Vec::new(),
        },
        _ => assessment,
    };
    let newest =
        |step: fn(&RankStatus) -> u64| ranks.values().map(|rank| step(rank)).max().filter(|step| *step > 0);
    Look {
        run,
        state,
        text,
        culprits,
        step: newest(|rank| rank.step),
        steps: first.map(|status| status.steps),
        saved: newest(|rank| rank.saved),
        loss: ranks.values().find_map(|rank| rank.loss),
        tokens_per_s: ranks.values().find_map(|rank| rank.tokens_per_s),
        deadline_s,
        ranks: (0..world_size)
            .filter(|rank| first.is_some() || named.contains(rank))
            .map(|rank| rank_look(rank, ranks.get(&rank).copied(), &witnesses))
            .collect(),
        processes: processes.into_iter().map(process_look).collect(),
    }
}

fn held(statuses: &[&ProcessStatus]) -> Option<String> {
    let ranks: BTreeSet<_> = statuses.iter().flat_map(|status| status.held.iter().copied()).collect();
    let places: Vec<_> = statuses.iter().flat_map(|status| status.held_at.iter().cloned()).collect();
    let ranks: Vec<_> = ranks.into_iter().collect();
    match (places.is_empty(), ranks.len()) {
        (_, 0) => None,
        (false, _) => Some(places.join("; ")),
        (true, 1) => Some(format!("{} is held", ranks_of(&ranks))),
        (true, _) => Some(format!("{} are held", ranks_of(&ranks))),
    }
}

fn process_look(Process { owner, answer, threads }: Process) -> ProcessLook {
    let threads = match answer {
        Answer::Status(status) => status.threads,
        _ => threads,
    };
    ProcessLook { host: owner.process.host, process: owner.process.pid, ranks: owner.ranks, threads }
}

fn rank_look(rank: usize, status: Option<&RankStatus>, witnesses: &[Witness]) -> RankLook {
    let silent = |reason| RankLook { rank, silent: Some(reason), ..RankLook::default() };
    let flight = match &witnesses[rank] {
        Witness::Answered(flight) => flight,
        Witness::Halted => return silent("is stopped".to_owned()),
        Witness::Gone { reason } => return silent(reason.clone()),
        Witness::Silent { seconds } => return silent(format!("has not answered for {seconds:.0} s")),
    };
    let pending = flight.groups.iter().filter_map(|group| {
        let pending = group.pending.first()?;
        Some(Call {
            group: group.name.clone(),
            sequence: pending.sequence,
            operation: pending.call.operation,
            module: pending.call.label.scope.to_string(),
            phase: pending.call.label.phase,
            seconds: pending.seconds,
        })
    });
    let last = flight.records.last().map(|record| Call {
        group: record.group.to_string(),
        sequence: record.sequence,
        operation: record.operation,
        module: record.label.scope.to_string(),
        phase: record.label.phase,
        seconds: flight.clock - record.enqueued.map_or(flight.clock, |at| at.as_secs_f64()),
    });
    RankLook {
        rank,
        silent: None,
        step: status.map(|status| status.step),
        activity: Some(flight.activity.clone()),
        pending: pending.max_by(|a, b| a.seconds.total_cmp(&b.seconds)),
        last,
        waits_for: waits_for(witnesses, rank),
        bytes: status.and_then(|status| status.bytes),
        peak_bytes: status.and_then(|status| status.peak_bytes),
    }
}

#[cfg(test)]
mod tests {
    use kiln_sys::ProcessId;

    use super::*;
    use crate::ask::Owner;

    fn silent(ranks: Vec<usize>) -> Process {
        let owner = Owner { process: ProcessId::this(), ranks };
        Process { owner, answer: Answer::Silent("the request timed out".to_owned()), threads: None }
    }

    #[test]
    fn huge_rank_makes_no_long_list() {
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
        let text = super::super::text(&look);
        assert!(text.lines().count() < 10 && text.contains("0-65534 has not started"), "{text}");
    }
}
