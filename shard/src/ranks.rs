//! Runs ranks as threads of one process, or one rank as a process, each with its own compute pool.
//!
//! Gathers, matrix products and other ranks must not compete for one pool, so every rank computes in a separate pool.
//! The memory allocated by its communication thread and its pool is counted for the rank.

use std::any::Any;
use std::error::Error;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, ScopedJoinHandle};

use kiln_collectives::{CommError, Communicator, LocalGroup, LocalOptions, WorkerStart};

use crate::error::ShardError;
use crate::memory;
use crate::sync::lock;

/// An error of one rank.
pub trait RankError: std::fmt::Display + Send {
    /// Returns whether the error is only a consequence of another rank's failure. Such errors are not reported as the
    /// cause.
    fn is_consequence(&self) -> bool;
}

impl RankError for ShardError {
    fn is_consequence(&self) -> bool {
        matches!(self, ShardError::Comm(error) if matches!(**error, CommError::Aborted { .. }))
    }
}

/// For training loops that combine the errors of several libraries.
impl RankError for Box<dyn Error + Send + Sync> {
    fn is_consequence(&self) -> bool {
        self.downcast_ref().is_some_and(|error: &ShardError| error.is_consequence())
    }
}

/// The reason why a run of several ranks failed.
#[derive(Debug, thiserror::Error)]
pub enum RanksError<E> {
    /// A rank returned an error. Of several errors, the earliest one that no other rank caused is kept.
    #[error("rank {rank}: {error}")]
    Failed {
        /// The rank that failed first.
        rank: usize,
        /// The rank's error.
        error: E,
    },
    /// A rank panicked first.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank that panicked first.
        rank: usize,
        /// The panic message.
        message: String,
    },
    /// A rank's threads could not be started.
    #[error("rank {rank}: cannot start its threads: {reason}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The system's error.
        reason: String,
    },
}

impl<E: RankError> RanksError<E> {
    fn is_consequence(&self) -> bool {
        matches!(self, RanksError::Failed { error, .. } if error.is_consequence())
    }

    /// Returns the message to the other ranks, which already know the number of the failed rank.
    fn message(&self) -> String {
        match self {
            RanksError::Failed { error, .. } => error.to_string(),
            RanksError::Panicked { message, .. } => format!("panicked: {message}"),
            RanksError::Spawn { reason, .. } => format!("cannot start its threads: {reason}"),
        }
    }
}

/// Runs `body(communicator)` on `world_size` ranks, each with `threads` compute threads, and returns the
/// results in rank order. If one rank fails, the others are notified and end too.
pub fn run_ranks<T, E, F>(world_size: usize, threads: usize, body: F) -> Result<Vec<T>, RanksError<E>>
where
    T: Send,
    E: RankError,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
{
    let options = LocalOptions {
        on_worker_start: Some(WorkerStart::new(memory::bind_to_rank)),
        ..LocalOptions::default()
    };
    run_ranks_on(LocalGroup::with_options(world_size, options), threads, body)
}

/// Runs [`run_ranks`] on existing communicators, one per rank.
pub fn run_ranks_on<C, T, E, F>(
    communicators: Vec<C>,
    threads: usize,
    body: F,
) -> Result<Vec<T>, RanksError<E>>
where
    C: Communicator + 'static,
    T: Send,
    E: RankError,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
{
    let share = |communicator| Arc::new(communicator) as Arc<dyn Communicator>;
    run_all(communicators.into_iter().map(share).collect(), threads, body)
}

/// Runs `body(communicator)` as the one rank of this process, with `threads` compute threads. When it fails,
/// the other ranks are informed, wherever they are.
pub fn run_rank<T, E, F>(
    communicator: Arc<dyn Communicator>,
    threads: usize,
    body: F,
) -> Result<T, RanksError<E>>
where
    T: Send,
    E: RankError,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
{
    // On a separate thread, so that the caller stays bound to its previous rank.
    match run_all(vec![communicator.clone()], threads, body)?.pop() {
        Some(result) => Ok(result),
        None => unreachable!("invariant: a rank without a result has failed"),
    }
}

fn run_all<T, E, F>(
    communicators: Vec<Arc<dyn Communicator>>,
    threads: usize,
    body: F,
) -> Result<Vec<T>, RanksError<E>>
where
    T: Send,
    E: RankError,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
{
    // Failures, in the order in which they happened.
    let failures: Mutex<Vec<RanksError<E>>> = Mutex::default();
    // The other ranks are informed afterwards, so that their failures are recorded later.
    let fail = |failure: RanksError<E>, communicator: &dyn Communicator| {
        let message = failure.message();
        lock(&failures).push(failure);
        communicator.abort(&message);
    };
    let results: Vec<Option<T>> = std::thread::scope(|scope| {
        let start = |communicator: Arc<dyn Communicator>| {
            let (rank, own) = (communicator.rank(), communicator.clone());
            let (body, fail) = (&body, &fail);
            let live = move || compute(rank, threads, own.clone(), body).map_err(|error| fail(error, &*own));
            let started = Builder::new().name(format!("rank{rank}")).spawn_scoped(scope, live);
            let refused = |error: io::Error| RanksError::Spawn { rank, reason: error.to_string() };
            (rank, started.map_err(|error| fail(refused(error), &*communicator)))
        };
        let ranks: Vec<_> = communicators.into_iter().map(start).collect();
        let join = |(rank, thread): (usize, Result<ScopedJoinHandle<'_, Result<T, ()>>, ()>)| {
            let panicked = |panic: Box<dyn Any + Send>| {
                lock(&failures).push(RanksError::Panicked { rank, message: panic_message(&*panic) });
            };
            thread.ok()?.join().map_err(panicked).ok()?.ok()
        };
        ranks.into_iter().map(join).collect()
    });
    let mut failures = std::mem::take(&mut *lock(&failures));
    if failures.is_empty() {
        return Ok(results.into_iter().flatten().collect());
    }
    let cause = failures.iter().position(|failure| !failure.is_consequence()).unwrap_or(0);
    Err(failures.swap_remove(cause))
}

fn compute<T, E, F>(
    rank: usize,
    threads: usize,
    communicator: Arc<dyn Communicator>,
    body: &F,
) -> Result<T, RanksError<E>>
where
    T: Send,
    E: RankError,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
{
    memory::bind_to_rank(rank);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads.max(1))
        .thread_name(move |thread| format!("rank{rank}-compute{thread}"))
        .start_handler(move |_| memory::bind_to_rank(rank))
        .build()
        .map_err(|error| RanksError::Spawn { rank, reason: error.to_string() })?;
    pool.install(|| catch_unwind(AssertUnwindSafe(|| body(communicator))))
        .map_err(|panic| RanksError::Panicked { rank, message: panic_message(&*panic) })?
        .map_err(|error| RanksError::Failed { rank, error })
}

/// Returns the message of a panic, or `without a message` if its payload is not text.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_owned())
}
