//! Makes ranks that are processes follow one plan, in which rank 0 decides everything that depends on the disk.
//! Data, configuration and run folder are on a file system that all ranks share.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kiln_collectives::{Buffer, CommError, Communicator, DType, Label, Phase};
use kiln_shard::ShardError;
use serde::{Deserialize, Serialize};

use super::RunOptions;
use super::plan::{Plan, PlanMessage};
use crate::error::{Result, TrainError};
use crate::world;
use kiln_config::Config;
use kiln_config::device::ResolvedDevice;
use kiln_data::DataError;

const ROOT: usize = 0;

const BEAT: Duration = Duration::from_secs(2);

#[derive(Serialize, Deserialize)]
enum Answer {
    Plan(Box<PlanMessage>),
    Failed {
        message: String,
        usage: bool,
    },
    /// A stop was requested before there was a plan.
    Stopped,
}

pub(super) fn on_config(world: &dyn Communicator, config: &Config, options: &RunOptions) -> Result<()> {
    let RunOptions { out, resume, allow_missing, allow_other_parts, allow_changed, tools, fault, .. } =
        options;
    let version = env!("CARGO_PKG_VERSION");
    let patterns = allow_missing.patterns();
    let told = format!(
        "{version} {config:?} {out:?} {resume:?} {patterns:?} \
         {allow_other_parts} {allow_changed:?} {tools:?} {fault:?}"
    );
    world::agree(world, &told, config.comm.timeout())
}

/// Makes the plan with `make` on rank 0 and returns it on all ranks. Collective.
/// Rank 0 regularly asks the others to keep waiting, because preparing data may outlast a collective's timeout.
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
                let _working = working;
                make()
            })
            .map_err(TrainError::threads("a thread that prepares the run"))?;
        let mut others = Ok(());
        while done.recv_timeout(BEAT.min(timeout / 4)) == Err(mpsc::RecvTimeoutError::Timeout) {
            // Even without the others, rank 0 finishes its work: the next attempt can use the prepared data.
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
    // Rank 0's own error takes precedence over failing to reach the others.
    plan.and_then(|plan| told.map(|()| plan))
}

/// Sends `message` from rank 0 to the others. An empty message asks them to keep waiting.
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

/// Exchanges signs of life: rank 0 passes its message's `length`, 0 while working; other ranks pass stop requests.
/// Returns the length, and whether any rank was asked to stop. Collective.
fn beat(world: &dyn Communicator, length: usize, stops: bool, timeout: Duration) -> Result<(usize, bool)> {
    // f64 represents the length of any message in memory exactly.
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
