//! A rank's side of the rendezvous: it says that it is alive, answers questions, and learns when a group or
//! the world has failed.

use super::channel::{Channel, Reader, Writer};
use super::frame::{self, MESSAGE_LIMIT};
use super::inquiry::GRACE;
use super::message::{Cause, GroupName, GroupNumber, Site, ToRank, ToRendezvous, Trouble};
use super::registry::HEARTBEAT;
use super::rendezvous::Rendezvous;
use super::stall::StallDetector;
use super::waker::Waker;
use crate::backend::RankShared;
use crate::sync::{lock, wait_until};
use crate::verdict::{Finding, Verdict};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a rank waits for the rendezvous to find the cause of a trouble: it asks the others for
/// at most twice [`GRACE`], once about a lost connection and once about this.
const ANSWER: Duration = Duration::from_secs(3 * GRACE.as_secs());

/// How long the rendezvous may be silent before it counts as gone. It sends a message once per [`HEARTBEAT`].
const SILENCE: Duration = Duration::from_secs(5);

/// How long a rank that is asked about an operation waits for its own caller to issue it.
const ISSUE_WAIT: Duration = Duration::from_secs(1);

/// Records sent with an answer.
const RECORDS: usize = 64;

/// One rank's connection to the rendezvous, shared by all its groups.
pub(super) struct Control {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
    /// On rank 0. Dropped last: the others may still need it.
    _rendezvous: Option<Rendezvous>,
}

struct Inner {
    shared: Arc<RankShared>,
    backend: &'static str,
    writer: Mutex<Writer>,
    state: Mutex<State>,
    /// A group or the world has failed, or the rank leaves.
    changed: Condvar,
    /// The caller has issued an operation.
    issued: Condvar,
}

struct State {
    /// The first failure of all, of the world or of a group.
    first: Option<Cause>,
    world: Option<Cause>,
    groups: HashMap<GroupNumber, Cause>,
    /// Workers to wake when their group fails.
    wakers: Vec<(GroupNumber, Weak<Waker>)>,
    heard: Instant,
    /// Watches the thread that says that this rank is alive.
    stalls: StallDetector,
    closing: bool,
}

impl Control {
    /// Takes over a connection on which this rank has just been told the session.
    pub(super) fn start(
        channel: Channel,
        shared: Arc<RankShared>,
        backend: &'static str,
        rendezvous: Option<Rendezvous>,
    ) -> std::io::Result<Control> {
        channel.stream().set_write_timeout(Some(GRACE))?;
        let Channel { reader, writer } = channel;
        let inner = Arc::new(Inner {
            shared,
            backend,
            writer: Mutex::new(writer),
            state: Mutex::new(State {
                first: None,
                world: None,
                groups: HashMap::new(),
                wakers: Vec::new(),
                heard: Instant::now(),
                stalls: StallDetector::new(HEARTBEAT),
                closing: false,
            }),
            changed: Condvar::new(),
            issued: Condvar::new(),
        });
        let (reading, beating) = (Arc::clone(&inner), Arc::clone(&inner));
        let named = |name: &str| thread::Builder::new().name(format!("kiln-{name}"));
        let threads = vec![
            named("control").spawn(move || reading.listen(reader))?,
            named("alive").spawn(move || beating.beat())?,
        ];
        Ok(Control { inner, threads, _rendezvous: rendezvous })
    }

    /// Wakes `waker` when `group` or the world fails.
    pub(super) fn register(&self, group: GroupNumber, waker: &Arc<Waker>) {
        let mut state = lock(&self.inner.state);
        state.wakers.retain(|(_, known)| known.strong_count() > 0);
        state.wakers.push((group, Arc::downgrade(waker)));
        if state.world.is_some() {
            waker.wake();
        }
    }

    /// Why `group` can no longer be used.
    pub(super) fn cause(&self, group: GroupNumber) -> Option<Cause> {
        let state = lock(&self.inner.state);
        state.groups.get(&group).or(state.world.as_ref()).cloned()
    }

