//! Ranks as threads of one process, or one rank as a process, each with its own compute pool.
//!
//! Gathers, matrix products and other ranks must not fight for one pool, so every rank computes in
//! a pool of its own, and its communication thread and pool are counted as its memory.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, ScopedJoinHandle};

use kiln_collectives::{CommError, Communicator, LocalGroup, LocalOptions, WorkerStart};

use crate::error::ShardError;
use crate::memory;
use crate::sync::lock;

/// An error of one rank.
pub trait RankError: std::fmt::Display + Send {
    /// Whether it only says that another rank failed. Such errors are not reported as the cause.
    fn is_consequence(&self) -> bool;
}

impl RankError for ShardError {
    fn is_consequence(&self) -> bool {
        matches!(self, ShardError::Comm(error) if matches!(**error, CommError::Aborted { .. }))
    }
}

/// Why a run of several ranks failed.
#[derive(Debug, thiserror::Error)]
pub enum RanksError<E> {
    /// A rank returned an error; the earliest one is kept that no other rank caused.
    #[error("rank {rank}: {error}")]
    Failed {
        /// The rank that failed first.
        rank: usize,
        /// Its error.
        error: E,
    },
    /// A rank panicked first.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank that panicked first.
        rank: usize,
        /// What it said.
        message: String,
    },
    /// A rank's threads could not be started.
    #[error("rank {rank}: cannot start its threads: {reason}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The system's reason.
        reason: String,
    },
}

/// What a rank ended with, other than a result.
enum Failure<E> {
    Error(E),
    Panic(String),
    Spawn(String),
}

/// Runs `body(communicator)` on `world_size` ranks, each with `threads` compute threads, and
/// returns the results in rank order. When one rank fails, the others are told and end as well.
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

/// [`run_ranks`] on communicators made elsewhere, one per rank.
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
    // In the order in which they happened.
    let failures: Mutex<Vec<(usize, Failure<E>)>> = Mutex::default();
    let results: Vec<Option<T>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = communicators
            .into_iter()
            .enumerate()
            .map(|(rank, communicator)| {
                let (body, failures) = (&body, &failures);
                let communicator: Arc<dyn Communicator> = Arc::new(communicator);
                let keep = move |failure| lock(failures).push((rank, failure));
                let own = communicator.clone();
                let started =
                    Builder::new().spawn_scoped(scope, move || live(rank, threads, own, body, keep));
                started.map_err(|error| fail(Failure::Spawn(error.to_string()), &*communicator, keep))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.ok()?.join().ok().flatten()).collect()
    });
    let mut failures = std::mem::take(&mut *lock(&failures));
    let cause = failures.iter().position(|(_, failure)| !failure.is_consequence()).unwrap_or(0);
    if failures.is_empty() {
        return Ok(results.into_iter().flatten().collect());
    }
    let (rank, failure) = failures.swap_remove(cause);
    Err(failure.of_rank(rank))
}

/// Runs `body(communicator)` as the one rank of this process, with `threads` compute threads. When
/// it fails, the other ranks are told, wherever they are.
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
    let rank = communicator.rank();
    let mut failure = None;
    // A thread of its own, so that the caller stays bound to the rank it was.
    let lived = std::thread::scope(|scope| {
        let own = communicator.clone();
        let keep = |cause| failure = Some(cause);
        let started = Builder::new().spawn_scoped(scope, || live(rank, threads, own, &body, keep));
        started.map(ScopedJoinHandle::join)
    });
    match (lived, failure) {
        (Ok(Ok(Some(result))), _) => Ok(result),
        (Ok(Ok(None)), Some(failure)) => Err(failure.of_rank(rank)),
        (Ok(Ok(None)), None) => {
            unreachable!("invariant: a rank without a result keeps its failure")
        }
        (Ok(Err(panic)), _) => Err(RanksError::Panicked { rank, message: panic_message(&*panic) }),
        (Err(error), _) => {
            let failure = Failure::Spawn(error.to_string());
            communicator.abort(&failure.to_string());
            Err(failure.of_rank(rank))
        }
    }
}

/// The life of one rank. If it fails, `keep` gets the cause, and then the other ranks are told, so
/// that their failures come later.
fn live<T, E, F>(
    rank: usize,
    threads: usize,
    communicator: Arc<dyn Communicator>,
    body: &F,
    keep: impl FnOnce(Failure<E>),
) -> Option<T>
where
    T: Send,
    E: RankError,
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
{
    compute(rank, threads, communicator.clone(), body)
        .map_err(|failure| fail(failure, &*communicator, keep))
        .ok()
}

/// Gives `keep` the cause for which a rank fails, and then tells the other ranks.
fn fail<E: RankError>(failure: Failure<E>, communicator: &dyn Communicator, keep: impl FnOnce(Failure<E>)) {
    let message = failure.to_string();
    keep(failure);
    communicator.abort(&message);
}

fn compute<T, E, F>(
    rank: usize,
    threads: usize,
    communicator: Arc<dyn Communicator>,
    body: &F,
) -> Result<T, Failure<E>>
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
        .map_err(|error| Failure::Spawn(error.to_string()))?;
    pool.install(|| catch_unwind(AssertUnwindSafe(|| body(communicator))))
        .map_err(|panic| Failure::Panic(panic_message(&*panic)))?
        .map_err(Failure::Error)
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_owned())
}

impl<E: RankError> Failure<E> {
    fn is_consequence(&self) -> bool {
        matches!(self, Failure::Error(error) if error.is_consequence())
    }

    fn of_rank(self, rank: usize) -> RanksError<E> {
        match self {
            Failure::Error(error) => RanksError::Failed { rank, error },
            Failure::Panic(message) => RanksError::Panicked { rank, message },
            Failure::Spawn(reason) => RanksError::Spawn { rank, reason },
        }
    }
}

impl<E: std::fmt::Display> std::fmt::Display for Failure<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Error(error) => error.fmt(f),
            Failure::Panic(message) => write!(f, "panicked: {message}"),
            Failure::Spawn(reason) => write!(f, "cannot start its threads: {reason}"),
        }
    }
}
