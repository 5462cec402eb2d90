//! Connections from other ranks that no group has taken yet.

use super::channel::Channel;
use super::handshake::{Caller, Purpose};
use super::message::GroupNumber;
use super::warnings::Warnings;
use crate::sync::{lock, wait_until};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Connections from other ranks, each until the group that it is for takes it.
pub(super) struct PendingConnections {
    session: Mutex<Option<u64>>,
    /// When this rank must have learned the session.
    until: Instant,
    waiting: Mutex<HashMap<(GroupNumber, usize), Channel>>,
    changed: Condvar,
    /// About callers that know the secret and belong to another run.
    warnings: Warnings,
}

impl PendingConnections {
    pub(super) fn new(until: Instant) -> Arc<PendingConnections> {
        Arc::new(PendingConnections {
            session: Mutex::default(),
            until,
            waiting: Mutex::default(),
            changed: Condvar::new(),
            warnings: Warnings::new(),
        })
    }

    /// Accepts a caller that belongs to this run, and refuses others.
    pub(super) fn admit(&self, caller: Caller) {
        let rank = caller.claim.rank;
        let Purpose::Data { session, group } = caller.claim.purpose else {
            return caller.refuse("this is a rank, not the rendezvous", false);
        };
        // A peer may learn of this rank before this rank learns the session.
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

    /// Takes the connection that world rank `rank` has made for `group`; waits for it until `timeout`.
    pub(super) fn take(&self, group: GroupNumber, rank: usize, timeout: Duration) -> Option<Channel> {
        let key = (group, rank);
        let waiting = lock(&self.waiting);
        wait_until(&self.changed, waiting, timeout, |waiting| waiting.contains_key(&key)).remove(&key)
    }

    /// Sets the session, so that callers can be accepted.
    pub(super) fn open(&self, session: u64) {
        *lock(&self.session) = Some(session);
        self.changed.notify_all();
    }
}
