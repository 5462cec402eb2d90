//! Where messages from other processes arrive, and how they reach the groups that they are about.

use super::group::Group;
use super::message::{Cause, Message, Notice, Number};
use super::outbox::Outbox;
use super::world::World;
use crate::diagnosis::Witness;
use crate::sync::{lock, wait, wait_until};
use crate::verdict::Verdict;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

/// How long a question waits for answers.
const PATIENCE: Duration = Duration::from_secs(2);

/// The groups of one process, and what others have said about them.
///
/// A group may be locked while the inbox is, never the other way round: messages are handed to groups with
/// the inbox locked, so that they arrive in order.
pub(super) struct Inbox {
    outbox: Arc<Outbox>,
    requests_made: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    groups: HashMap<Number, Entry>,
    worlds: HashMap<Number, Weak<World>>,
    /// Aborts of worlds that this process has not joined yet.
    early_aborts: HashMap<Number, Cause>,
    /// Answers to open questions, by the question's number and the answering rank.
    answers: HashMap<u64, HashMap<usize, Witness>>,
    goodbyes: usize,
}

/// What is known of a group's number.
enum Entry {
    /// Other ranks have made the group already; their messages wait until this one has.
    Early(Vec<Notice>),
    Open(Weak<Group>),
    /// This process has left it.
    Closed,
}

impl Inbox {
    pub(super) fn new(outbox: Arc<Outbox>) -> Inbox {
        Inbox { outbox, requests_made: AtomicU64::new(0), state: Mutex::default(), changed: Condvar::new() }
    }

    pub(super) fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    /// Lets messages reach `group`, beginning with those that came early.
    pub(super) fn register(&self, group: &Arc<Group>) {
        let mut state = lock(&self.state);
        state.worlds.insert(group.world.number, Arc::downgrade(&group.world));
        if let Some(cause) = state.early_aborts.remove(&group.world.number) {
            group.world.learn(&cause);
        }
        // Under the lock, and before the messages that came early: an abort from now on finds the group.
        if let (0, Some(cause)) = (group.rank, group.world.aborted()) {
            group.receive(Notice::Trouble(cause));
        }
        let entry = Entry::Open(Arc::downgrade(group));
        if let Some(Entry::Early(notices)) = state.groups.insert(group.number, entry) {
            for notice in notices {
                group.receive(notice);
            }
        }
    }

    /// Forgets a group. Messages about it that still come are ignored.
    pub(super) fn close(&self, number: Number) {
        lock(&self.state).groups.insert(number, Entry::Closed);
    }

    /// Takes a message from another process.
    pub(super) fn dispatch(&self, message: Message) {
        let mut state = lock(&self.state);
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
            Message::Abort { world, cause } => match state.worlds.get(&world).map(Weak::upgrade) {
                Some(known) => {
                    if let Some(known) = known {
                        known.learn(&cause);
                    }
                    fail_led_groups(&state, world, &Notice::Trouble(cause));
                }
                None => {
                    state.early_aborts.entry(world).or_insert(cause);
                }
            },
            Message::Question { request, world, from } => {
                let world = state.worlds.get(&world).and_then(Weak::upgrade);
                let flight = world.and_then(|world| world.flight(self.outbox.own_node()));
                let rank = self.outbox.rank();
                self.outbox.post(from, &Message::Answer { request, rank, flight });
            }
            Message::Answer { request, rank, flight } => {
                if let Some(answers) = state.answers.get_mut(&request) {
                    let witness = match flight {
                        Some(flight) => Witness::Answered(flight),
                        None => Witness::Gone {
                            reason: "is not in this world: it has left, or not come yet".into(),
                        },
                    };
                    answers.insert(rank, witness);
                    self.changed.notify_all();
                }
            }
            Message::Goodbye => {
                state.goodbyes += 1;
                self.changed.notify_all();
            }
        }
    }

    /// Fails all groups of a world on all processes.
    pub(super) fn abort(&self, world: &World, cause: Cause) {
        world.learn(&cause);
        // The first abort counts.
        let cause = world.aborted().unwrap_or(cause);
        self.outbox.post_to_others(&Message::Abort { world: world.number, cause: cause.clone() });
        fail_led_groups(&lock(&self.state), world.number, &Notice::Trouble(cause));
    }

    /// Asks all processes for their flight recorders after a wait for operation `sequence` of `group` has
    /// timed out, and compares the answers.
    pub(super) fn diagnose(&self, group: &Group, sequence: u64) -> Verdict {
        let world = &group.world;
        let request = self.requests_made.fetch_add(1, Ordering::Relaxed);
        lock(&self.state).answers.insert(request, HashMap::new());
        self.outbox.post_to_others(&Message::Question {
            request,
            world: world.number,
            from: self.outbox.rank(),
        });
        let own = world.flight(self.outbox.own_node());
        let complete = |state: &State| {
            let answers = state.answers.get(&request).map_or(0, HashMap::len);
            answers + 1 >= self.outbox.size()
        };
        let mut state = wait_until(&self.changed, lock(&self.state), PATIENCE, complete);
        let mut answers = state.answers.remove(&request).unwrap_or_default();
        drop(state);
        if let Some(own) = own {
            answers.insert(self.outbox.rank(), Witness::Answered(own));
        }
        let silent = || Witness::Silent { seconds: PATIENCE.as_secs_f64() };
        let witnesses: Vec<Witness> =
            (0..self.outbox.size()).map(|rank| answers.remove(&rank).unwrap_or_else(silent)).collect();
        Verdict::of_wait(&witnesses, &group.name, &group.world_ranks, sequence)
    }

    /// Says goodbye and waits until all other processes have: until then they may need this one.
    pub(super) fn part(&self) {
        self.outbox.post_to_others(&Message::Goodbye);
        let mut state = lock(&self.state);
        while state.goodbyes + 1 < self.outbox.size() {
            state = wait(&self.changed, state);
        }
        drop(state);
        self.outbox.close();
    }
}

/// Fails the groups of a world whose first rank this process is. Groups with another first rank hear of it
/// from that one.
fn fail_led_groups(state: &State, world: Number, notice: &Notice) {
    for entry in state.groups.values() {
        let Entry::Open(group) = entry else { continue };
        let Some(group) = group.upgrade() else { continue };
        if group.world.number == world && group.rank == 0 {
            group.receive(notice.clone());
        }
    }
}
