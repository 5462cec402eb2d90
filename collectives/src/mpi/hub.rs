//! Where messages from other processes arrive and leave for them.

use super::family::Family;
use super::group::Group;
use super::message::{Cause, Message, Notice, Number};
use crate::flight::Flight;
use crate::sync::{lock, wait, wait_until};
use crate::verdict::{Verdict, Witness};
use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak, mpsc};
use std::thread::Thread;
use std::time::Duration;

/// How long a question waits for answers.
const PATIENCE: Duration = Duration::from_secs(2);

/// Records sent with an answer.
const RECORDS: usize = 64;

/// A message in bytes, and the rank that it is for.
pub(super) type Letter = (usize, Vec<u8>);

/// Messages and groups of one process.
///
/// The hub may be locked while a group is, never the other way round: messages are handed to
/// groups with the hub locked, so that they arrive in order.
pub(super) struct Hub {
    rank: usize,
    /// Machine of each process.
    node_names: Vec<String>,
    /// To the thread that sends; `None` once everything has been said.
    outbox: Mutex<Option<mpsc::Sender<Letter>>>,
    /// The thread that listens, to be woken when answers are to be expected.
    listener: OnceLock<Thread>,
    worlds_made: AtomicI32,
    groups_made: AtomicI32,
    requests_made: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    groups: HashMap<Number, Entry>,
    families: HashMap<Number, Weak<Family>>,
    /// Aborts of worlds that this process has not joined yet.
    early_aborts: HashMap<Number, Cause>,
    /// Answers to open questions, by rank.
    answers: HashMap<u64, HashMap<usize, Witness>>,
    goodbyes: usize,
}

/// What is known of a group's number.
enum Entry {
    /// Other members have it already; what they said waits for this one.
    Early(Vec<Notice>),
    Open(Weak<Group>),
    /// This process has left it.
    Closed,
}

