//! How ranks that are processes come to run the same thing.
//!
//! Each has read its own arguments and configuration; these are compared. What takes a look at the
//! disk, such as the run folder or the checkpoint to go on from, is settled by rank 0 alone, and the
//! others are told. Data, configuration and run folder are on a file system that all ranks share.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kiln_collectives::{Buffer, CommError, Communicator, DType, Label, Phase};
use kiln_shard::ShardError;
use serde::{Deserialize, Serialize};

use super::RunOptions;
use super::plan::{Plan, PlanMessage};
use crate::config::Config;
use crate::data::DataError;
use crate::device::ResolvedDevice;
use crate::error::{Result, TrainError};
use crate::world;

/// Who decides.
const ROOT: usize = 0;

/// Rank 0 says at least this often that it is still at work, and hears which ranks were asked to stop.
const BEAT: Duration = Duration::from_secs(2);

/// What rank 0 has come to.
#[derive(Serialize, Deserialize)]
enum Answer {
    Plan(Box<PlanMessage>),
    Failed {
        message: String,
        usage: bool,
    },
    /// Somebody asked it to stop before there was a plan.
    Stopped,
}

/// Fails unless all ranks have the same configuration, arguments and build. Collective.
pub(super) fn on_config(world: &dyn Communicator, config: &Config, options: &RunOptions) -> Result<()> {
    let RunOptions { out, resume, allow_missing, allow_other_parts, allow_changed, debug, fault, .. } =
        options;
    let version = env!("CARGO_PKG_VERSION");
    let patterns = allow_missing.patterns();
    let told = format!(
        "{version} {config:?} {out:?} {resume:?} {patterns:?} \
         {allow_other_parts} {allow_changed:?} {debug:?} {fault:?}"
    );
    world::agree(world, &told, config.comm.timeout())
}

/// The plan that `make` gives on rank 0, on all ranks. Collective.
///
/// Preparing data may take longer than any collective should, so rank 0 tells the others now and
/// then to wait on; they notice when it is gone. A rank that was asked to stop says so then, and rank 0
/// stops as if it had been asked itself.
pub(super) fn on_plan(
    world: &dyn Communicator,
    config: &Config,
    options: &RunOptions,
    device: &ResolvedDevice,
    make: impl FnOnce() -> Result<Plan> + Send,
) -> Result<Plan> {
    let timeout = config.comm.timeout();
    if world.rank() != ROOT {
        world.recorder().set_activity("waiting for the plan");
        return match serde_json::from_slice(&listen(world, options, timeout)?) {
            Ok(Answer::Plan(message)) => message.into_plan(options, device),
            Ok(Answer::Failed { message, usage }) => Err(TrainError::Rank0 { message, usage }),
            Ok(Answer::Stopped) => Err(DataError::Stopped.into()),
            Err(error) => Err(TrainError::Rank0 { message: error.to_string(), usage: false }),
        };
    }
    world.recorder().set_activity("preparing the run");
    let plan = thread::scope(|scope| {
        let (working, done) = mpsc::channel::<()>();
        let maker = thread::Builder::new()
            .spawn_scoped(scope, move || {
                // Dropped at the end, also by a panic.
                let _working = working;
                make()
            })
            .map_err(TrainError::threads("a thread that prepares the run"))?;
        let mut others = Ok(());
        while done.recv_timeout(BEAT.min(timeout / 4)) == Err(mpsc::RecvTimeoutError::Timeout) {
            // If the others are gone, what has been begun is still brought to its end: prepared data
            // will do for the next attempt.
            if others.is_ok() {
                others = tell(world, options, &[], timeout);
            }
        }
        let plan = maker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        others.and(plan)
    });
    let answer = match &plan {
        Ok(plan) => Answer::Plan(Box::new(plan.message.clone())),
        Err(TrainError::Shard(_)) => return plan,
        Err(TrainError::Data(DataError::Stopped)) => Answer::Stopped,
        Err(error) => Answer::Failed { message: error.to_string(), usage: error.is_usage() },
    };
    let answer = serde_json::to_vec(&answer)
        .map_err(|error| TrainError::usage(format!("the paths of this run: {error}")))?;
    let told = tell(world, options, &answer, timeout);
    // An error of its own goes before that of not being heard.
    plan.and_then(|plan| told.map(|()| plan))
}

/// Sends `message` from rank 0 to the others. An empty one asks them to wait on.
fn tell(world: &dyn Communicator, options: &RunOptions, message: &[u8], timeout: Duration) -> Result<()> {
    let (_, stops) = beat(world, message.len(), false, timeout)?;
    if stops {
        options.stop.store(true, Ordering::Relaxed);
    }
    if !message.is_empty() {
        broadcast(world, Buffer::from_slice(message), timeout)?;
    }
    Ok(())
}

/// Waits for a message of rank 0 that is not empty.
fn listen(world: &dyn Communicator, options: &RunOptions, timeout: Duration) -> Result<Vec<u8>> {
    loop {
        let stops = options.stop.load(Ordering::Relaxed);
        let (length, _) = beat(world, 0, stops, timeout)?;
        if length > 0 {
            let message = broadcast(world, Buffer::zeros(DType::U8, length), timeout)?;
            return Ok(message.as_bytes().to_vec());
        }
    }
}

/// Rank 0 gives the bytes of the message that follows, 0 if it is still at work, and the others whether they
/// were asked to stop. Returns the bytes, and whether any rank was asked. Collective.
fn beat(world: &dyn Communicator, length: usize, stops: bool, timeout: Duration) -> Result<(usize, bool)> {
    // Lengths of messages in memory are exact in f64.
    let said = Buffer::from_slice(&[length as f64, f64::from(u8::from(stops))]);
    let sums = world.all_reduce(label(), said).wait(timeout).map_err(failed)?;
    let sums = sums.as_slice::<f64>().map_err(ShardError::from)?;
    Ok((sums[0] as usize, sums[1] > 0.0))
}

fn broadcast(world: &dyn Communicator, buffer: Buffer, timeout: Duration) -> Result<Buffer> {
    world.broadcast(label(), buffer, ROOT).wait(timeout).map_err(failed)
}

fn label() -> Label {
    Label::new("plan of the run", Phase::Init)
}

fn failed(error: CommError) -> TrainError {
    ShardError::from(error).into()
}
