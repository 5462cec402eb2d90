//! Where connections come in.

use super::handshake::{self, Caller};
use super::options::Secret;
use super::waker::Waker;
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Most handshakes at a time; further callers are turned away until one is through.
const HANDSHAKES: usize = 128;

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
    pub(super) fn open(
        listener: TcpListener,
        job: String,
        secret: Secret,
        admit: Admit,
    ) -> io::Result<Doorway> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let stop = Arc::new(Waker::new()?);
        let guard = Arc::new(Guard { job, secret, admit, at_once: AtomicUsize::new(0) });
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
    admit: Admit,
    at_once: AtomicUsize,
}

fn accept(listener: &TcpListener, stop: &Waker, guard: &Arc<Guard>) {
    loop {
        let mut ready = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        if poll(&mut ready, None).is_err() {
            continue;
        }
        if !ready[1].revents().is_empty() {
            return;
        }
        match listener.accept() {
            Ok((stream, from)) => admit(stream, from, guard),
            // Out of descriptors, most likely: wait a little rather than spin.
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                tracing::warn!("cannot accept a connection: {error}");
                thread::sleep(Duration::from_millis(50));
            }
            Err(_) => {}
        }
    }
}

fn admit(stream: TcpStream, from: SocketAddr, guard: &Arc<Guard>) {
    if guard.at_once.fetch_add(1, Ordering::Relaxed) >= HANDSHAKES {
        guard.at_once.fetch_sub(1, Ordering::Relaxed);
        tracing::warn!("refused a connection from {from}: {HANDSHAKES} others are at the door");
        return;
    }
    let inside = Arc::clone(guard);
    let handshake = move || {
        // Accepted sockets block; only the listener does not.
        let outcome = stream.set_nonblocking(false).map_err(Into::into).and_then(|()| {
            let _ = stream.set_nodelay(true);
            handshake::examine(stream, &inside.secret)
        });
        match outcome {
            Ok(caller) if caller.claim.job != inside.job => {
                tracing::warn!("refused rank {} of another job from {from}", caller.claim.rank);
                let reason = format!("it keeps the job \"{}\"", inside.job);
                caller.refuse(&reason, false);
            }
            Ok(caller) => (inside.admit)(caller),
            Err(error) => tracing::warn!("refused a connection from {from}: {error}"),
        }
        inside.at_once.fetch_sub(1, Ordering::Relaxed);
    };
    if let Err(error) = thread::Builder::new().name("kiln-handshake".into()).spawn(handshake) {
        guard.at_once.fetch_sub(1, Ordering::Relaxed);
        tracing::warn!("refused a connection from {from}: no thread for it: {error}");
    }
}
