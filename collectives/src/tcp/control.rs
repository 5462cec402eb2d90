//! A rank's connection to the rendezvous: sends heartbeats, answers questions, and reports failures.

use super::channel::{Channel, Reader, Writer};
use super::frame::{self, FrameError, MESSAGE_LIMIT};
use super::inquiry::GRACE;
use super::message::{GroupName, GroupNumber, ToRank, ToRendezvous, Trouble, TroubleKind};
use super::registry::HEARTBEAT;
use super::rendezvous::Rendezvous;
use super::stall::StallDetector;
use super::waker::Waker;
use crate::backend::{AskAll, RankShared};
use crate::call::CallSite;
use crate::error::{Abort, Cause, CommError};
use crate::sync::{Monitor, lock, spawn};
use crate::verdict::{Finding, Verdict};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time limit for the rendezvous to find why a call cannot continue. It asks the other ranks for at most twice
/// [`GRACE`]: about a lost connection, and about this call.
const ANSWER: Duration = Duration::from_secs(3 * GRACE.as_secs());

/// Time without a message after which the rendezvous is considered lost. A live one sends a message every [`HEARTBEAT`].
const SILENCE: Duration = Duration::from_secs(5);

/// Wait for this rank's caller to issue an operation that the rendezvous asks about.
const ISSUE_WAIT: Duration = Duration::from_secs(1);

pub(super) struct Control {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
    /// On rank 0. Dropped last, because the other ranks may still need it.
    rendezvous: Option<Rendezvous>,
}

struct Inner {
    shared: Arc<RankShared>,
    backend: &'static str,
    writer: Mutex<Writer>,
    state: Monitor<State>,
    issued: Condvar,
}

struct State {
    first: Option<Cause>,
    world: Option<Cause>,
    groups: HashMap<GroupNumber, Cause>,
    wakers: Vec<(GroupNumber, Weak<Waker>)>,
    heard: Instant,
    stalls: StallDetector,
    closing: bool,
}

impl Control {
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
            state: Monitor::new(State {
                first: None,
                world: None,
                groups: HashMap::new(),
                wakers: Vec::new(),
                heard: Instant::now(),
                stalls: StallDetector::new(HEARTBEAT),
                closing: false,
            }),
            issued: Condvar::new(),
        });
        let (reading, beating) = (Arc::clone(&inner), Arc::clone(&inner));
        let threads = vec![
            spawn("kiln-control", move || reading.listen(reader))?,
            spawn("kiln-alive", move || beating.beat())?,
        ];
        Ok(Control { inner, threads, rendezvous })
    }

    pub(super) fn register(&self, group: GroupNumber, waker: &Arc<Waker>) {
        let mut state = self.inner.state.lock();
        state.wakers.retain(|(_, known)| known.strong_count() > 0);
        state.wakers.push((group, Arc::downgrade(waker)));
        if state.world.is_some() {
            waker.wake();
        }
    }

    pub(super) fn cause(&self, group: GroupNumber) -> Option<Cause> {
        let state = self.inner.state.lock();
        state.groups.get(&group).or(state.world.as_ref()).cloned()
    }

    pub(super) fn verdict(&self) -> Option<Verdict> {
        let state = self.inner.state.lock();
        let causes = state.world.iter().chain(state.groups.values());
        let mut verdicts = causes.filter_map(|cause| match cause {
            Cause::Error(CommError::TimedOut { verdict, .. }) => Some((**verdict).clone()),
            _ => None,
        });
        verdicts.next()
    }

    /// Fails one group on this rank only, unless it has failed already.
    pub(super) fn fail_here(&self, group: GroupNumber, abort: Abort) {
        self.inner.fail(Some(group), Cause::Abort(abort));
    }

    /// Fails the world on this rank and informs the other ranks.
    pub(super) fn abort(&self, abort: Abort) {
        self.inner.fail(None, Cause::Abort(abort.clone()));
        self.inner.send(&ToRendezvous::Abort(abort));
    }

    /// Records whether this rank is held, and informs the other ranks.
    pub(super) fn hold(&self, is_held: bool) {
        self.inner.shared.holds.set(self.inner.shared.world_rank, is_held);
        self.inner.send(&ToRendezvous::Hold(is_held));
    }

    pub(super) fn report(&self, trouble: Trouble) -> Cause {
        let (group, asked) = (trouble.group.number, Instant::now());
        if let Some(cause) = self.cause(group) {
            return cause;
        }
        self.inner.send(&ToRendezvous::Trouble(trouble.clone()));
        let found = |state: &State| state.world.is_some() || state.groups.contains_key(&group);
        let state = self.inner.state.wait_until(self.inner.state.lock(), ANSWER, found);
        let silent = state.heard.elapsed();
        drop(state);
        if let Some(cause) = self.cause(group) {
            return cause;
        }
        let cause = match &trouble.kind {
            TroubleKind::Lost { peer, reason, .. } if silent < SILENCE => {
                let reason = format!("the connection to it broke: {reason}");
                Cause::Abort(trouble.group.abort_by(*peer, reason))
            }
            TroubleKind::TimedOut { waited } => self.no_answer(&trouble, *waited, silent),
            _ => self.no_answer(&trouble, whole_ms(asked.elapsed()), silent),
        };
        self.inner.fail(None, cause.clone());
        cause
    }

    fn no_answer(&self, trouble: &Trouble, waited: Duration, silent: Duration) -> Cause {
        let CallSite { sequence, operation, label, .. } = &trouble.site;
        let text = format!(
            "rank 0, which keeps the rendezvous, has not answered for {} s: its process is stopped or its \
             machine cannot be reached; rank {} waits in #{sequence} {operation}({})",
            silent.as_secs(),
            self.inner.shared.world_rank,
            label.scope
        );
        let verdict = Box::new(Verdict { finding: Finding::Silent, culprits: vec![0], text });
        let missing = trouble.group.ranks.iter().position(|rank| *rank == 0).into_iter().collect();
        Cause::Error(CommError::TimedOut { site: trouble.site.clone(), waited, missing, verdict })
    }

    /// `None` unless this is rank 0.
    pub(super) fn ask_all(&self) -> Option<AskAll> {
        self.rendezvous.as_ref().map(Rendezvous::ask_all)
    }

    /// Wakes answers that wait for the caller's next operation.
    pub(super) fn issued(&self) {
        self.inner.issued.notify_all();
    }
}

