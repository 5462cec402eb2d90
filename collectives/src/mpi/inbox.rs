//! Receives messages from other processes and passes them to their groups.

use super::group::Group;
use super::message::{Failure, Message, Notice, Number};
use super::outbox::Outbox;
use super::world::World;
use crate::diagnosis::Witness;
use crate::sync::Monitor;
use crate::verdict::Verdict;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(2);

/// The groups of one process, and messages about groups that it has not created yet. Lock order: the inbox, then a
/// group, never the reverse. The inbox is locked while messages are passed on, so they arrive in order.
pub(super) struct Inbox {
    pub(super) outbox: Arc<Outbox>,
    requests_made: AtomicU64,
    state: Monitor<State>,
}

#[derive(Default)]
struct State {
    groups: HashMap<Number, Entry>,
    worlds: HashMap<Number, Weak<World>>,
    early_aborts: HashMap<Number, Failure>,
    /// Answers to open questions, by the question's number and the answering rank.
    answers: HashMap<u64, HashMap<usize, Witness>>,
    goodbyes: usize,
}

enum Entry {
    /// Messages for a group that other ranks have created and this rank has not.
    Early(Vec<Notice>),
    Open(Weak<Group>),
    Closed,
}

impl Inbox {
    pub(super) fn new(outbox: Arc<Outbox>) -> Inbox {
        Inbox { outbox, requests_made: AtomicU64::new(0), state: Monitor::default() }
    }

    pub(super) fn register(&self, group: &Arc<Group>) {
        let mut state = self.state.lock();
        state.worlds.insert(group.world.number, Arc::downgrade(&group.world));
        if let Some(abort) = state.early_aborts.remove(&group.world.number) {
            group.world.learn(&abort);
        }
        // Checked under the lock, and before the early messages, so that any later abort reaches the group.
        if let (0, Some(abort)) = (group.identity.rank, group.world.aborted()) {
            group.receive(Notice::Trouble(abort));
        }
        let entry = Entry::Open(Arc::downgrade(group));
        if let Some(Entry::Early(notices)) = state.groups.insert(group.number, entry) {
            for notice in notices {
                group.receive(notice);
            }
        }
    }

    pub(super) fn close(&self, number: Number) {
        self.state.lock().groups.insert(number, Entry::Closed);
    }

    pub(super) fn dispatch(&self, message: Message) {
        let mut state = self.state.lock();
        match message {
            Message::Group { number, notice } => {
                let entry = state.groups.entry(number);
                match entry.or_insert_with(|| Entry::Early(Vec::new())) {
                    Entry::Early(notices) => notices.push(notice),
                    Entry::Open(group) => {
                        if let Some(group) = group.upgrade() {
                            group.receive(notice);
                        }
                    }
                    Entry::Closed => {}
                }
            }
            Message::Abort { world, failure } => match state.worlds.get(&world).map(Weak::upgrade) {
                Some(known) => {
                    if let Some(known) = known {
                        known.learn(&failure);
                    }
                    fail_led_groups(&state, world, &Notice::Trouble(failure));
                }
                None => _ = state.early_aborts.entry(world).or_insert(failure),
            },
            Message::Question { request, world, from } => {
                let world = state.worlds.get(&world).and_then(Weak::upgrade);
                let (rank, flight) = (self.outbox.rank, world.and_then(|world| world.flight()));
                self.outbox.post(from, &Message::Answer { request, rank, flight });
            }
            Message::Answer { request, rank, flight } => {
                if let Some(answers) = state.answers.get_mut(&request) {
                    let reason = "is not in this world: it has left, or not come yet";
                    let gone = || Witness::Gone { reason: reason.into() };
                    answers.insert(rank, flight.map_or_else(gone, Witness::Answered));
                    self.state.notify();
                }
            }
            Message::Goodbye => {
                state.goodbyes += 1;
                self.state.notify();
            }
        }
    }

    pub(super) fn abort(&self, world: &World, failure: Failure) {
        world.learn(&failure);
        // The first abort counts.
        let failure = world.aborted().unwrap_or(failure);
        self.outbox.post_to_others(&Message::Abort { world: world.number, failure: failure.clone() });
        fail_led_groups(&self.state.lock(), world.number, &Notice::Trouble(failure));
    }

    /// Returns the verdict on a timed-out wait for operation `sequence` of `group`, from all flight recorders.
    pub(super) fn diagnose(&self, group: &Group, sequence: u64) -> Verdict {
        let (world, own, size) = (&group.world, self.outbox.rank, self.outbox.size());
        let request = self.requests_made.fetch_add(1, Ordering::Relaxed);
        self.state.lock().answers.insert(request, HashMap::new());
        self.outbox.post_to_others(&Message::Question { request, world: world.number, from: own });
        let flight = world.flight();
        let complete = |state: &State| state.answers.get(&request).map_or(0, HashMap::len) + 1 >= size;
        let mut state = self.state.wait_until(self.state.lock(), PATIENCE, complete);
        let mut answers = state.answers.remove(&request).unwrap_or_default();
        drop(state);
        answers.extend(flight.map(|flight| (own, Witness::Answered(flight))));
        let silent = || Witness::Silent { seconds: PATIENCE.as_secs_f64() };
        let witnesses: Vec<Witness> =
            (0..size).map(|rank| answers.remove(&rank).unwrap_or_else(silent)).collect();
        Verdict::for_wait(&witnesses, &group.identity.name, &group.identity.world_ranks, sequence)
    }

    /// Says goodbye and waits for all other goodbyes, because other processes may need this one until then.
    pub(super) fn part(&self) {
        self.outbox.post_to_others(&Message::Goodbye);
        let mut state = self.state.lock();
        while state.goodbyes + 1 < self.outbox.size() {
            state = self.state.wait(state);
        }
        drop(state);
        self.outbox.close();
    }
}

/// Fails the groups of a world whose first rank is this process. Other groups learn of it from their first ranks.
fn fail_led_groups(state: &State, world: Number, notice: &Notice) {
    for entry in state.groups.values() {
        let Entry::Open(group) = entry else { continue };
        let Some(group) = group.upgrade() else { continue };
        if group.world.number == world && group.identity.rank == 0 {
            group.receive(notice.clone());
        }
    }
}
