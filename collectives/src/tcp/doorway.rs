//! Where connections come in.

use super::handshake::{self, Caller, HandshakeError};
use super::options::{JoinOptions, Seal, Secret};
use super::refused::{Refused, Why};
use super::unproven::Unproven;
use super::waker::Waker;
use super::warnings::{PERIOD, Warnings};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Connections that the system keeps until this thread gets to them.
const BACKLOG: i32 = 4096;

/// What is done with a caller that knows the secret and names the right job.
pub(super) type Admit = Arc<dyn Fn(Caller) + Send + Sync>;

/// What is done when somebody who comes in a rank's place has been refused.
pub(super) type Note = Arc<dyn Fn(Refused) + Send + Sync>;

/// A listening socket whose callers have to prove themselves. Refused ones are logged, and the
/// doorway stays open.
pub(super) struct Doorway {
    address: SocketAddr,
    stop: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Doorway {
    /// A door for the job, the secret and the number of ranks in `options`.
    pub(super) fn open(
        listener: TcpListener,
        options: &JoinOptions,
        admit: Admit,
    ) -> io::Result<Doorway> {
        Doorway::open_noting(listener, options, admit, Arc::new(|_| {}))
    }

    /// The same, where somebody wants to know who was refused.
    pub(super) fn open_noting(
        listener: TcpListener,
        options: &JoinOptions,
        admit: Admit,
        note: Note,
    ) -> io::Result<Doorway> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        rustix::net::listen(&listener, BACKLOG)?;
        let stop = Arc::new(Waker::new()?);
        let guard = Arc::new(Guard {
            rank: options.rank,
            job: options.job.clone(),
            secret: options.secret.clone(),
            seal: options.seal,
            shared_port: options.shared_port,
            admit,
            note,
            unproven: Unproven::new(options.world_size),
            warnings: Warnings::new(),
        });
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("kiln-doorway".into())
            .spawn(move || accept(&listener, &stopped, &guard))?;
        Ok(Doorway { address, stop, thread: Some(thread) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Doorway {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

struct Guard {
    /// Who keeps this door.
    rank: usize,
    job: String,
    secret: Secret,
    seal: Seal,
    /// Whether several jobs look for their rendezvous at the same ports.
    shared_port: bool,
    admit: Admit,
    note: Note,
    unproven: Unproven,
    warnings: Warnings,
}

impl Guard {
    fn refuse(&self, from: SocketAddr, why: impl std::fmt::Display) {
        self.warnings.warn(format!("refused a connection from {from}: {why}"));
    }

    /// What a caller that knows the secret has wrong, if anything.
    fn objection(&self, caller: &Caller) -> Option<Why> {
        let (claim, own) = (&caller.claim, self.rank);
        if claim.job != self.job {
            return Some(Why::other_job([(own, &self.job), (claim.rank, &claim.job)]));
        }
        (claim.seal != self.seal)
            .then(|| Why::other_seal([(own, self.seal), (claim.rank, claim.seal)]))
    }

    /// Turns away a caller that knows the secret.
    fn turn_away(&self, caller: Caller, from: SocketAddr, why: Why) {
        let (rank, from, reason) = (caller.claim.rank, from.ip(), why.reason());
        self.warnings.warn(format!("refused rank {rank} at {from}: {reason}"));
        // Its own rendezvous may be at the next port.
        let elsewhere = self.shared_port && matches!(why, Why::Job(_));
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
        // Something may be left to say later, now or when the ones inside are through.
        let is_quiet = guard.unproven.is_empty() && !guard.warnings.is_waiting();
        let timeout = if is_quiet { None } else { period.as_ref() };
        if poll(&mut ready, timeout).is_err() {
            continue;
        }
        guard.warnings.catch_up();
        if !ready[1].revents().is_empty() {
            return guard.unproven.clear();
        }
        match listener.accept() {
            Ok((stream, from)) => admit(stream, from, guard),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                guard.warnings.warn(format!("cannot accept a connection: {error}"));
                // Out of descriptors, most likely. Those of strangers are the ones to spare; without any,
                // wait a little rather than spin.
                if guard.unproven.turn_away().is_none() {
                    thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }
}

fn admit(stream: TcpStream, from: SocketAddr, guard: &Arc<Guard>) {
    let stream = Arc::new(stream);
    let (number, displaced) = guard.unproven.enter(&stream, from.ip());
    if let Some(address) = displaced {
        guard.warnings.warn(format!(
            "closed a connection from {address} that had not proved itself: too many others wait"
        ));
    }
    let inside = Arc::clone(guard);
    let handshake = move || {
        // Accepted sockets block; only the listener does not.
        let outcome = stream.set_nonblocking(false).map_err(Into::into).and_then(|()| {
            let _ = stream.set_nodelay(true);
            handshake::examine(stream, &inside.secret)
        });
        match outcome {
            // Whoever was turned away has been told of, and will come again if it is a rank.
            Ok(_) if !inside.unproven.prove(number) => {}
            Ok(caller) => match inside.objection(&caller) {
                None => (inside.admit)(caller),
                Some(why) => inside.turn_away(caller, from, why),
            },
            Err(error) => {
                if inside.unproven.leave(number) {
                    inside.refuse(from, &error);
                    if let HandshakeError::Stranger(rank) = error {
                        (inside.note)(Refused { rank, from: from.ip(), why: Why::Secret });
                    }
                }
            }
        }
    };
    if let Err(error) = thread::Builder::new().name("kiln-handshake".into()).spawn(handshake) {
        guard.unproven.leave(number);
        guard.refuse(from, format_args!("no thread for it: {error}"));
    }
}
