//! One rank's view of a group. The group's first rank also decides for all ranks whether operations run.

use super::message::{Failure, Message, NewGroup, Notice, Number};
use super::outbox::Outbox;
use super::world::World;
use crate::backend::{GroupRank, RankShared};
use crate::call::{ArgumentError, Call, CallSite};
use crate::error::{Cause, CommError};
use crate::sync::Monitor;
use crate::verdict::{Finding, Verdict};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const ANSWER: Duration = Duration::from_secs(3);

pub(super) struct Group {
    pub(super) number: Number,
    pub(super) identity: GroupRank,
    pub(super) world: Arc<World>,
    outbox: Arc<Outbox>,
    state: Monitor<State>,
}

#[derive(Default)]
struct State {
    decided: BTreeMap<u64, Vec<NewGroup>>,
    failure: Option<Failure>,
    /// On the first rank: calls of operations that not all ranks have issued, by rank.
    calls: BTreeMap<u64, Vec<Option<Call>>>,
}

impl Group {
    pub(super) fn new(
        number: Number,
        name: &str,
        world_ranks: Vec<usize>,
        shared: &Arc<RankShared>,
        outbox: &Arc<Outbox>,
        world: Arc<World>,
    ) -> Arc<Group> {
        let rank = world_ranks.iter().position(|rank| *rank == outbox.rank).unwrap_or_default();
        let identity = GroupRank { name: name.into(), rank, world_ranks, shared: Arc::clone(shared) };
        Arc::new(Group { number, identity, world, outbox: Arc::clone(outbox), state: Monitor::default() })
    }

    pub(super) fn world_size(&self) -> usize {
        self.identity.world_ranks.len()
    }

    pub(super) fn tell_first(&self, notice: Notice) {
        if self.identity.rank == 0 {
            self.receive(notice);
        } else {
            let message = Message::Group { number: self.number, notice };
            self.outbox.post(self.identity.world_ranks[0], &message);
        }
    }

    pub(super) fn receive(&self, notice: Notice) {
        self.state.update(|state| match notice {
            Notice::Called { sequence, rank, call } => self.called(state, sequence, rank, call),
            Notice::Trouble(failure) => self.fail(state, failure),
            Notice::Run { sequence, groups } => _ = state.decided.insert(sequence, groups),
            Notice::Failed(failure) => {
                self.world.learn(&failure);
                state.failure.get_or_insert(failure);
            }
        });
    }

    /// On the first rank: records a call. Once every rank has called, decides whether the operation runs.
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
        let Some(groups) = Call::agree(&calls) else {
            let (group, calls) = (Arc::clone(&self.identity.name), calls.into_iter().map(Some).collect());
            let cause = Cause::Error(CommError::Mismatch { group, sequence, calls });
            return self.fail(state, Failure { cause, everywhere: false });
        };
        let number = |(name, ranks): (Arc<str>, Vec<usize>)| NewGroup {
            number: self.outbox.next_group(),
            name: name.to_string(),
            world_ranks: ranks.iter().map(|rank| self.identity.world_ranks[*rank]).collect(),
        };
        let groups: Vec<NewGroup> = groups.into_iter().map(number).collect();
        self.tell_others(&Notice::Run { sequence, groups: groups.clone() });
        state.decided.insert(sequence, groups);
    }

    /// On the first rank: fails the group for all ranks. The first cause wins, but an abort of the world takes
    /// precedence over its consequences.
    fn fail(&self, state: &mut State, failure: Failure) {
        if state.failure.is_some() {
            return;
        }
        let mut failure = self.world.aborted().unwrap_or(failure);
        if let Cause::Error(CommError::TimedOut { site, missing, .. }) = &mut failure.cause {
            // Every rank has issued an operation that is not in this map.
            *missing = match state.calls.get(&site.sequence) {
                Some(calls) => (0..calls.len()).filter(|rank| calls[*rank].is_none()).collect(),
                None => Vec::new(),
            };
        }
        self.world.learn(&failure);
        self.tell_others(&Notice::Failed(failure.clone()));
        state.calls.clear();
        state.failure = Some(failure);
    }

    /// Call it with the state locked, so that all ranks learn of events in the same order.
    fn tell_others(&self, notice: &Notice) {
        let message = Message::Group { number: self.number, notice: notice.clone() };
        for rank in self.identity.world_ranks.iter().filter(|rank| **rank != self.outbox.rank) {
            self.outbox.post(*rank, &message);
        }
    }

    /// Waits until the operation may run on all ranks; returns the groups that it creates.
    pub(super) fn enter(
        &self,
        site: &CallSite,
        problem: Option<ArgumentError>,
    ) -> Result<Vec<NewGroup>, CommError> {
        let mut state = self.state.lock();
        loop {
            // A decision takes precedence over a failure: all ranks act on it.
            if let Some(groups) = state.decided.remove(&site.sequence) {
                return Ok(groups);
            }
            if let Some(failure) = &state.failure {
                return Err(failure.cause.error(site, problem));
            }
            state = self.state.wait(state);
        }
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.state.lock().failure.clone()
    }

    /// Fails the group because a wait timed out, unless it has failed already; returns the cause. `verdict`: from the
    /// flight recorders of all ranks.
    pub(super) fn time_out(&self, site: &CallSite, waited: Duration, verdict: Verdict) -> CommError {
        let timed_out = |verdict| {
            let (site, missing, verdict) = (site.clone(), Vec::new(), Box::new(verdict));
            let cause = Cause::Error(CommError::TimedOut { site, waited, missing, verdict });
            Failure { cause, everywhere: false }
        };
        self.tell_first(Notice::Trouble(timed_out(verdict)));
        let mut state = self.state.wait_until(self.state.lock(), ANSWER, |state| state.failure.is_some());
        let failure = state.failure.get_or_insert_with(|| {
            let first = self.identity.world_ranks[0];
            let text = format!(
                "rank {first} has not answered for {} s: its process is stopped or its machine cannot be \
                 reached",
                ANSWER.as_secs()
            );
            timed_out(Verdict { finding: Finding::Silent, culprits: vec![first], text })
        });
        let error = failure.cause.error(site, None);
        drop(state);
        self.state.notify();
        error
    }

    /// Fails the group with `cause`, or with a known abort of the world. Returns the cause that applies.
    pub(super) fn give_up(&self, cause: Cause) -> Cause {
        let failure = self.world.aborted().unwrap_or(Failure { cause, everywhere: false });
        self.tell_first(Notice::Trouble(failure.clone()));
        self.failure().unwrap_or(failure).cause
    }
}
