//! Random programs of many streams. Programs with all waits give the result of a single stream, without
//! reports. A program with one wait removed gives a report if and only if two uses of a buffer have become
//! unordered.

use std::sync::{Arc, Mutex};

use kiln_ptx::streams::{Access, Device, Settings, Submitted, Use};

const STREAMS: usize = 4;
const BUFFERS: usize = 5;
const STEPS: usize = 30;

/// A pseudo-random sequence of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// A step of a stream: `to = 3 * to + from + 1`, after steps of other streams.
#[derive(Debug, Clone)]
struct Step {
    stream: usize,
    from: usize,
    to: usize,
    after: Vec<usize>,
}

impl Step {
    fn conflicts(&self, other: &Step) -> bool {
        self.to == other.to || self.to == other.from || self.from == other.to
    }
}

/// A program in which each step waits for every earlier step that it must not overtake.
fn program(random: &mut Random) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for _ in 0..STEPS {
        let (stream, from, to) = (random.below(STREAMS), random.below(BUFFERS), random.below(BUFFERS));
        let mut step = Step { stream, from, to, after: Vec::new() };
        step.after = (0..steps.len())
            .filter(|&at| steps[at].stream != stream && steps[at].conflicts(&step))
            // Of steps that are ordered already, waiting for the last one is sufficient.
            .filter(|&at| {
                !(at + 1..steps.len()).any(|later| {
                    steps[later].stream != stream
                        && steps[later].conflicts(&step)
                        && precedes(&steps, at, later)
                })
            })
            .collect();
        steps.push(step);
    }
    steps
}

/// Returns `true` if the step at `first` comes before the one at `second`, because of their stream or because
/// of waits.
fn precedes(steps: &[Step], first: usize, second: usize) -> bool {
    let mut reached = vec![false; steps.len()];
    reached[first] = true;
    for at in first + 1..=second {
        let by_stream = (first..at).any(|before| reached[before] && steps[before].stream == steps[at].stream);
        reached[at] = by_stream || steps[at].after.iter().any(|&before| reached[before]);
    }
    reached[second]
}

/// Two unordered steps that use the same buffer.
fn race(steps: &[Step]) -> Option<(usize, usize)> {
    let pairs = (0..steps.len()).flat_map(|second| (0..second).map(move |first| (first, second)));
    pairs
        .into_iter()
        .find(|&(first, second)| steps[first].conflicts(&steps[second]) && !precedes(steps, first, second))
}

/// The reports about a program, and the final content of its buffers.
fn execute(steps: &[Step], seed: u64) -> (Vec<String>, Vec<u64>) {
    let told = Arc::new(Mutex::new(Vec::new()));
    let telling = told.clone();
    let settings = Settings { seed, queue: 8, goes_on: true };
    let device = Device::new(settings, move |problem| telling.lock().unwrap().push(problem.to_owned()));
    // They exist as long as the process.
    let buffers: Vec<u64> = (0..BUFFERS).map(|_| Box::leak(Box::new(0_u64)) as *mut u64 as u64).collect();
    buffers.iter().for_each(|&buffer| device.allocated(buffer, 8, None).unwrap());
    (0..STREAMS).for_each(|stream| device.create(stream + 1, false));
    let mut events = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        let stream = step.stream + 1;
        step.after.iter().for_each(|&before| device.wait(stream, &events[before]).unwrap());
        let (from, to) = (buffers[step.from], buffers[step.to]);
        let call = move || {
            // SAFETY: the buffers stay. If a wait is missing, other streams also access them, as single
            // words.
            unsafe {
                let (from, to) = (from as *mut u64, to as *mut u64);
                let value =
                    to.read_volatile().wrapping_mul(3).wrapping_add(from.read_volatile()).wrapping_add(1);
                to.write_volatile(value);
            }
            Ok(())
        };
        let used = vec![Access::new(from, 8, Use::Read), Access::new(to, 8, Use::Write)];
        device.submit(stream, Submitted::call(format!("step {number}"), used, call)).unwrap();
        events.push(device.record(stream));
    }
    device.synchronize().unwrap();
    // SAFETY: nothing runs any more.
    let values = buffers.iter().map(|&buffer| unsafe { (buffer as *const u64).read_volatile() }).collect();
    let told = told.lock().unwrap().clone();
    (told, values)
}

#[test]
fn programs_are_told_if_and_only_if_an_order_is_missing() {
    let (mut missing, mut spare) = (0, 0);
    for seed in 1..40 {
        let mut random = Random(seed);
        let mut steps = program(&mut random);
        assert_eq!(race(&steps), None);
        let (told, values) = execute(&steps, seed);
        assert_eq!(told, [""; 0], "seed {seed}");
        let mut expected = vec![0_u64; BUFFERS];
        for step in &steps {
            expected[step.to] =
                expected[step.to].wrapping_mul(3).wrapping_add(expected[step.from]).wrapping_add(1);
        }
        assert_eq!(values, expected, "seed {seed}");

        let waiting: Vec<usize> = (0..STEPS).filter(|&at| !steps[at].after.is_empty()).collect();
        let step = &mut steps[waiting[random.below(waiting.len())]];
        step.after.remove(random.below(step.after.len()));
        let (told, _) = execute(&steps, seed);
        match race(&steps) {
            Some(pair) => {
                missing += 1;
                assert!(!told.is_empty(), "seed {seed}: {pair:?} is not found in {steps:#?}");
                // Every report is correct.
                for problem in told {
                    let number = |text: &str| text.split(' ').next().and_then(|n| n.parse::<usize>().ok());
                    let named: Vec<usize> = problem.split("step ").skip(1).filter_map(number).collect();
                    assert!(named.len() == 2 && !precedes(&steps, named[0], named[1]), "{problem}");
                }
            }
            None => {
                spare += 1;
                assert_eq!(told, [""; 0], "seed {seed}: {steps:#?}");
            }
        }
    }
    assert!(missing > 10 && spare > 0, "{missing} programs with a race, {spare} without");
}
