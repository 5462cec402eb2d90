//! Launches: the blocks of a grid, executed in parallel on threads of the host.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::access::{self, Memory};
use crate::check::Books;
use crate::error::{Error, Fault, LaunchError};
use crate::footprint::Footprint;
use crate::lanes::LANES;
use crate::memory::{DeviceMemory, View};
use crate::position::{Position, unfolded};
use crate::program::Kernel;
use crate::races::Party;
use crate::warp::{Stop, Warp};
use crate::wgmma::alike::Alike;

/// Shared memory of a block by default, and the maximum it can request, on an H100.
const SHARED_LIMIT: u32 = 48 << 10;
const SHARED_MOST: u32 = 227 << 10;

/// The checks while a kernel runs. Errors that would end this process, such as an address out of bounds, are
/// always checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub enum Checks {
    Off,
    /// Races, unwritten memory, and copies that nothing has waited for.
    On,
    /// Also reads of device memory that other blocks or warps write. Kernels of CubeCL that write to their
    /// input do that: for an index out of range, they read the first element and discard it.
    Strict,
}

/// Options of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    pub checks: Checks,
    /// Number of host threads that execute blocks.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { checks: Checks::On, threads: std::thread::available_parallelism().map_or(1, usize::from) }
    }
}

/// A kernel with everything it needs to run, in the form that a stream queues.
#[derive(Debug, Clone)]
pub struct Launch {
    pub kernel: Arc<Kernel>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of shared memory in addition to those in the text.
    pub dynamic_shared: u32,
    /// Maximum bytes that the kernel's function may request as `dynamic_shared`.
    pub dynamic_shared_limit: u32,
    /// The values of the parameters, each at its position in the kernel.
    pub parameters: Vec<u8>,
}

/// The work that a launch has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    pub threads: u64,
    /// Number of instructions executed by all threads.
    pub instructions: u64,
}

impl Launch {
    /// Creates a launch of `kernel` with arguments in the order of its parameters.
    pub fn new(
        kernel: &Arc<Kernel>,
        grid: [u32; 3],
        block: [u32; 3],
        arguments: &[&[u8]],
    ) -> Result<Launch, LaunchError> {
        let mut parameters = vec![0; kernel.parameter_bytes as usize];
        if arguments.len() != kernel.parameters.len() {
            let (given, wanted) = (arguments.len(), kernel.parameters.len());
            return Err(LaunchError::Refused(format!(
                "{given} arguments, and {} takes {wanted}",
                kernel.name
            )));
        }
        for ((variable, at), argument) in kernel.parameters.iter().zip(arguments) {
            if argument.len() != variable.bytes as usize {
                let (given, wanted) = (argument.len(), variable.bytes);
                return Err(LaunchError::Refused(format!(
                    "{given} bytes for {}, which takes {wanted}",
                    variable.name
                )));
            }
            parameters[*at as usize..][..argument.len()].copy_from_slice(argument);
        }
        let kernel = kernel.clone();
        Ok(Launch { kernel, grid, block, dynamic_shared: 0, dynamic_shared_limit: SHARED_LIMIT, parameters })
    }

    /// Returns the reason why a device would refuse this launch, if any.
    pub(crate) fn refused(&self) -> Option<String> {
        let product = |sizes: [u32; 3]| sizes.iter().map(|&size| u64::from(size)).product::<u64>();
        let (grid, block, kernel) = (self.grid, self.block, &self.kernel);
        let threads = product(block);
        let shared = u64::from(self.kernel.static_shared) + u64::from(self.dynamic_shared);
        if threads == 0 || threads > 1024 || block[0] > 1024 || block[1] > 1024 || block[2] > 64 {
            return Some(format!(
                "a block of {block:?}: a block has at most 1024 threads, 64 of them along z"
            ));
        }
        if product(grid) == 0 || grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 {
            return Some(format!(
                "a grid of {grid:?}: a grid has at most 2147483647, 65535 and 65535 blocks"
            ));
        }
        if let Some(most) = kernel.most_threads.filter(|&most| threads > u64::from(most)) {
            return Some(format!("{threads} threads in a block, but {} is compiled for {most}", kernel.name));
        }
        let limit = u64::from(self.dynamic_shared_limit.clamp(SHARED_LIMIT, SHARED_MOST));
        (shared > limit)
            .then(|| format!("{shared} bytes of shared memory, but {} may use {limit}", kernel.name))
    }

    /// Executes all blocks.
    pub fn run(&self, memory: &DeviceMemory, options: Options) -> Result<Work, LaunchError> {
        self.run_noting(memory, options, None)
    }

    /// Executes all blocks until the end or a fault, and adds the device memory that they use to `footprint`.
    pub fn run_noting(
        &self,
        memory: &DeviceMemory,
        options: Options,
        footprint: Option<&Mutex<Footprint>>,
    ) -> Result<Work, LaunchError> {
        if let Some(reason) = self.refused() {
            return Err(LaunchError::Refused(reason));
        }
        let (view, number) = (memory.view(), launch_number());
        let blocks = self.grid.iter().map(|&size| u64::from(size)).product::<u64>();
        let threads = u64::from(self.block.iter().product::<u32>());
        let (next, instructions) = (AtomicU64::new(0), AtomicU64::new(0));
        // If several blocks fail, the first one is reported.
        let failed: Mutex<Option<(u64, Box<Error>)>> = Mutex::new(None);
        let worker = || {
            let mut block = Block::new(self, &view, number, options.checks);
            block.memory.footprint = footprint.map(|_| Box::default());
            let note = |block: &Block<'_>| {
                if let Some((all, own)) = footprint.zip(block.memory.footprint.as_ref()) {
                    all.lock().unwrap_or_else(PoisonError::into_inner).merge(own);
                }
            };
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= blocks {
                    note(&block);
                    let executed = block.warps.iter().map(|warp| warp.executed).sum();
                    instructions.fetch_add(executed, Ordering::Relaxed);
                    return;
                }
                if let Err(error) = block.run(number as u32) {
                    note(&block);
                    // No block after this one is started.
                    next.fetch_max(blocks, Ordering::Relaxed);
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    if failed.as_ref().is_none_or(|(other, _)| number < *other) {
                        *failed = Some((number, error));
                    }
                    return;
                }
            }
        };
        // Starting a thread is only worthwhile if it has several warps to execute.
        let workers = (blocks * threads / 512).clamp(1, blocks.min(options.threads.max(1) as u64));
        std::thread::scope(|scope| {
            (1..workers).for_each(|_| drop(scope.spawn(worker)));
            worker();
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(LaunchError::Failed(error)),
            None => Ok(Work { threads: blocks * threads, instructions: instructions.into_inner() }),
        }
    }
}

