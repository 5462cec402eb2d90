//! The rendezvous, on rank 0: sends the ranks each other's addresses, and finds why a rank cannot continue.

use super::channel::{Channel, Reader};
use super::frame::{self, FrameError, MESSAGE_LIMIT};
use super::handshake::{Caller, Purpose};
use super::inquiry;
use super::listener::Listener;
use super::message::{CalledOff, GroupNumber, RankInfo, ToRank, ToRendezvous, Trouble};
use super::options::{Arrivals, JoinOptions, random};
use super::refused::{Refused, Why};
use super::registry::{HEARTBEAT, Presence, Registry, State};
use super::warnings::Warnings;
use crate::backend::AskAll;
use crate::error::{Abort, Cause};
use crate::sync::{lock, spawn};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

/// A stopped rank reads nothing, and must not delay the others. Its message is dropped after this time.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// Time for which a failed run's rank 0 waits for the other ranks to end. They may be stopped or busy.
const FAREWELL: Duration = Duration::from_secs(1);

pub(super) struct Rendezvous {
    inner: Arc<Inner>,
    /// Dropping it closes the port.
    listener: Listener,
    linger: Duration,
}

struct Inner {
    registry: Registry,
    troubles: Mutex<mpsc::Sender<Event>>,
    session: u64,
    near: Option<u16>,
    /// True if anyone can derive the secret, so that ranks of another job may know it.
    is_open: bool,
    warnings: Warnings,
    arrivals: Arrivals,
}

/// The overseeing thread handles one event at a time.
enum Event {
    Failed(Cause),
    Trouble(Trouble),
}

/// Advice for a rank that arrives twice, if no secret separates jobs.
const OTHER_JOB: &str = "; if one of them is of another job, give each job its own port (MASTER_PORT), name \
                         (TORCHELASTIC_RUN_ID, --rdzv-id) or secret (KILN_JOB_SECRET)";

const NAMED: usize = 4;

impl Rendezvous {
    /// Admits the ranks of `options`, and reports missing ranks when time runs out. Dropping it leaves connected ranks
    /// some time to learn how the run ended.
    pub(super) fn open(listener: TcpListener, options: &JoinOptions) -> io::Result<Rendezvous> {
        let JoinOptions { world_size, timeout, linger, .. } = *options;
        let session = u64::from_ne_bytes(random()?);
        let (troubles, events) = mpsc::channel();
        let inner = Arc::new(Inner {
            registry: Registry::new(State::new(world_size)),
            troubles: Mutex::new(troubles),
            session,
            near: options.near(),
            is_open: options.secret.is_open(),
            warnings: Warnings::new(),
            arrivals: options.arrivals.clone(),
        });
        let (admitting, noting) = (Arc::clone(&inner), Arc::clone(&inner));
        let admit = Arc::new(move |caller| admitting.admit(caller));
        let note = Arc::new(move |refused| noting.note(refused));
        let listener = Listener::open_with_note(listener, options, admit, note)?;
        let overseer = Arc::clone(&inner);
        spawn("kiln-rendezvous", move || overseer.oversee(&events, timeout))?;
        let beating = Arc::clone(&inner);
        spawn("kiln-beat", move || beating.beat())?;
        Ok(Rendezvous { inner, listener, linger })
    }

    pub(super) fn ask_all(&self) -> AskAll {
        let inner = Arc::clone(&self.inner);
        Arc::new(move |patience| inquiry::ask_all(&inner.registry, patience))
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.listener.address()
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        let registry = &self.inner.registry;
        let empty = |state: &State| !state.ranks.iter().any(Presence::is_present);
        let over = |state: &State| empty(state) || state.has_failed();
        let mut state = registry.wait_until(registry.lock(), self.linger, over);
        if state.has_failed() {
            state = registry.wait_until(state, FAREWELL.min(self.linger), empty);
        }
        state.closed = true;
        for rank in &state.ranks {
            if let Presence::Present { writer, .. } = rank {
                let _ = lock(writer).stream.shutdown(Shutdown::Both);
            }
        }
        drop(state);
        registry.notify();
    }
}

