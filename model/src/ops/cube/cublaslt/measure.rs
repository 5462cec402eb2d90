//! Which of the algorithms that cuBLASLt names is the fastest, by the clock of the GPU.

#![allow(unsafe_code)]

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use cudarc::driver::result::{DriverError, event, free_sync, malloc_sync};
use cudarc::driver::sys::{CUdeviceptr, CUevent, CUevent_flags, CUstream};

use super::algorithms::Fastest;
use super::plan::{Call, Plan};
use super::problem::Problem;

/// Algorithms that are measured, the first that cuBLASLt names.
const NAMED: usize = 8;

/// Times that each of them is measured, by turns; the median counts. There is one more at first, for caches and
/// clocks to settle.
const ROUNDS: usize = 7;

/// The part of the time of cuBLASLt's first choice that another algorithm may take. Closer ones are not told
/// apart from the noise of a clock.
const MARGIN: f32 = 0.98;

/// Computes the product of `call` with each of the algorithms that cuBLASLt names for the plan, and waits for it;
/// the output of `call` is not touched. `None` if they cannot be measured, since memory or the clock is missing.
///
/// # Safety
///
/// As for `Plan::queue` with `call`.
pub(super) unsafe fn fastest_of(plan: &Plan, problem: &Problem, call: &Call) -> Option<Fastest> {
    let named = plan.named::<NAMED>(call.handle).ok()?;
    let output = Scratch::new(problem.output_bytes())?;
    let [a, b, _] = call.at;
    // Nothing is added to: there is nothing in this output yet.
    let call = Call { at: [a, b, output.0], factors: [call.factors[0], 0.0], ..*call };
    let (start, end) = (Event::new()?, Event::new()?);
    let time = |algorithm: &cublasLtMatmulAlgo_t| -> Option<f32> {
        start.record(call.stream).ok()?;
        // SAFETY: the caller's promise; the scratch memory is as large as the output, and aligned at least as
        // well, and lives until the event is waited for.
        unsafe { plan.queue(algorithm, &call) }.ok()?;
        end.record(call.stream).ok()?;
        start.until(&end).ok()
    };
    let mut times = vec![Vec::new(); named.len()];
    for round in 0..=ROUNDS {
        for (algorithm, times) in named.iter().zip(&mut times) {
            let took = time(algorithm);
            if round > 0 {
                times.extend(took);
            }
        }
    }
    let (fastest, [ms, first_ms]) = choose(times)?;
    Some(Fastest { algorithm: named[fastest].data, ms, first_ms })
}

/// The place of the fastest, its milliseconds and those of the first, by the median of the times of each. One
/// that has failed has too few times. `None` if the first one has.
fn choose(times: Vec<Vec<f32>>) -> Option<(usize, [f32; 2])> {
    let median = |mut times: Vec<f32>| {
        times.sort_by(f32::total_cmp);
        (times.len() == ROUNDS).then(|| times[ROUNDS / 2])
    };
    let medians: Vec<Option<f32>> = times.into_iter().map(median).collect();
    let first = (*medians.first()?)?;
    let all = medians.iter().enumerate().filter_map(|(at, ms)| Some((at, (*ms)?)));
    let (at, ms) = all.min_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(if ms < first * MARGIN { (at, [ms, first]) } else { (0, [first, first]) })
}

/// Device memory for the time of a measurement.
struct Scratch(CUdeviceptr);

impl Scratch {
    fn new(bytes: usize) -> Option<Scratch> {
        // SAFETY: the context is current; the memory is written before anything reads it.
        unsafe { malloc_sync(bytes) }.ok().map(Scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: it was allocated by `new`, and freeing waits for what still uses it. An error cannot be handled
        // here.
        let _ = unsafe { free_sync(self.0) };
    }
}

/// A moment of a stream.
struct Event(CUevent);

impl Event {
    fn new() -> Option<Event> {
        event::create(CUevent_flags::CU_EVENT_DEFAULT).ok().map(Event)
    }

    fn record(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: the event is alive, and the caller's stream as well.
        unsafe { event::record(self.0, stream) }
    }

    /// Milliseconds until `end`, which is waited for; both are recorded.
    fn until(&self, end: &Event) -> Result<f32, DriverError> {
        // SAFETY: both are alive, and on one stream.
        unsafe {
            event::synchronize(end.0)?;
            event::elapsed(self.0, end.0)
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: its last use. An error cannot be handled here.
        let _ = unsafe { event::destroy(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_is_clearly_faster_than_the_first() {
        let of = |times: &[f32]| choose(times.iter().map(|time| vec![*time; ROUNDS]).collect());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[3.0]), Some((0, [3.0, 3.0])));
        assert_eq!(of(&[3.0, 2.0, 2.5]), Some((1, [2.0, 3.0])));
        // Too close to be told apart.
        assert_eq!(of(&[3.0, 2.95]), Some((0, [3.0, 3.0])));
        // One that was late once is judged by its other times; one that has failed is left out.
        let mut late = vec![2.0; ROUNDS];
        late[3] = 100.0;
        assert_eq!(choose(vec![vec![3.0; ROUNDS], late, vec![1.0]]), Some((1, [2.0, 3.0])));
        assert_eq!(choose(vec![vec![1.0], vec![2.0; ROUNDS]]), None);
    }
}
