//! The messages that this process sends to other processes.

use super::message::{Message, Number};
use crate::sync::lock;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, OnceLock, mpsc};
use std::thread::Thread;

/// The receiver's rank, and an encoded message.
pub(super) type Letter = (usize, Vec<u8>);

pub(super) struct Outbox {
    pub(super) rank: usize,
    pub(super) node_names: Vec<String>,
    letters: Mutex<Option<mpsc::Sender<Letter>>>,
    /// The listening thread, which every post wakes, because answers may follow.
    listener: OnceLock<Thread>,
    worlds_made: AtomicI32,
    groups_made: AtomicI32,
}

impl Outbox {
    pub(super) fn new(rank: usize, node_names: Vec<String>, letters: mpsc::Sender<Letter>) -> Outbox {
        Outbox {
            rank,
            node_names,
            letters: Mutex::new(Some(letters)),
            listener: OnceLock::new(),
            worlds_made: AtomicI32::new(0),
            groups_made: AtomicI32::new(0),
        }
    }

    pub(super) fn set_listener(&self, thread: Thread) {
        let _ = self.listener.set(thread);
    }

    pub(super) fn size(&self) -> usize {
        self.node_names.len()
    }

    /// Even, and equal on all processes, because they create worlds in the same order.
    pub(super) fn next_world(&self) -> Number {
        2 * (self.worlds_made.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Number of the next group whose first rank is this process: odd and unique.
    pub(super) fn next_group(&self) -> Number {
        let (rank, size) = (self.rank as i32, self.size() as i32);
        2 * (self.groups_made.fetch_add(1, Ordering::Relaxed) * size + rank) + 1
    }

    /// Messages from one process to another keep their order.
    pub(super) fn post(&self, to: usize, message: &Message) {
        match message.encode() {
            Ok(bytes) => {
                if let Some(letters) = &*lock(&self.letters) {
                    let _ = letters.send((to, bytes));
                }
            }
            Err(error) => tracing::error!("a message to rank {to} cannot be encoded: {error}"),
        }
        if let Some(listener) = self.listener.get() {
            listener.unpark();
        }
    }

    pub(super) fn post_to_others(&self, message: &Message) {
        for rank in (0..self.size()).filter(|rank| *rank != self.rank) {
            self.post(rank, message);
        }
    }

    /// The sending thread ends once it has sent all earlier messages.
    pub(super) fn close(&self) {
        *lock(&self.letters) = None;
    }
}
