//! Issuing operations, and executing them on the threads of streams.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::operation::{Access, Operation};
use super::order::Order;
use super::problem::Problem;
use super::state::{Event, Failed, Release, Settings, State, Submitted, Task, Work};

/// The byte that fills freed memory: it makes NaNs in every float type.
const POISON: u8 = 0xff;

/// Limits of the freed memory whose addresses are kept to report later uses: in bytes, and in allocations,
/// because every launch searches them.
const KEPT: u64 = 256 << 20;
const KEPT_ALLOCATIONS: usize = 1024;

/// Maximum time that a kernel that read unwritten memory waits for the missing writer, which may be late.
const PATIENCE: Duration = Duration::from_secs(5);

/// Freed memory whose addresses are kept for a while.
#[derive(Default)]
pub struct Graveyard {
    allocations: VecDeque<(u64, u64, Release)>,
    bytes: u64,
}

/// State shared by the host and the threads of streams.
pub struct Shared {
    pub settings: Settings,
    pub state: Mutex<State>,
    /// The condition on which the host waits, and kernels that wait for others. Each stream waits for work on
    /// its own condition: there may be a hundred streams, and a single condition would wake them all.
    pub changed: Condvar,
    pub order: Mutex<Order>,
    pub graveyard: Mutex<Graveyard>,
    pub tell: Box<dyn Fn(&str) + Send + Sync>,
}

