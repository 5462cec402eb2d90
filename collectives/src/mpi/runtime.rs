//! MPI's start and end, and the two threads that messages need.

use super::MpiError;
use super::backoff::Backoff;
use super::hub::{Hub, Letter};
use super::message::Message;
use crate::sync::lock;
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

/// Tag of messages; data has the number of its group.
const MESSAGES: i32 = 0;

/// Longest pause between two looks for messages, while nothing is known to be coming.
const PAUSE: Duration = Duration::from_millis(1);

/// Bytes of a machine's name that are told to the others.
const NAME: usize = 256;

/// Longest wait for threads that may hang in MPI, when a process ends after a failure.
const PATIENCE: Duration = Duration::from_secs(1);

/// MPI of this process. Dropped last, it shuts MPI down.
pub(super) struct Runtime {
    hub: Arc<Hub>,
    /// `None` once this process has given up.
    running: Mutex<Option<Running>>,
}

/// What is there while MPI runs.
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
        // MPI counts processes with a C int, and has at least one.
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        let node_names = exchange_names(&world, size);
        let (outbox, letters) = mpsc::channel();
        let hub = Arc::new(Hub::new(rank, node_names, outbox));
        let done = Arc::new(AtomicBool::new(false));
        let named = |name: &str| thread::Builder::new().name(format!("kiln-mpi-{name}"));
        let sender = named("send").spawn(move || send(&letters))?;
        let (listening, ending) = (Arc::clone(&hub), Arc::clone(&done));
        let listener = named("listen").spawn(move || listen(&listening, &ending))?;
        hub.listens_on(listener.thread().clone());
        let running = Running { done, threads: vec![sender, listener], universe };
        Ok(Runtime { hub, running: Mutex::new(Some(running)) })
    }

    pub(super) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Sends what was posted and stops, without the others. MPI stays as it is: shutting it down would wait
    /// for them.
    pub(super) fn give_up(&self) {
        let Some(running) = lock(&self.running).take() else { return };
        self.hub.close_outbox();
        running.tell_end();
        let start = Instant::now();
        while running.threads.iter().any(|thread| !thread.is_finished())
            && start.elapsed() < PATIENCE
        {
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
        self.hub.part();
        running.tell_end();
        for thread in running.threads {
            // A panic there has been printed; there is nobody left to tell.
            let _ = thread.join();
        }
        drop(running.universe);
    }
}

/// The machine of each process.
fn exchange_names(world: &SimpleCommunicator, size: usize) -> Vec<String> {
    // Without a name a process counts as a machine of its own.
    let name = processor_name().unwrap_or_else(|_| format!("rank {}", world.rank()));
    let mut own = [0u8; NAME];
    let length = name.len().min(NAME);
    own[..length].copy_from_slice(&name.as_bytes()[..length]);
    let mut all = vec![0u8; NAME * size];
    world.all_gather_into(&own[..], &mut all[..]);
    all.chunks(NAME)
        .map(|name| String::from_utf8_lossy(name).trim_end_matches('\0').to_owned())
        .collect()
}

/// Sends letters one after another. The listener of the other process always listens, so none of
/// them waits for long.
fn send(letters: &mpsc::Receiver<Letter>) {
    let world = SimpleCommunicator::world();
    for (to, bytes) in letters {
        // Ranks come from MPI, so they fit.
        world.process_at_rank(to as i32).send_with_tag(&bytes[..], MESSAGES);
    }
}

fn listen(hub: &Hub, done: &AtomicBool) {
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
            Ok(message) => hub.dispatch(message),
            // Only another version of this program sends such a thing.
            Err(error) => tracing::error!("a message that is none has come: {error}"),
        }
    }
}
