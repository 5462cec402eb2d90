//! Where connections from other ranks wait.

use super::handshake::{Caller, Purpose};
use super::inquiry::GRACE;
use super::message::GroupNumber;
use crate::sync::{lock, wait_until};
use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Connections from other ranks, until the group they are for takes them.
pub(super) struct Lobby {
    session: Mutex<Option<u64>>,
    waiting: Mutex<HashMap<(GroupNumber, usize), TcpStream>>,
    changed: Condvar,
}

impl Lobby {
    pub(super) fn new() -> Arc<Lobby> {
        Arc::new(Lobby {
            session: Mutex::default(),
            waiting: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Lets a caller in if it belongs to this run.
    pub(super) fn admit(&self, caller: Caller) {
        let rank = caller.claim.rank;
        let Purpose::Data { session, group } = caller.claim.purpose else {
            return caller.refuse("this is a rank, not the rendezvous", false);
        };
        // A peer may be told of this rank before this rank is told of the session.
        let known = wait_until(&self.changed, lock(&self.session), GRACE, Option::is_some);
        if *known != Some(session) {
            tracing::warn!("refused rank {rank} of an earlier run");
            return caller.refuse("it is in another run", false);
        }
        drop(known);
        if let Ok(stream) = caller.welcome() {
            lock(&self.waiting).insert((group, rank), stream);
            self.changed.notify_all();
        }
    }

    /// The connection that world rank `rank` has made for `group`.
    pub(super) fn take(
        &self,
        group: GroupNumber,
        rank: usize,
        timeout: Duration,
    ) -> Option<TcpStream> {
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
