//! Starts MPI, shuts it down, and runs the two message threads.

use super::backoff::Backoff;
use super::inbox::Inbox;
use super::message::Message;
use super::outbox::{Letter, Outbox};
use crate::sync::{lock, spawn};
use ::mpi::Threading;
use ::mpi::environment::{Universe, initialize_with_threading, processor_name};
use ::mpi::point_to_point::MatchedReceiveVec;
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::{Communicator, CommunicatorCollectives, Destination, Source};
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const MESSAGES: i32 = 0;

const PAUSE: Duration = Duration::from_millis(1);

const NAME: usize = 256;

/// Time for which a failed process waits for threads that may be stuck in MPI.
const PATIENCE: Duration = Duration::from_secs(1);

/// The reason why MPI could not be started.
#[derive(Debug, thiserror::Error)]
pub enum MpiError {
    /// MPI can be started only once per process.
    #[error("MPI has been started in this process before; keep the first `Mpi` and clone it")]
    Started,
    /// The MPI library does not allow several threads to communicate concurrently.
    #[error(
        "this MPI library grants thread level {granted}, Kiln needs Multiple; use one that is built \
         with support for threads"
    )]
    Threads {
        /// The thread level that the library grants.
        granted: String,
    },
    /// The system refused to start a thread.
    #[error("cannot start a thread for MPI: {0}; look at the limits of this machine")]
    Thread(#[from] std::io::Error),
}

/// MPI in this process. Dropping the last reference shuts MPI down.
pub(super) struct Runtime {
    pub(super) inbox: Arc<Inbox>,
    running: Mutex<Option<Running>>,
}

struct Running {
    done: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    universe: Universe,
}

impl Runtime {
    pub(super) fn start() -> Result<Runtime, MpiError> {
        let started = initialize_with_threading(Threading::Multiple);
        let (universe, granted) = started.ok_or(MpiError::Started)?;
        if granted != Threading::Multiple {
            return Err(MpiError::Threads { granted: format!("{granted:?}") });
        }
        let world = universe.world();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        let node_names = exchange_names(&world, size);
        let (sending, letters) = mpsc::channel();
        let outbox = Arc::new(Outbox::new(rank, node_names, sending));
        let inbox = Arc::new(Inbox::new(Arc::clone(&outbox)));
        let done = Arc::new(AtomicBool::new(false));
        let sender = spawn("kiln-mpi-send", move || send(&letters))?;
        let (listening, ending) = (Arc::clone(&inbox), Arc::clone(&done));
        let listener = spawn("kiln-mpi-listen", move || listen(&listening, &ending))?;
        outbox.set_listener(listener.thread().clone());
        let running = Running { done, threads: vec![sender, listener], universe };
        Ok(Runtime { inbox, running: Mutex::new(Some(running)) })
    }

    /// Sends the posted messages and stops. Does not shut MPI down, which would wait for other processes.
    pub(super) fn give_up(&self) {
        let Some(running) = lock(&self.running).take() else { return };
        self.inbox.outbox.close();
        running.tell_end();
        let start = Instant::now();
        while running.threads.iter().any(|thread| !thread.is_finished()) && start.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
        mem::forget(running.universe);
    }
}

impl Running {
    fn tell_end(&self) {
        self.done.store(true, Ordering::Release);
        for thread in &self.threads {
            thread.thread().unpark();
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let Some(running) = lock(&self.running).take() else { return };
        self.inbox.part();
        running.tell_end();
        for thread in running.threads {
            let _ = thread.join();
        }
        drop(running.universe);
    }
}

fn exchange_names(world: &SimpleCommunicator, size: usize) -> Vec<String> {
    // A process without a machine name counts as a separate machine.
    let name = processor_name().unwrap_or_else(|_| format!("rank {}", world.rank()));
    let mut own = [0u8; NAME];
    let length = name.len().min(NAME);
    own[..length].copy_from_slice(&name.as_bytes()[..length]);
    let mut all = vec![0u8; NAME * size];
    world.all_gather_into(&own[..], &mut all[..]);
    all.chunks(NAME).map(|name| String::from_utf8_lossy(name).trim_end_matches('\0').to_owned()).collect()
}

fn send(letters: &mpsc::Receiver<Letter>) {
    let world = SimpleCommunicator::world();
    for (to, bytes) in letters {
        world.process_at_rank(to as i32).send_with_tag(&bytes[..], MESSAGES);
    }
}

fn listen(inbox: &Inbox, done: &AtomicBool) {
    let world = SimpleCommunicator::world();
    let mut backoff = Backoff::new(PAUSE);
    while !done.load(Ordering::Acquire) {
        let Some(found) = world.any_process().immediate_matched_probe_with_tag(MESSAGES) else {
            backoff.wait();
            continue;
        };
        backoff.reset();
        let (bytes, _) = found.matched_receive_vec::<u8>();
        match Message::decode(&bytes) {
            Ok(message) => inbox.dispatch(message),
            Err(error) => tracing::error!("received an invalid message: {error}"),
        }
    }
}