impl Hub {
    pub(super) fn new(rank: usize, node_names: Vec<String>, outbox: mpsc::Sender<Letter>) -> Hub {
        Hub {
            rank,
            node_names,
            outbox: Mutex::new(Some(outbox)),
            listener: OnceLock::new(),
            worlds_made: AtomicI32::new(0),
            groups_made: AtomicI32::new(0),
            requests_made: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Names the thread that calls [`Hub::dispatch`].
    pub(super) fn listens_on(&self, thread: Thread) {
        // Set once, right after the start.
        let _ = self.listener.set(thread);
    }

    /// Rank of this process.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Number of processes.
    pub(super) fn size(&self) -> usize {
        self.node_names.len()
    }

    /// Machine of a process.
    pub(super) fn node_name(&self, rank: usize) -> &str {
        &self.node_names[rank]
    }

    /// Number of the next world: even, and the same on all processes, which make them in the same
    /// order.
    pub(super) fn next_world(&self) -> Number {
        2 * (self.worlds_made.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Number of the next group whose first rank is this process: odd, and nobody else's.
    pub(super) fn next_group(&self) -> Number {
        // Process numbers are C ints in MPI.
        let (rank, size) = (self.rank as i32, self.size() as i32);
        2 * (self.groups_made.fetch_add(1, Ordering::Relaxed) * size + rank) + 1
    }

    /// Sends a message to another process. Messages of one process to another keep their order.
    pub(super) fn post(&self, to: usize, message: &Message) {
        match message.encode() {
            Ok(bytes) => {
                if let Some(outbox) = &*lock(&self.outbox) {
                    // The sender ends with the process only.
                    let _ = outbox.send((to, bytes));
                }
            }
            // Our own types can all be encoded; if not, the peers run into their time-out.
            Err(error) => tracing::error!("a message to rank {to} cannot be encoded: {error}"),
        }
        if let Some(listener) = self.listener.get() {
            listener.unpark();
        }
    }

    fn post_to_others(&self, message: &Message) {
        for rank in (0..self.size()).filter(|rank| *rank != self.rank) {
            self.post(rank, message);
        }
    }

    /// Lets messages reach `group`, those that came early first.
    pub(super) fn register(&self, group: &Arc<Group>) {
        let mut state = lock(&self.state);
        state.families.insert(group.family.world, Arc::downgrade(&group.family));
        if let Some(cause) = state.early_aborts.remove(&group.family.world) {
            group.family.learn(&cause);
        }
        // Before what came early, and under the lock: whoever aborts from now on finds the group.
        if let (0, Some(cause)) = (group.rank, group.family.aborted()) {
            group.receive(Notice::Trouble(cause));
        }
        let entry = Entry::Open(Arc::downgrade(group));
        if let Some(Entry::Early(notices)) = state.groups.insert(group.number, entry) {
            for notice in notices {
                group.receive(notice);
            }
        }
    }

    /// Forgets a group; messages about it may still come.
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
            Message::Abort { world, cause } => {
                match state.families.get(&world).map(Weak::upgrade) {
                    Some(family) => {
                        if let Some(family) = family {
                            family.learn(&cause);
                        }
                        fail_led_groups(&state, world, &Notice::Trouble(cause));
                    }
                    None => {
                        state.early_aborts.entry(world).or_insert(cause);
                    }
                }
            }
            Message::Question { request, world, from } => {
                let family = state.families.get(&world).and_then(Weak::upgrade);
                let flight = family.and_then(|family| self.flight(&family));
                self.post(from, &Message::Answer { request, rank: self.rank, flight });
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
    pub(super) fn abort(&self, family: &Family, cause: Cause) {
        family.learn(&cause);
        // Whoever was first.
        let cause = family.aborted().unwrap_or(cause);
        self.post_to_others(&Message::Abort { world: family.world, cause: cause.clone() });
        fail_led_groups(&lock(&self.state), family.world, &Notice::Trouble(cause));
    }

    /// Asks all processes what they are doing, after a wait in vain for operation `sequence` of `group`, and
    /// compares the answers.
    pub(super) fn diagnose(&self, group: &Group, sequence: u64) -> Verdict {
        let family = &group.family;
        let request = self.requests_made.fetch_add(1, Ordering::Relaxed);
        lock(&self.state).answers.insert(request, HashMap::new());
        self.post_to_others(&Message::Question { request, world: family.world, from: self.rank });
        let own = self.flight(family);
        let complete = |state: &State| {
            let answers = state.answers.get(&request).map_or(0, HashMap::len);
            answers + 1 >= self.size()
        };
        let mut state = wait_until(&self.changed, lock(&self.state), PATIENCE, complete);
        let mut answers = state.answers.remove(&request).unwrap_or_default();
        drop(state);
        if let Some(own) = own {
            answers.insert(self.rank, Witness::Answered(own));
        }
        let silent = || Witness::Silent { seconds: PATIENCE.as_secs_f64() };
        let witnesses: Vec<Witness> =
            (0..self.size()).map(|rank| answers.remove(&rank).unwrap_or_else(silent)).collect();
        Verdict::of_wait(&witnesses, &group.name, &group.world_ranks, sequence)
    }

    fn flight(&self, family: &Family) -> Option<Box<Flight>> {
        let shared = family.shared()?;
        let mut flight = shared.flight(super::end::BACKEND, self.node_names[self.rank].clone());
        let surplus = flight.records.len().saturating_sub(RECORDS);
        flight.records.drain(..surplus);
        Some(Box::new(flight))
    }

    /// Says goodbye and waits until all others have: until then they may need this process.
    pub(super) fn part(&self) {
        self.post_to_others(&Message::Goodbye);
        let mut state = lock(&self.state);
        while state.goodbyes + 1 < self.size() {
            state = wait(&self.changed, state);
        }
        drop(state);
        self.close_outbox();
    }

    /// Takes no more messages; the sender ends once those before are sent.
    pub(super) fn close_outbox(&self) {
        *lock(&self.outbox) = None;
    }
}

/// Fails the groups of a world whose first rank this process is; the others hear of it from theirs.
fn fail_led_groups(state: &State, world: Number, notice: &Notice) {
    for entry in state.groups.values() {
        let Entry::Open(group) = entry else { continue };
        let Some(group) = group.upgrade() else { continue };
        if group.family.world == world && group.rank == 0 {
            group.receive(notice.clone());
        }
    }
}
