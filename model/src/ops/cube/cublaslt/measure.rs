//! Measures which of cuBLASLt's candidate algorithms is the fastest, with GPU timers.

#![allow(unsafe_code)]

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use cudarc::driver::result::{DriverError, event, free_sync, malloc_sync, memcpy_dtoh_sync, memset_d8_async};
use cudarc::driver::sys::{CUdeviceptr, CUevent, CUevent_flags, CUstream};

use super::agreement::{agree, compared};
use super::algorithms::Fastest;
use super::plan::{Call, Plan};
use super::problem::Problem;

const NAMED: usize = 8;

/// Measurements per algorithm, in alternation; the median counts. A first extra run produces the output to compare, and
/// lets caches and clocks settle.
const ROUNDS: usize = 7;

/// Maximum time of a different algorithm relative to cuBLASLt's first choice: smaller gains may be timing noise.
const MARGIN: f32 = 0.98;

/// Measures each candidate algorithm for the product of `call`, into separate memory, and waits for the results.
///
/// Reports and skips algorithms whose output differs from the first one's. Returns `None` without memory or timers.
///
/// # Safety
///
/// As for `Plan::queue` with `call`.
pub(super) unsafe fn fastest_of(plan: &Plan, problem: &Problem, call: &Call) -> Option<Fastest> {
    let named = plan.named::<NAMED>(call.handle).ok()?;
    let output = Scratch::new(problem.output_bytes())?;
    let [a, b, _] = call.at;
    let call = Call { at: [a, b, output.at], factors: [call.factors[0], 0.0], ..*call };
    let (start, end) = (Event::new()?, Event::new()?);
    let time = |algorithm: &cublasLtMatmulAlgo_t| -> Option<f32> {
        start.record(call.stream).ok()?;
        // SAFETY: guaranteed by the caller; the scratch memory is as large as the output, at least as well aligned,
        // and outlives the wait for the event.
        unsafe { plan.queue(algorithm, &call) }.ok()?;
        end.record(call.stream).ok()?;
        start.until(&end).ok()
    };
    let computed = |algorithm: &cublasLtMatmulAlgo_t| -> Option<Vec<u8>> {
        output.spoil(call.stream).ok()?;
        time(algorithm)?;
        output.read(problem).ok()
    };
    let first = computed(named.first()?)?;
    let is_usable = |at: usize| match computed(&named[at]) {
        None => false,
        Some(other) if agree(problem, &first, &other) => true,
        Some(_) => {
            tracing::warn!(
                "algorithm {} of cuBLASLt's candidates for {problem} differs from the first by more than rounding: \
                 it is not used",
                at + 1
            );
            false
        }
    };
    let usable: Vec<bool> = (0..named.len()).map(|at| at == 0 || is_usable(at)).collect();
    let mut times = vec![Vec::new(); named.len()];
    for _ in 0..ROUNDS {
        for ((algorithm, times), _) in
            named.iter().zip(&mut times).zip(&usable).filter(|(_, usable)| **usable)
        {
            times.extend(time(algorithm));
        }
    }
    let (fastest, [ms, first_ms]) = choose(times)?;
    Some(Fastest { algorithm: named[fastest].data, ms, first_ms })
}

/// Returns the index of the fastest algorithm by median time, and its and the first one's milliseconds. Skips failed
/// algorithms, which have too few times; `None` if the first one failed.
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

struct Scratch {
    at: CUdeviceptr,
    bytes: usize,
}

impl Scratch {
    fn new(bytes: usize) -> Option<Scratch> {
        // SAFETY: the context is current; the memory is written before anything reads it.
        let at = unsafe { malloc_sync(bytes) }.ok()?;
        Some(Scratch { at, bytes })
    }

    /// Fills the memory with bytes that are NaN in every dtype, to reveal values that an algorithm does not write.
    fn spoil(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: the memory has `self.bytes` bytes, and the caller's stream is alive.
        unsafe { memset_d8_async(self.at, 0xff, self.bytes, stream) }
    }

    /// Returns the parts of an output to compare, concatenated. The product must have finished.
    fn read(&self, problem: &Problem) -> Result<Vec<u8>, DriverError> {
        let mut all = Vec::new();
        for part in compared(self.bytes, problem.output.bytes()) {
            let start = all.len();
            all.resize(start + part.len(), 0);
            // SAFETY: the part lies inside the memory, and is as long as the slice.
            unsafe { memcpy_dtoh_sync(&mut all[start..], self.at + part.start as u64)? };
        }
        Ok(all)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, and freeing waits for all uses. An error cannot be handled here.
        let _ = unsafe { free_sync(self.at) };
    }
}

struct Event(CUevent);

impl Event {
    fn new() -> Option<Event> {
        event::create(CUevent_flags::CU_EVENT_DEFAULT).ok().map(Event)
    }

    fn record(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: the event and the caller's stream are alive.
        unsafe { event::record(self.0, stream) }
    }

    /// Waits for `end` and returns the milliseconds between two recorded events.
    fn until(&self, end: &Event) -> Result<f32, DriverError> {
        // SAFETY: both are alive, and on the same stream.
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
        assert_eq!(of(&[3.0, 2.95]), Some((0, [3.0, 3.0])));
        // An algorithm that was slow once is judged by its other times; a failed algorithm is skipped.
        let mut late = vec![2.0; ROUNDS];
        late[3] = 100.0;
        assert_eq!(choose(vec![vec![3.0; ROUNDS], late, vec![1.0]]), Some((1, [2.0, 3.0])));
        assert_eq!(choose(vec![vec![1.0], vec![2.0; ROUNDS]]), None);
    }
}
