//! Where connections come in.

use super::handshake::{self, Caller};
use super::options::{JoinOptions, Seal, Secret};
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
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        rustix::net::listen(&listener, BACKLOG)?;
        let stop = Arc::new(Waker::new()?);
        let guard = Arc::new(Guard {
            job: options.job.clone(),
            secret: options.secret.clone(),
            seal: options.seal,
            shared_port: options.shared_port,
            admit,
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
    job: String,
    secret: Secret,
    seal: Seal,
    /// Whether several jobs look for their rendezvous at the same ports.
    shared_port: bool,
    admit: Admit,
    unproven: Unproven,
    warnings: Warnings,
}

impl Guard {
    fn refuse(&self, from: SocketAddr, why: impl std::fmt::Display) {
        self.warnings.warn(format!("refused a connection from {from}: {why}"));
    }

    /// What a caller that knows the secret has wrong, if anything, and whether it is right somewhere else.
    fn objection(&self, caller: &Caller) -> Option<(String, bool)> {
        let claim = &caller.claim;
        if claim.job != self.job {
            return Some((format!("it keeps the job \"{}\"", self.job), self.shared_port));
        }
        (claim.seal != self.seal).then(|| {
            let text = format!(
                "it has comm.seal = \"{}\", and rank {} has \"{}\"; give all processes the same",
                self.seal, claim.rank, claim.seal
            );
            (text, false)
        })
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
                Some((reason, elsewhere)) => {
                    inside.refuse(from, format_args!("{reason} (rank {})", caller.claim.rank));
                    caller.refuse(&reason, elsewhere);
                }
            },
            Err(error) => {
                if inside.unproven.leave(number) {
                    inside.refuse(from, error);
                }
            }
        }
    };
    if let Err(error) = thread::Builder::new().name("kiln-handshake".into()).spawn(handshake) {
        guard.unproven.leave(number);
        guard.refuse(from, format_args!("no thread for it: {error}"));
    }
}
