//! A group of threads: how its ranks enter an operation, exchange buffers and leave it.

use super::state::{Deposits, Operation, State};
use super::world::{GroupState, World};
use crate::buffer::Buffer;
use crate::call::{Call, CallSite};
use crate::error::{Abort, Cause, CommError};
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(super) struct Group {
    pub(super) name: Arc<str>,
    pub(super) world_ranks: Vec<usize>,
    pub(super) world: Arc<World>,
    state: Arc<GroupState>,
    /// Each rank's membership in its new group, until the rank takes it; by the number of the split.
    memberships: Mutex<BTreeMap<u64, Vec<Option<Membership>>>>,
}

impl Group {
    pub(super) fn new(name: Arc<str>, world_ranks: Vec<usize>, world: &Arc<World>) -> Arc<Group> {
        let state = Arc::new(GroupState::new(State::new(world_ranks.len())));
        world.add(&state);
        let (world, memberships) = (Arc::clone(world), Mutex::default());
        Arc::new(Group { name, world_ranks, world, state, memberships })
    }

    pub(super) fn world_size(&self) -> usize {
        self.world_ranks.len()
    }

    pub(super) fn abort_by(&self, rank: usize, reason: &str) -> Abort {
        let (group, reason) = (Arc::clone(&self.name), Arc::from(reason));
        Abort { group, rank, world_rank: self.world_ranks[rank], reason }
    }

    /// Fails operations that not all ranks have entered. The first cause wins, but an abort of the world takes
    /// precedence: ranks that learn of it leave their groups, perhaps before other ranks learn of it.
    pub(super) fn fail(&self, abort: Abort) {
        let abort = self.world.aborted().unwrap_or(abort);
        self.state.update(|state| state.fail(abort));
    }

    pub(super) fn cause(&self, site: &CallSite) -> Option<CommError> {
        self.state.lock().failure.as_ref().map(|failure| failure.error(site, None))
    }

    pub(super) fn crash(&self, rank: usize, reason: &str) {
        self.state.lock().crashed.get_or_insert(rank);
        self.fail(self.abort_by(rank, reason));
    }

    pub(super) fn issued(&self, rank: usize, sequence: u64) {
        self.state.lock().issued[rank] = sequence + 1;
    }

