//! Serves collectives to a driver that times them: one rank, or a whole local world.
//!
//! ```text
//! cargo run --release -p kiln-benches --bin collectives_peer -- --backend local --ranks 2
//! cargo run --release -p kiln-benches --bin collectives_peer -- \
//!     --backend tcp --ranks 2 --rank 0 --port 29500
//! ```
//!
//! Rank 0 reads commands `OP BYTES ITERATIONS` from standard input and answers each with a line of JSON. `OP` is
//! `all_gather` or `reduce_scatter` of `f32`, where `BYTES` is the size of the full tensor, or `memcpy`, which copies
//! `BYTES` on every rank. All ranks exit at the end of input. `benches/peers` has the same protocol for other systems.

mod arguments;
mod exercise;
mod serve;

use arguments::{Arguments, Backend};
use exercise::{Failure, Sources};
use kiln_collectives::tcp::{JoinOptions, Secret, TcpCommunicator};
use kiln_collectives::{Communicator, LocalGroup};
use kiln_shard::memory::CountingAllocator;
use std::process::ExitCode;
use std::thread;

/// The trainer's allocator, so that buffers are the same as in a run.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(Some(arguments)) => arguments,
        Ok(None) => {
            println!("{}", arguments::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(problem) => {
            eprintln!("{problem}\n{}", arguments::USAGE);
            return ExitCode::from(2);
        }
    };
    let outcome = match arguments.backend {
        Backend::Local => serve_local(arguments.ranks),
        Backend::Tcp | Backend::Sockets => serve_tcp(arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn serve_local(ranks: usize) -> Result<(), Failure> {
    let sources = Sources::default();
    thread::scope(|scope| {
        let threads: Vec<_> = LocalGroup::new(ranks)
            .into_iter()
            .map(|group| {
                let sources = sources.clone();
                scope.spawn(move || serve::serve(&group, sources))
            })
            .collect();
        // Joins all threads before returning the failure of the lowest rank.
        let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        outcomes.into_iter().try_for_each(|outcome| outcome.unwrap_or_else(|_| Err("a rank panicked".into())))
    })
}

fn serve_tcp(arguments: Arguments) -> Result<(), Failure> {
    let Arguments { backend, ranks, rank, host, port, job, seal } = arguments;
    let mut options = JoinOptions::new(rank, ranks, host, port);
    options.seal = seal;
    if !seal.is_off() {
        options.secret = Secret::new("of a measurement");
    }
    options.read_memory = backend == Backend::Tcp;
    if let Some(job) = job {
        options.job = job;
    }
    let group = TcpCommunicator::join(options)?;
    serve::serve(&group as &dyn Communicator, Sources::default())
}