impl Inner {
    /// Registers a caller as the rank that it claims to be and reads its messages, or refuses it.
    fn admit(self: &Arc<Inner>, caller: Caller) {
        let rank = caller.claim.rank;
        let Purpose::Control { world_size, node, near, port } = caller.claim.purpose.clone() else {
            return caller.refuse("this is the rendezvous, not a rank", false);
        };
        let Ok(from) = caller.address() else { return };
        let info = RankInfo { address: SocketAddr::new(from.ip(), port), node };
        if let (Some(own), Some(told)) = (self.near, near)
            && own != told
        {
            self.warnings.warn(format!(
                "refused rank {rank} of another job from {from}: its ranks expect port {told}, and those of \
                 this job port {own}"
            ));
            let text =
                format!("it serves a job whose ranks expect port {own}, and this rank expects port {told}");
            // The caller's own rendezvous may be at the next port.
            return caller.refuse(&text, true);
        }
        let mut state = self.registry.lock();
        let expected = state.ranks.len();
        if world_size != expected || rank >= expected {
            drop(state);
            let (from, why) = (from.ip(), Why::other_world([(0, expected), (rank, world_size)]));
            self.warnings.warn(format!("refused rank {rank} at {from}: {}", why.reason()));
            caller.refuse(why.reason(), false);
            return self.note(Refused { rank, from, why });
        }
        if !matches!(state.ranks[rank], Presence::Absent) {
            let mut text = format!("rank {rank} is here already");
            if let Presence::Present { info, .. } = &state.ranks[rank] {
                text.push_str(&format!(", from {}", info.address.ip()));
            }
            drop(state);
            if self.is_open {
                text.push_str(OTHER_JOB);
            }
            self.warnings.warn(format!("refused a second rank {rank} from {from}: {text}"));
            return caller.refuse(&text, true);
        }
        let Ok(Channel { reader, writer }) = caller.welcome() else { return };
        let _ = reader.stream.set_write_timeout(Some(WRITE_TIMEOUT));
        let writer = Mutex::new(writer);
        self.arrivals.come(rank, info.address.ip());
        state.ranks[rank] = Presence::Present { writer, info, heard: Instant::now() };
        self.announce(&mut state);
        drop(state);
        self.registry.notify();
        let inner = Arc::clone(self);
        if let Err(error) = spawn(&format!("kiln-rank-{rank}"), move || inner.listen(rank, reader)) {
            tracing::warn!("cannot start a thread to listen to rank {rank}: {error}");
            self.registry.lock().ranks[rank] = Presence::Absent;
            self.registry.notify();
        }
    }

    fn announce(&self, state: &mut State) {
        if let Some(why) = state.called_off.clone() {
            return state.send_all(&ToRank::CalledOff(why));
        }
        let Some(ranks) = state.addresses() else { return };
        state.joined = true;
        state.send_all(&ToRank::Joined { session: self.session, ranks });
    }