    /// The verdict of all ranks together, if there is one.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        let state = lock(&self.inner.state);
        let causes = state.world.iter().chain(state.groups.values());
        causes.filter_map(Cause::verdict).next().cloned()
    }

    /// Fails one group on this rank alone, unless it has failed already.
    pub(super) fn fail_here(&self, group: GroupNumber, cause: Cause) {
        self.inner.fail(Some(group), cause);
    }

    /// Fails the world on this rank and tells the others.
    pub(super) fn abort(&self, group: &GroupName, rank: usize, reason: &str) {
        let cause = Cause::Abort {
            origin: group.name.clone(),
            rank,
            world_rank: self.inner.shared.world_rank,
            reason: reason.to_owned(),
        };
        self.inner.fail(None, cause);
        let (group, reason) = (group.clone(), reason.to_owned());
        self.inner.send(&ToRendezvous::Trouble(Trouble::Abort { group, rank, reason }));
    }

    /// Reports a trouble at `site` and returns the cause that the rendezvous has found.
    pub(super) fn report(&self, site: &Site, trouble: Trouble) -> Cause {
        let group = site.group.number;
        if let Some(cause) = self.cause(group) {
            return cause;
        }
        let waited = match &trouble {
            Trouble::TimedOut { waited, .. } => Some(*waited),
            _ => None,
        };
        let asked = Instant::now();
        let broken = match &trouble {
            Trouble::Lost { peer, reason, .. } => Some((*peer, reason.clone())),
            _ => None,
        };
        self.inner.send(&ToRendezvous::Trouble(trouble));
        let state = lock(&self.inner.state);
        let found = |state: &State| state.world.is_some() || state.groups.contains_key(&group);
        let state = wait_until(&self.inner.changed, state, ANSWER, found);
        let silent = state.heard.elapsed();
        drop(state);
        if let Some(cause) = self.cause(group) {
            return cause;
        }
        let cause = match broken {
            Some((peer, reason)) if silent < SILENCE => Cause::Abort {
                origin: site.group.name.clone(),
                rank: peer,
                world_rank: site.group.ranks.get(peer).copied().unwrap_or(peer),
                reason: format!("the connection to it broke: {reason}"),
            },
            _ => self.no_answer(site, waited.unwrap_or_else(|| whole_ms(asked.elapsed())), silent),
        };
        self.inner.fail(None, cause.clone());
        cause
    }

    /// The cause when the rendezvous itself is silent.
    fn no_answer(&self, site: &Site, waited: Duration, silent: Duration) -> Cause {
        let verdict = Verdict {
            finding: Finding::Silent,
            culprits: vec![0],
            text: format!(
                "rank 0, which keeps the rendezvous, has not answered for {} s: its process is \
                 stopped or its machine cannot be reached; rank {} waits in #{} {}({})",
                silent.as_secs(),
                self.inner.shared.world_rank,
                site.sequence,
                site.operation,
                site.label.scope
            ),
        };
        let rank_0 = site.group.ranks.iter().position(|rank| *rank == 0);
        let missing = rank_0.into_iter().collect();
        Cause::TimedOut { site: site.clone(), waited, missing, verdict }
    }

    /// Notes that the caller has issued another operation, for questions that wait for it.
    pub(super) fn issued(&self) {
        self.inner.issued.notify_all();
    }
}

