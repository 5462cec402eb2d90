use super::channel::Channel;
use super::handshake::{Caller, Purpose};
use super::message::GroupNumber;
use super::warnings::Warnings;
use crate::sync::Monitor;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct PendingConnections {
    state: Monitor<State>,
    until: Instant,
    warnings: Warnings,
}

#[derive(Default)]
struct State {
    session: Option<u64>,
    channels: HashMap<(GroupNumber, usize), Channel>,
}

impl PendingConnections {
    pub(super) fn new(until: Instant) -> Arc<PendingConnections> {
        let (state, warnings) = (Monitor::default(), Warnings::new());
        Arc::new(PendingConnections { state, until, warnings })
    }

    pub(super) fn admit(&self, caller: Caller) {
        let rank = caller.claim.rank;
        let Purpose::Data { session, group } = caller.claim.purpose else {
            return caller.refuse("this is a rank, not the rendezvous", false);
        };
        // A peer may learn of this rank before this rank learns the session.
        let left = self.until.saturating_duration_since(Instant::now());
        let known = self.state.wait_until(self.state.lock(), left, |state| state.session.is_some()).session;
        if known.is_none() {
            return caller.refuse("it has not joined yet", true);
        }
        if known != Some(session) {
            self.warnings.warn(format!("refused rank {rank} of another run"));
            return caller.refuse("it is in another run", false);
        }
        if let Ok(channel) = caller.welcome() {
            self.state.update(|state| state.channels.insert((group, rank), channel));
        }
    }

    /// Takes world rank `rank`'s connection for `group`; waits up to `timeout`.
    pub(super) fn take(&self, group: GroupNumber, rank: usize, timeout: Duration) -> Option<Channel> {
        let (key, state) = ((group, rank), self.state.lock());
        let mut state = self.state.wait_until(state, timeout, |state| state.channels.contains_key(&key));
        state.channels.remove(&key)
    }

    pub(super) fn open(&self, session: u64) {
        self.state.update(|state| state.session = Some(session));
    }
}