/// Executes blocks one by one.
struct Block<'a> {
    launch: &'a Launch,
    memory: Memory<'a>,
    warps: Vec<Warp>,
}

/// Returns a number for each launch.
fn launch_number() -> u64 {
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    // The numbers fit into their place in the books, and wrap around.
    1 + LAUNCHES.fetch_add(1, Ordering::Relaxed) % ((1 << 20) - 1)
}

/// The state of a warp of a block.
#[derive(Clone, Copy, PartialEq)]
enum State {
    Goes,
    Waits(u32),
    Ended,
}

impl<'a> Block<'a> {
    fn new(launch: &'a Launch, view: &'a View, number: u64, checks: Checks) -> Block<'a> {
        let threads: u32 = launch.block.iter().product();
        let kernel = &launch.kernel;
        let shared = kernel.static_shared + launch.dynamic_shared;
        let warps: Vec<Warp> = (0..threads.div_ceil(LANES as u32))
            .map(|number| Warp::new(kernel, number as usize, threads))
            .collect();
        let party =
            Party { launch: number, block: 0, warp: 0, barriers: 0, strict: checks == Checks::Strict };
        let (checked, products) = (checks > Checks::Off, !kernel.product_uses.all.is_empty());
        let books = checked.then(|| Books::new(shared, kernel.granule, warps.len(), products));
        let alike = (checked && products).then(|| Alike::new(warps.len()));
        let (parameters, shared) = (&launch.parameters[..], vec![0; shared as usize]);
        Block {
            launch,
            memory: Memory { view, parameters, shared, books, alike, hint: 0, party, footprint: None },
            warps,
        }
    }

    fn error(&self, block: [u32; 3], warp: usize, lane: usize, fault: Fault) -> Box<Error> {
        let kernel = &self.launch.kernel;
        let line = kernel.code[self.warps[warp].at].line;
        let thread = unfolded((warp * LANES + lane) as u32, self.launch.block);
        let text = kernel.line(line).to_owned();
        Box::new(Error { kernel: kernel.name.clone(), line, text, block, thread, fault })
    }

    fn run(&mut self, number: u32) -> Result<(), Box<Error>> {
        let launch = self.launch;
        let block = unfolded(number, launch.grid);
        let place = Position {
            block,
            grid_size: launch.grid,
            block_size: launch.block,
            dynamic_shared: launch.dynamic_shared,
        };
        // The initial content of shared memory is undefined; it must not be that of the previous block.
        self.memory.shared.fill(0xff);
        if let Some(books) = &mut self.memory.books {
            books.begin(number);
        }
        if let Some(alike) = &mut self.memory.alike {
            alike.begin(number);
        }
        self.memory.party.block = number;
        self.memory.party.barriers = 0;
        self.warps.iter_mut().for_each(|warp| warp.begin(&launch.kernel, &place));
        let mut states = vec![State::Goes; self.warps.len()];
        loop {
            for (number, state) in states.iter_mut().enumerate() {
                if *state != State::Goes {
                    continue;
                }
                *state = match self.warps[number].run(&launch.kernel, &mut self.memory) {
                    Ok(Stop::Barrier(barrier)) => State::Waits(barrier),
                    Ok(Stop::End) => State::Ended,
                    Err((lane, fault)) => return Err(self.error(block, number, lane, *fault)),
                };
            }
            if let Some((warp, fault)) = self.memory.alike.as_mut().and_then(Alike::meet) {
                return Err(self.error(block, warp, 0, fault));
            }
            let Some(first) = states.iter().position(|state| matches!(state, State::Waits(_))) else {
                return Ok(());
            };
            if let Some(fault) = self.missing(number, first, &states) {
                return Err(self.error(block, first, self.warps[first].first_lane(), fault));
            }
            if let Some(books) = &mut self.memory.books {
                books.barrier();
            }
            self.memory.party.barriers += 1;
            self.warps.iter_mut().for_each(Warp::release);
            states.fill(State::Goes);
        }
    }

    /// Returns the fault if some threads do not reach the barrier at which the warp `first` waits.
    fn missing(&self, block: u32, first: usize, states: &[State]) -> Option<Fault> {
        let ended = self.warps.iter().enumerate().find(|(_, warp)| warp.live != warp.all);
        if let Some((number, warp)) = ended {
            let lane = (warp.all & !warp.live).trailing_zeros() as usize;
            return Some(Fault::Barrier { other: access::other(block, number, lane, 0), ended: true });
        }
        let other = states.iter().position(|state| *state != states[first])?;
        let line = self.launch.kernel.code[self.warps[other].at].line;
        Some(Fault::Barrier { other: access::other(block, other, 0, line), ended: false })
    }
}