    fn listen(&self, rank: usize, mut reader: Reader) {
        let mut said_goodbye = false;
        loop {
            let message: ToRendezvous = match frame::read(&mut reader, MESSAGE_LIMIT) {
                Ok(message) => message,
                Err(FrameError::Io(error)) if error.kind() != io::ErrorKind::InvalidData => break,
                Err(error) => {
                    let text = format!("rank {rank} sent {error}; its connection is closed");
                    self.warnings.warn(text);
                    break;
                }
            };
            if let Presence::Present { heard, .. } = &mut self.registry.lock().ranks[rank] {
                *heard = Instant::now();
            }
            match message {
                ToRendezvous::Beat => {}
                ToRendezvous::Hold(is_held) => {
                    self.registry.lock().send_all(&ToRank::Held { rank, is_held });
                }
                ToRendezvous::Goodbye => said_goodbye = true,
                ToRendezvous::Stop => {
                    self.registry.update(|state| self.call_off(state, CalledOff::Stopped { by: rank }));
                }
                ToRendezvous::Abort(abort) => {
                    let abort = Abort { world_rank: rank, ..abort };
                    // An inquiry about this rank may be waiting for its reason.
                    self.registry.update(|state| _ = state.aborts.entry(rank).or_insert(abort.clone()));
                    self.raise(Event::Failed(Cause::Abort(abort)));
                }
                ToRendezvous::Trouble(trouble) => self.raise(Event::Trouble(trouble)),
                ToRendezvous::Report { request, flight } => {
                    self.registry.update(|state| {
                        if let Some(answers) = state.reports.get_mut(&request) {
                            answers.insert(rank, (Instant::now(), *flight));
                        }
                    });
                }
            }
        }
        let mut state = self.registry.lock();
        self.arrivals.leave(rank);
        // Until all ranks have arrived, a rank may leave and return.
        state.ranks[rank] = match (said_goodbye, state.joined) {
            (true, _) => Presence::Left,
            (false, false) => Presence::Absent,
            (false, true) => Presence::Gone,
        };
        let died = matches!(state.ranks[rank], Presence::Gone);
        drop(state);
        self.registry.notify();
        if died {
            self.raise(Event::Failed(inquiry::death(rank)));
        }
    }

    fn call_off(&self, state: &mut State, why: CalledOff) {
        if !state.joined && state.called_off.is_none() {
            state.called_off = Some(why.clone());
            state.send_all(&ToRank::CalledOff(why));
        }
    }

    /// Records a refused caller. A rank with different settings will not return, so the others stop waiting for it,
    /// unless anyone can derive the secret: the caller may then belong to another job.
    fn note(&self, refused: Refused) {
        let mut state = self.registry.lock();
        let rank = refused.rank;
        if !matches!(state.ranks.get(rank), None | Some(Presence::Absent)) {
            return;
        }
        match refused.why {
            Why::Settings(_) if !self.is_open => {
                self.call_off(&mut state, CalledOff::Refused(refused));
            }
            _ if rank >= state.ranks.len() => {}
            Why::Secret => _ = state.refused.entry(rank).or_insert(refused),
            Why::Job(_) | Why::Settings(_) => _ = state.refused.insert(rank, refused),
        }
        drop(state);
        self.registry.notify();
    }

    fn raise(&self, event: Event) {
        let _ = lock(&self.troubles).send(event);
    }

    fn oversee(&self, events: &mpsc::Receiver<Event>, timeout: Duration) {
        let over = |state: &State| state.joined || state.closed || state.called_off.is_some();
        let state = self.registry.wait_until(self.registry.lock(), timeout, over);
        if !over(&state) {
            let missing = state.missing();
            let refused = missing.iter().filter_map(|rank| state.refused.get(rank).cloned());
            let refused = refused.take(NAMED).collect();
            state.send_all(&ToRank::Incomplete { missing, refused });
            return;
        }
        if state.called_off.is_some() {
            return;
        }
        drop(state);
        while !self.registry.lock().closed {
            match events.recv_timeout(HEARTBEAT) {
                Ok(Event::Failed(cause)) => self.fail(None, cause),
                Ok(Event::Trouble(trouble)) => self.look_into(trouble),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn look_into(&self, trouble: Trouble) {
        let state = self.registry.lock();
        if state.world.is_some() || state.groups.contains_key(&trouble.group.number) {
            return;
        }
        drop(state);
        let (group, cause) = inquiry::find_cause(&self.registry, trouble);
        self.fail(group, cause);
    }

    fn fail(&self, group: Option<GroupNumber>, cause: Cause) {
        self.registry.update(|state| {
            match group {
                None if state.world.is_some() => return,
                None => state.world = Some(cause.clone()),
                Some(number) => _ = state.groups.insert(number, cause.clone()),
            }
            state.send_all(&ToRank::Failed { group, cause });
        });
    }

    fn beat(&self) {
        let mut state = self.registry.lock();
        while !state.closed {
            state.send_all(&ToRank::Beat);
            state = self.registry.wait_until(state, HEARTBEAT, |state| state.closed);
        }
    }
}