/// Locks a mutex, even if a thread has panicked while holding it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Computes a checksum for detecting changes of bytes.
fn checksum(access: &Access) -> u64 {
    let mut sum = 0xcbf2_9ce4_8422_2325_u64;
    let mut at = access.start;
    while at < access.end {
        let step = if access.end - at >= 8 && at.is_multiple_of(8) { 8 } else { 1 };
        // SAFETY: this is aligned pinned memory of this process, which the host keeps until the copy is done;
        // otherwise the copy itself would be invalid too. Volatile, because the host may write at the same
        // time.
        let value = unsafe {
            if step == 8 {
                (at as *const u64).read_volatile()
            } else {
                (at as *const u8).read_volatile().into()
            }
        };
        sum = (sum ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        at += step;
    }
    sum
}

/// Delay of the operation at `position` of `stream`: none for three of four, some hundreds of microseconds
/// for the others, and some milliseconds for one of 64.
fn delay(seed: u64, stream: usize, position: u32) -> Duration {
    let mut random = seed ^ (stream as u64) << 40 ^ u64::from(position);
    // SplitMix64.
    random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
    random = (random ^ random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    random = (random ^ random >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    random ^= random >> 31;
    let most = match random % 64 {
        0 => 5000,
        1..16 => 800,
        _ => return Duration::ZERO,
    };
    Duration::from_micros((random >> 8) % most)
}

impl Shared {
    pub fn by_host(&self, what: String) -> Arc<Operation> {
        let mut state = lock(&self.state);
        state.operations += 1;
        let (number, clock) = (state.operations, state.host.clone());
        Arc::new(Operation { number, what, place: None, clock })
    }

    pub fn issue(
        &self,
        stream: usize,
        submitted: Submitted,
        event: Option<&Event>,
    ) -> Result<Arc<Operation>, Failed> {
        let Submitted { what, accesses, work } = submitted;
        let reads = lock(&self.state).pinned_reads(&accesses);
        let sums = reads.into_iter().map(|access| (access, checksum(&access))).collect();
        let is_full = |state: &mut State| {
            let queued = state.streams.get(&stream).map_or(0, |stream| stream.tasks.len());
            queued >= self.settings.queue.max(1) && !state.failed
        };
        let state = lock(&self.state);
        let mut state = self.changed.wait_while(state, is_full).unwrap_or_else(PoisonError::into_inner);
        if state.failed {
            return Err(Failed);
        }
        let mut after: Vec<_> = event.and_then(|event| event.place).into_iter().collect();
        let mut clock = event.map(|event| event.clock.clone()).unwrap_or_default();
        let own = state.streams.get(&stream).is_some_and(|stream| stream.blocking);
        for (&number, other) in &state.streams {
            if number != stream && own && other.blocking && (stream == 0 || number == 0) {
                after.push((number, other.issued));
                clock.join(&other.clock);
            }
        }
        clock.join(&state.host);
        state.operations += 1;
        let number = state.operations;
        let Some(to) = state.streams.get_mut(&stream) else {
            drop(state);
            self.fail(&format!("{what} on stream {stream}, which does not exist"));
            return Err(Failed);
        };
        to.issued += 1;
        clock.raise(stream, to.issued);
        to.clock.join(&clock);
        let (place, clock) = (Some((stream, to.issued)), to.clock.clone());
        let operation = Arc::new(Operation { number, what, place, clock });
        to.tasks.push_back(Task { operation: operation.clone(), after, accesses, sums, work: Some(work) });
        to.turn.notify_one();
        Ok(operation)
    }

    /// Executes the operations of a stream on its thread.
    pub fn execute(&self, stream: usize) {
        let turn = lock(&self.state).streams[&stream].turn.clone();
        loop {
            let state = lock(&self.state);
            let rests = |state: &mut State| {
                let own = &state.streams[&stream];
                !(state.is_ready(stream) || own.ends && own.tasks.is_empty())
            };
            let mut state = turn.wait_while(state, rests).unwrap_or_else(PoisonError::into_inner);
            let failed = state.failed;
            let Some(task) = state.streams.get_mut(&stream).and_then(|own| own.tasks.front_mut()) else {
                return;
            };
            let operation = task.operation.clone();
            let (work, accesses) = (task.work.take(), task.accesses.clone());
            let sums = std::mem::take(&mut task.sums);
            drop(state);
            if let Some(work) = work.filter(|_| !failed) {
                if let Some((stream, position)) = operation.place {
                    thread::sleep(delay(self.settings.seed, stream, position));
                }
                self.perform(&operation, &accesses, &sums, work);
            }
            let mut state = lock(&self.state);
            if let Some(own) = state.streams.get_mut(&stream) {
                own.tasks.pop_front();
                own.done += 1;
            }
            state.wake_after(stream);
            drop(state);
            self.changed.notify_all();
        }
    }

    fn perform(&self, operation: &Arc<Operation>, accesses: &[Access], sums: &[(Access, u64)], work: Work) {
        let noted = lock(&self.order).uses(operation, accesses);
        // Memory that does not exist must not be accessed.
        let is_there = !noted.as_ref().is_err_and(|problem| matches!(**problem, Problem::Unknown(..)));
        self.tell(noted);
        for (access, sum) in sums {
            if checksum(access) != *sum {
                let (copy, bytes) = (operation.clone(), access.start..access.end);
                self.tell(Err(Box::new(Problem::Overwritten { copy, bytes })));
            }
        }
        match work {
            Work::Nothing => {}
            Work::Call(call) => {
                if is_there && let Err(reason) = call() {
                    self.fail(&format!("{operation}: {reason}"));
                }
            }
            Work::Kernel(kernel) => {
                let (accesses, result) = kernel();
                let noted = lock(&self.order).uses(operation, &accesses);
                self.tell(noted);
                // A missing order may also cause a fault in the kernel, but its own message is more helpful.
                if let Err(reason) = result
                    && !self.is_told(operation)
                {
                    self.fail(&format!("{reason}\n  {operation}, operation {}", operation.number));
                }
            }
            Work::HostFunction(function) => {
                lock(&self.state).host.join(&operation.clock);
                function();
            }
            Work::Free(start, release) => self.free(operation, start, release),
        }
    }

    /// Returns `true` if `operation` is involved in a problem. First waits for the operations that can run
    /// now or before it.
    fn is_told(&self, operation: &Operation) -> bool {
        let stream = operation.place.map_or(0, |(stream, _)| stream);
        let goes_on = |state: &mut State| {
            !state.told.contains(&operation.number) && !state.failed && !state.all_wait_for(stream)
        };
        let waited = self.changed.wait_timeout_while(lock(&self.state), PATIENCE, goes_on);
        waited.unwrap_or_else(PoisonError::into_inner).0.told.contains(&operation.number)
    }

    pub fn free(&self, operation: &Arc<Operation>, start: u64, release: Release) {
        let freed = lock(&self.order).freed(operation, start);
        self.tell(freed.result);
        let Some(written) = freed.written else { return };
        for range in &written {
            let bytes = (range.end - range.start) as usize;
            // SAFETY: memory of an allocation, which exists until `release` is called.
            unsafe { std::ptr::write_bytes(range.start as *mut u8, POISON, bytes) };
        }
        self.bury(start, written.iter().map(|range| range.end - range.start).sum(), release);
    }

    /// Keeps the addresses of freed memory, and releases those kept longest.
    pub fn bury(&self, start: u64, bytes: u64, release: Release) {
        let mut graveyard = lock(&self.graveyard);
        graveyard.bytes += bytes;
        graveyard.allocations.push_back((start, bytes, release));
        while (graveyard.bytes > KEPT || graveyard.allocations.len() > KEPT_ALLOCATIONS)
            && let Some((start, bytes, release)) = graveyard.allocations.pop_front()
        {
            graveyard.bytes -= bytes;
            lock(&self.order).forget(start);
            release();
        }
    }

    pub fn tell(&self, result: Result<(), Box<Problem>>) {
        let Err(problem) = result else { return };
        let numbers: Vec<u64> = problem.operations().iter().map(|operation| operation.number).collect();
        lock(&self.state).told.extend(numbers);
        if self.settings.goes_on {
            (self.tell)(&problem.to_string());
        } else {
            self.fail(&problem.to_string());
        }
        self.changed.notify_all();
    }

    /// Reports an error, unless it is a consequence of an earlier one.
    pub fn fail(&self, text: &str) {
        let before = std::mem::replace(&mut lock(&self.state).failed, true);
        if !before {
            (self.tell)(text);
        }
        self.changed.notify_all();
    }
}
