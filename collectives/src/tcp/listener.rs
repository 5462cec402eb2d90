//! A listening socket whose callers must authenticate themselves.

use super::handshake::{self, Caller, HandshakeError};
use super::options::JoinOptions;
use super::refused::{Refused, Why};
use super::unauthenticated::Unauthenticated;
use super::waker::Waker;
use super::warnings::{PERIOD, Warnings};
use crate::sync::spawn;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const BACKLOG: i32 = 4096;

/// Called for a caller that knows the secret and names the right job.
pub(super) type Admit = Arc<dyn Fn(Caller) + Send + Sync>;

/// Called for a refused caller that claimed to be a rank.
pub(super) type Note = Arc<dyn Fn(Refused) + Send + Sync>;

/// Logs refused callers.
pub(super) struct Listener {
    address: SocketAddr,
    stop: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Passes callers that know the job and the secret of `options` to `admit`.
    pub(super) fn open(listener: TcpListener, options: &JoinOptions, admit: Admit) -> io::Result<Listener> {
        Listener::open_with_note(listener, options, admit, Arc::new(|_| {}))
    }

    /// Also passes refused callers to `note`.
    pub(super) fn open_with_note(
        listener: TcpListener,
        options: &JoinOptions,
        admit: Admit,
        note: Note,
    ) -> io::Result<Listener> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        rustix::net::listen(&listener, BACKLOG)?;
        let stop = Arc::new(Waker::new()?);
        let unauthenticated = Unauthenticated::new(options.world_size);
        let options = JoinOptions { listener: None, on_worker_start: None, ..options.clone() };
        let guard = Arc::new(Guard { options, admit, note, unauthenticated, warnings: Warnings::new() });
        let stopped = Arc::clone(&stop);
        let thread = spawn("kiln-listener", move || accept(&listener, &stopped, &guard))?;
        Ok(Listener { address, stop, thread: Some(thread) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Guard {
    options: JoinOptions,
    admit: Admit,
    note: Note,
    unauthenticated: Unauthenticated,
    warnings: Warnings,
}

impl Guard {
    fn refuse(&self, from: SocketAddr, why: impl std::fmt::Display) {
        self.warnings.warn(format!("refused a connection from {from}: {why}"));
    }

    fn objection(&self, caller: &Caller) -> Option<Why> {
        let (claim, JoinOptions { rank, job, seal, .. }) = (&caller.claim, &self.options);
        if claim.job != *job {
            return Some(Why::other_job([(*rank, job), (claim.rank, &claim.job)]));
        }
        (claim.seal != *seal).then(|| Why::other_seal([(*rank, *seal), (claim.rank, claim.seal)]))
    }

    fn turn_away(&self, caller: Caller, from: SocketAddr, why: Why) {
        let (rank, from, reason) = (caller.claim.rank, from.ip(), why.reason());
        self.warnings.warn(format!("refused rank {rank} at {from}: {reason}"));
        let elsewhere = self.options.shared_port && matches!(why, Why::Job(_));
        caller.refuse(reason, elsewhere);
        if !elsewhere {
            (self.note)(Refused { rank, from, why });
        }
    }
}

fn accept(listener: &TcpListener, stop: &Waker, guard: &Arc<Guard>) {
    let period = Timespec::try_from(PERIOD).ok();
    loop {
        let mut ready = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        // Polls with a timeout while warnings wait, or running handshakes may cause some.
        let is_quiet = guard.unauthenticated.is_empty() && !guard.warnings.is_waiting();
        let timeout = if is_quiet { None } else { period.as_ref() };
        if poll(&mut ready, timeout).is_err() {
            continue;
        }
        guard.warnings.catch_up();
        if !ready[1].revents().is_empty() {
            return guard.unauthenticated.clear();
        }
        match listener.accept() {
            Ok((stream, from)) => admit(stream, from, guard),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                guard.warnings.warn(format!("cannot accept a connection: {error}"));
                // Probably out of descriptors: closes an unauthenticated connection, or waits instead of spinning.
                if guard.unauthenticated.turn_away().is_none() {
                    thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }
}

fn admit(stream: TcpStream, from: SocketAddr, guard: &Arc<Guard>) {
    let stream = Arc::new(stream);
    let (number, displaced) = guard.unauthenticated.enter(&stream, from.ip());
    if let Some(address) = displaced {
        guard.warnings.warn(format!(
            "closed an unauthenticated connection from {address}: too many others are waiting"
        ));
    }
    let inside = Arc::clone(guard);
    let handshake = move || {
        let outcome = stream.set_nonblocking(false).map_err(Into::into).and_then(|()| {
            let _ = stream.set_nodelay(true);
            handshake::examine(stream, &inside.options.secret)
        });
        match outcome {
            Ok(_) if !inside.unauthenticated.prove(number) => {}
            Ok(caller) => match inside.objection(&caller) {
                None => (inside.admit)(caller),
                Some(why) => inside.turn_away(caller, from, why),
            },
            Err(error) => {
                if inside.unauthenticated.leave(number) {
                    inside.refuse(from, &error);
                    if let HandshakeError::UnprovenRank(rank) = error {
                        (inside.note)(Refused { rank, from: from.ip(), why: Why::Secret });
                    }
                }
            }
        }
    };
    if let Err(error) = spawn("kiln-handshake", handshake) {
        guard.unauthenticated.leave(number);
        guard.refuse(from, format_args!("no thread for it: {error}"));
    }
}