/// A time as messages show it.
fn whole_ms(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

impl Drop for Control {
    fn drop(&mut self) {
        lock(&self.inner.state).closing = true;
        self.inner.changed.notify_all();
        self.inner.send(&ToRendezvous::Goodbye);
        // The goodbye is still delivered, and the reading thread wakes up.
        let _ = lock(&self.inner.writer).stream.shutdown(Shutdown::Both);
        for thread in self.threads.drain(..) {
            // A panic there has been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn send(&self, message: &ToRendezvous) {
        match frame::encode(message, MESSAGE_LIMIT) {
            // If sending fails, the rendezvous is gone, which the reading thread notices.
            Ok(frame) => drop(lock(&self.writer).deliver(&frame)),
            Err(error) => tracing::warn!("cannot tell the rendezvous: {error}"),
        }
    }

    /// Notes a failure, unless an earlier one is known, and wakes everyone.
    fn fail(&self, group: Option<GroupNumber>, cause: Cause) {
        let mut state = lock(&self.state);
        state.first.get_or_insert_with(|| cause.clone());
        match group {
            None => {
                state.world.get_or_insert(cause);
            }
            Some(number) => {
                // An abort of the world goes before its consequences in single groups.
                let cause = state.world.clone().unwrap_or(cause);
                state.groups.entry(number).or_insert(cause);
            }
        }
        for (number, waker) in &state.wakers {
            if group.is_none_or(|failed| failed == *number)
                && let Some(waker) = waker.upgrade()
            {
                waker.wake();
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    fn listen(&self, mut reader: Reader) {
        loop {
            let message: ToRank = match frame::read(&mut reader, MESSAGE_LIMIT) {
                Ok(message) => message,
                Err(error) => {
                    let state = lock(&self.state);
                    let (closing, first) = (state.closing, state.first.clone());
                    drop(state);
                    if !closing {
                        // Rank 0 ends soon after a failure, so that failure is the cause.
                        let cause = first.unwrap_or_else(|| self.lost_rendezvous(&error));
                        self.fail(None, cause);
                    }
                    return;
                }
            };
            lock(&self.state).heard = Instant::now();
            match message {
                ToRank::Failed { group, cause } => self.fail(group, cause),
                ToRank::Collect { request, at } => self.answer(request, at),
                ToRank::Beat | ToRank::Joined { .. } | ToRank::Incomplete { .. } | ToRank::CalledOff(_) => {}
            }
        }
    }

    fn lost_rendezvous(&self, error: &frame::FrameError) -> Cause {
        let reason = match error {
            frame::FrameError::Io(error)
                if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) =>
            {
                "it died: the rendezvous, which it keeps, closed without a goodbye".to_owned()
            }
            error => format!("the connection to the rendezvous, which it keeps, broke: {error}"),
        };
        Cause::Abort { origin: "world".into(), rank: 0, world_rank: 0, reason }
    }

    fn answer(&self, request: u64, at: Option<(GroupName, u64)>) {
        if let Some((group, sequence)) = at {
            self.wait_until_issued(&group, sequence);
        }
        let mut flight = self.shared.flight(self.backend, String::new());
        let surplus = flight.records.len().saturating_sub(RECORDS);
        flight.records.drain(..surplus);
        flight.stall = lock(&self.state).stalls.stall(Instant::now());
        self.send(&ToRendezvous::Report { request, flight: Box::new(flight) });
    }

    /// Waits a moment for the caller to issue operation `sequence` of `group`, if this rank is in the group:
    /// a rank that is only a little behind is not missing.
    fn wait_until_issued(&self, group: &GroupName, sequence: u64) {
        let until = Instant::now() + ISSUE_WAIT;
        loop {
            let groups = self.shared.recorder.groups();
            let view = groups.iter().find(|g| g.name == group.name && g.ranks == group.ranks);
            let behind = view.is_some_and(|view| view.issued <= sequence);
            let left = until.saturating_duration_since(Instant::now());
            if !behind || left.is_zero() {
                return;
            }
            let state = lock(&self.state);
            // Notified when an operation is issued. The short limit covers one that was issued just before.
            let pause = left.min(Duration::from_millis(20));
            drop(self.issued.wait_timeout(state, pause));
        }
    }

    fn beat(&self) {
        let mut state = lock(&self.state);
        while !state.closing {
            drop(state);
            self.send(&ToRendezvous::Beat);
            state = lock(&self.state);
            state.stalls.rest(Instant::now());
            state = wait_until(&self.changed, state, HEARTBEAT, |state| state.closing);
            state.stalls.wake(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests;
