//! Measures how much a background save slows steps down.

use std::path::Path;
use std::thread;
use std::time::Instant;

use kiln::checkpoint::{Progress, SaveContext, Saver, Stream};
use kiln::run::TrainError;
use kiln_collectives::Phase;
use kiln_shard::Engine;

use crate::disk;

/// Saves, and plain writes, in a round.
const TIMES: u64 = 3;

const BLOCK: usize = 1 << 20;

/// Means over a round, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beside {
    pub step: f64,
    /// Time that a save blocks steps: for its start, and for copies of data that the next update changes.
    pub held: f64,
    /// Processor time of all ranks' writers for a save.
    pub cpu: f64,
    /// Total time by which steps were longer until a save was complete.
    pub slowed: f64,
    /// Total time by which steps were longer during plain writes of as many bytes.
    pub plain_slowed: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Step {
    whole: f64,
    update: f64,
}

pub struct Steps<'a> {
    pub engine: &'a Engine,
    /// Runs the step with this number; returns the seconds of its update.
    pub step: &'a dyn Fn(u64) -> Result<f64, TrainError>,
}

impl Steps<'_> {
    /// Alternates saves, plain writes to `raw`, and steps without concurrent work, which changes in the machine's
    /// speed affect alike.
    pub fn beside_saves(
        &self,
        first_step: u64,
        mut saver: Saver,
        context: &dyn Fn(u64) -> SaveContext,
        raw: &Path,
        bytes: u64,
    ) -> Result<Beside, TrainError> {
        let mut mean = Beside::default();
        let mut number = first_step;
        let mut timed = || {
            number += 1;
            let start = Instant::now();
            let update = (self.step)(number)?;
            self.sum(0.0)?;
            Ok::<_, TrainError>(Step { whole: start.elapsed().as_secs_f64(), update })
        };
        // Runs steps until `done`, and one more as the reference for the next; returns by how much they were longer.
        let mut before = timed()?;
        let mut until = |done: &mut dyn FnMut() -> Result<bool, TrainError>| {
            let mut steps = vec![timed()?];
            while !done()? {
                steps.push(timed()?);
            }
            let after = timed()?;
            let more = more_than_usual(&steps, before, after);
            before = after;
            Ok::<_, TrainError>((more, after.whole))
        };
        for save in 1..=TIMES {
            let start = Instant::now();
            saver.begin(self.engine, context(first_step + save))?;
            let begun = start.elapsed().as_secs_f64();
            let ([held, slowed], step) = until(&mut || {
                let mut all = saver.progress().to_values();
                for value in &mut all {
                    *value = self.sum(*value)?;
                }
                Ok(saver.advance(self.engine, Progress::from_values(all))?.is_some())
            })?;
            mean.step += step;
            mean.held += begun + held;
            mean.slowed += begun + slowed;
            mean.cpu += self.sum(saver.cpu_time().as_secs_f64())?;

            let path = raw.with_extension(self.engine.world().rank().to_string());
            let ranks = self.engine.world().world_size();
            let (own, share) = (path.clone(), bytes / ranks as u64);
            let writing = thread::Builder::new().spawn(move || write(&own, share)).map_err(|error| {
                TrainError::Threads { what: "a thread that writes".to_owned(), reason: error.to_string() }
            })?;
            let ([_, slowed], _) =
                until(&mut || Ok(self.sum(f64::from(u8::from(writing.is_finished())))? == ranks as f64))?;
            mean.plain_slowed += slowed;
            let written = writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            written.and_then(|()| std::fs::remove_file(&path)).map_err(disk::error("write", &path))?;
        }
        let Beside { step, held, cpu, slowed, plain_slowed } = &mut mean;
        for sum in [step, held, cpu, slowed, plain_slowed] {
            *sum /= TIMES as f64;
        }
        Ok(mean)
    }

    fn sum(&self, value: f64) -> Result<f64, TrainError> {
        Ok(self.engine.all_reduce_f64(Phase::Other, "bench", &[value])?[0])
    }
}

/// Returns the total time by which updates and steps were longer than the mean of a step before and one after.
fn more_than_usual(steps: &[Step], before: Step, after: Step) -> [f64; 2] {
    let update = f64::midpoint(before.update, after.update);
    let whole = f64::midpoint(before.whole, after.whole);
    [
        steps.iter().map(|step| (step.update - update).max(0.0)).sum(),
        steps.iter().map(|step| step.whole - whole).sum(),
    ]
}

fn write(path: &Path, bytes: u64) -> std::io::Result<()> {
    let mut stream = Stream::create(path)?;
    disk::in_blocks(bytes, BLOCK, |block| stream.append(block, |_| {}))?;
    stream.finish()
}