fn whole_ms(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

impl Drop for Control {
    fn drop(&mut self) {
        self.inner.state.update(|state| state.closing = true);
        self.inner.send(&ToRendezvous::Goodbye);
        let _ = lock(&self.inner.writer).stream.shutdown(Shutdown::Both);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn send(&self, message: &ToRendezvous) {
        match frame::encode(message, MESSAGE_LIMIT) {
            // If sending fails, the reading thread notices that the rendezvous is gone.
            Ok(frame) => drop(lock(&self.writer).deliver(&frame)),
            Err(error) => tracing::warn!("cannot inform the rendezvous: {error}"),
        }
    }

    fn fail(&self, group: Option<GroupNumber>, cause: Cause) {
        let mut state = self.state.lock();
        state.first.get_or_insert_with(|| cause.clone());
        match group {
            None => _ = state.world.get_or_insert(cause),
            Some(number) => {
                // An abort of the world takes precedence over the failures that it causes in groups.
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
        self.state.notify();
    }

    fn listen(&self, mut reader: Reader) {
        loop {
            let message: ToRank = match frame::read(&mut reader, MESSAGE_LIMIT) {
                Ok(message) => message,
                Err(error) => {
                    let state = self.state.lock();
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
            self.state.lock().heard = Instant::now();
            match message {
                ToRank::Failed { group, cause } => self.fail(group, cause),
                ToRank::Collect { request, at } => self.answer(request, at),
                ToRank::Held { rank, is_held } => self.shared.holds.set(rank, is_held),
                ToRank::Beat | ToRank::Joined { .. } | ToRank::Incomplete { .. } | ToRank::CalledOff(_) => {}
            }
        }
    }

    fn lost_rendezvous(&self, error: &FrameError) -> Cause {
        let reason = match error {
            FrameError::Io(error)
                if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) =>
            {
                "it died: the rendezvous, which it keeps, closed without a goodbye".into()
            }
            error => format!("the connection to the rendezvous, which it keeps, broke: {error}").into(),
        };
        Cause::Abort(Abort { group: "world".into(), rank: 0, world_rank: 0, reason })
    }

    fn answer(&self, request: u64, at: Option<(GroupName, u64)>) {
        if let Some((group, sequence)) = at {
            self.wait_until_issued(&group, sequence);
        }
        let mut flight = self.shared.short_flight(self.backend);
        flight.stall = self.state.lock().stalls.stall(Instant::now());
        self.send(&ToRendezvous::Report { request, flight });
    }

    /// Waits briefly for the caller to issue operation `sequence`: a rank that is a little behind is not missing.
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
            let state = self.state.lock();
            // Issuing sends a notification. The short limit covers one that came just before the wait.
            drop(self.issued.wait_timeout(state, left.min(Duration::from_millis(20))));
        }
    }

    fn beat(&self) {
        let mut state = self.state.lock();
        while !state.closing {
            drop(state);
            self.send(&ToRendezvous::Beat);
            state = self.state.lock();
            state.stalls.rest(Instant::now());
            state = self.state.wait_until(state, HEARTBEAT, |state| state.closing);
            state.stalls.wake(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests;
