//! A rank's view of a group. On the group's first rank, it also decides for all ranks.

use super::message::{Cause, Message, NewGroup, Notice, Number};
use super::outbox::Outbox;
use super::world::World;
use crate::call::{ArgumentError, Call, CallSite, calls_agree, partition};
use crate::error::CommError;
use crate::operation::Operation;
use crate::sync::{lock, wait, wait_until};
use crate::verdict::{Finding, Verdict};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// How long a rank whose wait has timed out gives the first rank to tell all ranks.
const ANSWER: Duration = Duration::from_secs(3);

/// A group of processes, seen from one of them.
pub(super) struct Group {
    pub(super) number: Number,
    pub(super) name: Arc<str>,
    /// World rank of each rank of this group.
    pub(super) world_ranks: Vec<usize>,
    /// This process's rank in the group.
    pub(super) rank: usize,
    pub(super) world: Arc<World>,
    outbox: Arc<Outbox>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Operations that may run and have not begun yet, with the groups that they make.
    decided: BTreeMap<u64, Vec<NewGroup>>,
    failure: Option<Cause>,
    /// On the first rank: calls of operations that not all ranks have issued, by rank.
    calls: BTreeMap<u64, Vec<Option<Call>>>,
}

impl Group {
    /// Makes a group that this process is in.
    pub(super) fn new(
        number: Number,
        name: Arc<str>,
        world_ranks: Vec<usize>,
        outbox: &Arc<Outbox>,
        world: Arc<World>,
    ) -> Arc<Group> {
        // Groups are made of the ranks that joined them, this one among them.
        let rank = world_ranks.iter().position(|rank| *rank == outbox.rank()).unwrap_or_default();
        Arc::new(Group {
            number,
            name,
            world_ranks,
            rank,
            world,
            outbox: Arc::clone(outbox),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    pub(super) fn world_size(&self) -> usize {
        self.world_ranks.len()
    }

    /// An abort caused by this rank.
    pub(super) fn abort_here(&self, reason: &str, everywhere: bool) -> Cause {
        Cause::Abort {
            origin: self.name.to_string(),
            rank: self.rank,
            world_rank: self.outbox.rank(),
            reason: reason.to_owned(),
            everywhere,
        }
    }

    /// Tells the first rank of the group, which may be this one.
    pub(super) fn tell_first(&self, notice: Notice) {
        if self.rank == 0 {
            self.receive(notice);
        } else {
            let message = Message::Group { number: self.number, notice };
            self.outbox.post(self.world_ranks[0], &message);
        }
    }

    /// Acts on a message about this group.
    pub(super) fn receive(&self, notice: Notice) {
        let mut state = lock(&self.state);
        match notice {
            Notice::Called { sequence, rank, call } => self.called(&mut state, sequence, rank, call),
            Notice::Trouble(cause) => self.fail(&mut state, cause),
            Notice::Run { sequence, groups } => {
                state.decided.insert(sequence, groups);
            }
            Notice::Failed(cause) => {
                self.world.learn(&cause);
                state.failure.get_or_insert(cause);
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// On the first rank: notes a call, and decides once every rank has called.
    fn called(&self, state: &mut State, sequence: u64, rank: usize, call: Call) {
        if state.failure.is_some() {
            return;
        }
        let size = self.world_size();
        let calls = state.calls.entry(sequence).or_insert_with(|| vec![None; size]);
        calls[rank] = Some(call);
        if calls.iter().any(Option::is_none) {
            return;
        }
        let calls: Vec<Call> = state.calls.remove(&sequence).into_iter().flatten().flatten().collect();
        if !calls_agree(&calls) {
            self.fail(state, Cause::Mismatch { sequence, calls });
            return;
        }
        let groups = match calls[0].operation {
            Operation::Split => partition(&calls)
                .into_values()
                .map(|ranks| NewGroup {
                    number: self.outbox.next_group(),
                    name: calls[ranks[0]].label.scope.to_string(),
                    world_ranks: ranks.iter().map(|rank| self.world_ranks[*rank]).collect(),
                })
                .collect(),
            _ => Vec::new(),
        };
        self.tell_others(&Notice::Run { sequence, groups: groups.clone() });
        state.decided.insert(sequence, groups);
    }

    /// On the first rank: fails the group for all ranks. The first cause wins, except that an abort of the
    /// world goes before its consequences.
    fn fail(&self, state: &mut State, mut cause: Cause) {
        if state.failure.is_some() {
            return;
        }
        if let Some(abort) = self.world.aborted() {
            cause = abort;
        }
        if let Cause::TimedOut { sequence, missing, .. } = &mut cause {
            // An operation that is not listed here has been issued by every rank.
            *missing = match state.calls.get(sequence) {
                Some(calls) => (0..calls.len()).filter(|rank| calls[*rank].is_none()).collect(),
                None => Vec::new(),
            };
        }
        self.world.learn(&cause);
        self.tell_others(&Notice::Failed(cause.clone()));
        state.calls.clear();
        state.failure = Some(cause);
    }

    /// Tells the other ranks. Called with the state locked, so that all ranks hear of events in the same
    /// order.
    fn tell_others(&self, notice: &Notice) {
        let message = Message::Group { number: self.number, notice: notice.clone() };
        for rank in self.world_ranks.iter().filter(|rank| **rank != self.outbox.rank()) {
            self.outbox.post(*rank, &message);
        }
    }

    /// Waits until the operation may run on all ranks; returns the groups that it makes.
    pub(super) fn enter(
        &self,
        site: &CallSite,
        problem: Option<ArgumentError>,
    ) -> Result<Vec<NewGroup>, CommError> {
        let mut state = lock(&self.state);
        loop {
            // A decision goes before a failure: all ranks act on it.
            if let Some(groups) = state.decided.remove(&site.sequence) {
                return Ok(groups);
            }
            if let Some(cause) = &state.failure {
                return Err(match (problem, cause) {
                    (Some(problem), Cause::Mismatch { sequence, .. }) if *sequence == site.sequence => {
                        CommError::invalid(site, problem)
                    }
                    _ => cause.error(site),
                });
            }
            state = wait(&self.changed, state);
        }
    }

    /// Why the group has failed, if it has.
    pub(super) fn failure(&self) -> Option<Cause> {
        lock(&self.state).failure.clone()
    }

    /// Fails the group because a wait timed out, unless it has failed already; returns the cause. `verdict`
    /// is what the flight recorders of all ranks show.
    pub(super) fn time_out(&self, site: &CallSite, waited: Duration, verdict: Verdict) -> CommError {
        let timed_out = |verdict| Cause::TimedOut {
            sequence: site.sequence,
            operation: site.operation,
            label: site.label.clone(),
            rank: self.rank,
            waited,
            missing: Vec::new(),
            verdict,
        };
        self.tell_first(Notice::Trouble(timed_out(verdict)));
        let state = lock(&self.state);
        let mut state = wait_until(&self.changed, state, ANSWER, |state| state.failure.is_some());
        let cause = state.failure.get_or_insert_with(|| {
            let first = self.world_ranks[0];
            timed_out(Verdict {
                finding: Finding::Silent,
                culprits: vec![first],
                text: format!(
                    "rank {first} has not answered for {} s: its process is stopped or its machine \
                     cannot be reached",
                    ANSWER.as_secs()
                ),
            })
        });
        let error = cause.error(site);
        drop(state);
        self.changed.notify_all();
        error
    }

    /// Fails the group in this rank's name; an abort of the world that this rank knows of wins.
    pub(super) fn give_up(&self, reason: &str) -> Cause {
        let cause = self.world.aborted().unwrap_or_else(|| self.abort_here(reason, false));
        self.tell_first(Notice::Trouble(cause.clone()));
        self.failure().unwrap_or(cause)
    }
}
