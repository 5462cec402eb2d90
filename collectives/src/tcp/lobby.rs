//! Where connections from other ranks wait.

use super::channel::Channel;
use super::handshake::{Caller, Purpose};
use super::message::GroupNumber;
use super::warnings::Warnings;
use crate::sync::{lock, wait_until};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Connections from other ranks, until the group they are for takes them.
pub(super) struct Lobby {
    session: Mutex<Option<u64>>,
    /// Until then this rank may not know the session yet.
    until: Instant,
    waiting: Mutex<HashMap<(GroupNumber, usize), Channel>>,
    changed: Condvar,
    /// About callers that know the secret and belong to another run.
    warnings: Warnings,
}

impl Lobby {
    pub(super) fn new(until: Instant) -> Arc<Lobby> {
        Arc::new(Lobby {
            session: Mutex::default(),
            until,
            waiting: Mutex::default(),
            changed: Condvar::new(),
            warnings: Warnings::new(),
        })
    }

    /// Lets a caller in if it belongs to this run.
    pub(super) fn admit(&self, caller: Caller) {
        let rank = caller.claim.rank;
        let Purpose::Data { session, group } = caller.claim.purpose else {
            return caller.refuse("this is a rank, not the rendezvous", false);
        };
        // A peer may be told of this rank before this rank is told of the session.
        let left = self.until.saturating_duration_since(Instant::now());
        let known = wait_until(&self.changed, lock(&self.session), left, Option::is_some);
        if known.is_none() {
            return caller.refuse("it has not joined yet", true);
        }
        if *known != Some(session) {
            self.warnings.warn(format!("refused rank {rank} of another run"));
            return caller.refuse("it is in another run", false);
        }
        drop(known);
        if let Ok(channel) = caller.welcome() {
            lock(&self.waiting).insert((group, rank), channel);
            self.changed.notify_all();
        }
    }

    /// The connection that world rank `rank` has made for `group`.
    pub(super) fn take(
        &self,
        group: GroupNumber,
        rank: usize,
        timeout: Duration,
    ) -> Option<Channel> {
        let key = (group, rank);
        let waiting = lock(&self.waiting);
        wait_until(&self.changed, waiting, timeout, |waiting| waiting.contains_key(&key))
            .remove(&key)
    }

    pub(super) fn open(&self, session: u64) {
        *lock(&self.session) = Some(session);
        self.changed.notify_all();
    }
}