    pub(super) fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        if let Some(abort) = self.world.aborted() {
            self.fail(abort);
        }
        self.state.update(|state| {
            let missing =
                (0..self.world_size()).filter(|rank| state.issued[*rank] <= site.sequence).collect();
            let verdict = Box::new(self.world.diagnose(&self.name, &self.world_ranks, site.sequence));
            let error = CommError::TimedOut { site: site.clone(), waited, missing, verdict };
            state.failure.get_or_insert(Cause::Error(error)).error(site, None)
        })
    }

    pub(super) fn sleep(&self, time: Duration) {
        drop(self.state.wait_until(self.state.lock(), time, |state| state.failure.is_some()));
    }

    /// First round: posts this rank's call and input, and waits for all ranks' posts. After `Ok`, the caller must
    /// complete all rounds up to [`Group::close`], or call [`Group::crash`].
    pub(super) fn enter(
        &self,
        site: &CallSite,
        call: Call,
        input: Option<Arc<Buffer>>,
    ) -> Result<(), CommError> {
        let (rank, sequence, problem) = (site.rank, site.sequence, call.problem);
        let mut state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.error(site, None));
        }
        let operation = state.operations.entry(sequence).or_insert_with(|| Operation::new(self.world_size()));
        operation.calls[rank] = Some(call);
        operation.deposits[0][rank] = input;
        operation.arrivals += 1;
        if operation.arrivals == self.world_size() {
            self.decide(&mut state, sequence);
            self.state.notify();
        }
        loop {
            // All ranks must take part in a running operation, even if the group has failed since. Other operations can
            // no longer start after a failure.
            if state.operations.get(&sequence).is_some_and(|operation| operation.runs) {
                return Ok(());
            }
            if let Some(failure) = &state.failure {
                let error = failure.error(site, problem);
                if let Some(operation) = state.operations.get_mut(&sequence) {
                    operation.deposits[0][rank] = None;
                }
                return Err(error);
            }
            state = self.state.wait(state);
        }
    }

    /// Compares all ranks' calls: the operation runs, or the group fails. Called only if the group has not failed.
    fn decide(&self, state: &mut State, sequence: u64) {
        let Some(operation) = state.operations.get_mut(&sequence) else { return };
        let calls: Vec<Call> = operation.calls.iter().flatten().cloned().collect();
        let Some(groups) = Call::agree(&calls) else {
            let (group, calls) = (Arc::clone(&self.name), calls.into_iter().map(Some).collect());
            state.failure = Some(Cause::Error(CommError::Mismatch { group, sequence, calls }));
            return;
        };
        operation.runs = true;
        if groups.is_empty() {
            return;
        }
        let mut memberships: Vec<Option<Membership>> = calls.iter().map(|_| None).collect();
        for (name, ranks) in groups {
            let world_ranks = ranks.iter().map(|rank| self.world_ranks[*rank]).collect();
            let group = Group::new(name, world_ranks, &self.world);
            for (rank, old_rank) in ranks.into_iter().enumerate() {
                memberships[old_rank] = Some(Membership { group: Arc::clone(&group), rank });
            }
        }
        lock(&self.memberships).insert(sequence, memberships);
    }

    /// Later round: posts a buffer and waits until all ranks have arrived at `round`. Ignores a failure of the group:
    /// the operation is running on all ranks, and each rank is still working or has crashed.
    pub(super) fn arrive(
        &self,
        site: &CallSite,
        round: usize,
        deposit: Option<Arc<Buffer>>,
    ) -> Result<(), CommError> {
        let mut state = self.state.lock();
        if let Some(operation) = state.operations.get_mut(&site.sequence) {
            if let Some(deposit) = deposit {
                operation.deposits[round][site.rank] = Some(deposit);
            }
            operation.arrivals += 1;
        }
        let needed = (round + 1) * self.world_size();
        self.state.notify();
        loop {
            let operation = state.operations.get(&site.sequence);
            if operation.is_none_or(|operation| operation.arrivals >= needed) {
                return Ok(());
            }
            if let Some(rank) = state.crashed {
                let by = self.abort_by(rank, "its worker stopped during the operation");
                return Err(CommError::Aborted { site: site.clone(), by });
            }
            state = self.state.wait(state);
        }
    }

    /// Returns the buffers deposited in `round`, in rank order. Drop them before the next round.
    pub(super) fn deposits(&self, site: &CallSite, round: usize) -> Vec<Arc<Buffer>> {
        let state = self.state.lock();
        let operation = state.operations.get(&site.sequence);
        let deposits = operation.map_or(&[][..], |operation| &operation.deposits[round]);
        deposits.iter().flatten().cloned().collect()
    }

    /// Takes back this rank's deposit of `round`. After a later round, no other rank holds the deposit.
    pub(super) fn take_back(&self, site: &CallSite, round: usize) -> Option<Arc<Buffer>> {
        let mut state = self.state.lock();
        let deposits: &mut Deposits = &mut state.operations.get_mut(&site.sequence)?.deposits[round];
        deposits[site.rank].take()
    }

    pub(super) fn take_membership(&self, site: &CallSite) -> Option<Membership> {
        lock(&self.memberships).get_mut(&site.sequence)?[site.rank].take()
    }

    /// Leaves the operation, which the last rank removes. Drops this rank's input; its result for all ranks stays until
    /// all have left.
    pub(super) fn close(&self, site: &CallSite) {
        let mut state = self.state.lock();
        if let Some(operation) = state.operations.get_mut(&site.sequence) {
            operation.deposits[0][site.rank] = None;
            operation.closed += 1;
            if operation.closed == self.world_size() {
                state.operations.remove(&site.sequence);
                lock(&self.memberships).remove(&site.sequence);
            }
        }
    }
}

/// A rank's membership in a group. Dropping it fails the other ranks' pending operations, which could never complete.
pub(super) struct Membership {
    pub(super) group: Arc<Group>,
    pub(super) rank: usize,
}

impl Drop for Membership {
    fn drop(&mut self) {
        let reason = format!("rank {} left the group", self.rank);
        self.group.fail(self.group.abort_by(self.rank, &reason));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::label::{Label, Phase};
    use crate::operation::Operation;
    use std::thread;

    #[test]
    fn a_crash_during_an_operation_frees_the_peers() {
        let group = Group::new("world".into(), vec![0, 1], &Arc::default());
        let label = Label::new("block", Phase::Forward);
        let site = |rank| CallSite {
            group: "world".into(),
            sequence: 0,
            rank,
            operation: Operation::Barrier,
            label: label.clone(),
        };
        let enter = |rank| group.enter(&site(rank), Call::barrier(label.clone()), None);
        let error = thread::scope(|scope| {
            let peer = scope.spawn(|| {
                enter(0).unwrap();
                group.arrive(&site(0), 1, None).unwrap_err()
            });
            enter(1).unwrap();
            group.crash(1, "its worker panicked");
            peer.join().unwrap()
        });
        assert!(matches!(&error, CommError::Aborted { by, .. } if by.rank == 1));
        assert!(error.to_string().contains("its worker stopped"), "{error}");
    }
}
