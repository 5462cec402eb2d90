//! The thread that watches what NCCL has under way: it lets go of what is done, and ends what does not
//! go on.

use super::channel::Channel;
use super::cuda::{Event, Marks};
use crate::call::CallSite;
use crate::recorder::RecordId;
use crate::sync::{lock, wait_until};
use cubecl_runtime::server::BufferBinding;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at what is under way.
const BUSY: Duration = Duration::from_millis(2);

/// Between two looks when nothing is.
const IDLE: Duration = Duration::from_millis(100);

/// How long a rank that leaves waits for what is still under way.
const PARTING: Duration = Duration::from_secs(5);

/// How long the GPU may take to stop what has been aborted.
const STOPPING: Duration = Duration::from_secs(10);

/// Operations under way, oldest first.
#[derive(Default)]
pub(super) struct Flights {
    pub(super) queue: VecDeque<Flight>,
    /// The last operation that is done, to speak of when nothing is under way.
    last: Option<CallSite>,
    /// The rank leaves.
    pub(super) closing: bool,
}

/// An operation under way.
pub(super) struct Flight {
    pub(super) site: CallSite,
    pub(super) record: RecordId,
    pub(super) issued: Instant,
    pub(super) progress: Arc<Progress>,
    /// Its memory: neither freed, nor used for something else, nor moved.
    pub(super) keep: [BufferBinding; 2],
}

/// How far an operation has come, known to whoever still has to do with it. In the end its marks go back to
/// the channel.
pub(super) struct Progress {
    pub(super) stage: Mutex<Stage>,
    channel: Weak<Channel>,
}

impl Progress {
    pub(super) fn new(channel: &Arc<Channel>) -> Progress {
        Progress { stage: Mutex::new(Stage::Queued), channel: Arc::downgrade(channel) }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let stage = std::mem::replace(&mut *lock(&self.stage), Stage::Queued);
        if let (Stage::Running(marks), Some(channel)) = (stage, self.channel.upgrade()) {
            lock(&channel.spare).push(marks);
        }
    }
}

pub(super) enum Stage {
    /// Given to CubeCL's thread.
    Queued,
    /// Queued on the GPU.
    Running(Marks),
    Failed(String),
}

/// Watches until the group fails or the rank leaves; then ends the communicator: in good order if the rank
/// leaves and all is done, or else at once.
pub(super) fn run(channel: &Channel) {
    if let Err(error) = channel.gpu.enter() {
        channel.group.abort(&error.to_string());
    }
    let mut leaving = None;
    let mut is_done = false;
    while look(channel) {
        let flights = lock(&channel.flights);
        if flights.closing {
            let since: Instant = *leaving.get_or_insert_with(Instant::now);
            is_done = flights.queue.is_empty();
            if is_done || since.elapsed() > PARTING {
                break;
            }
        }
        let (was_idle, was_closing) = (flights.queue.is_empty(), flights.closing);
        let pause = if was_idle { IDLE } else { BUSY };
        let is_news = |flights: &Flights| {
            was_idle && !flights.queue.is_empty() || flights.closing && !was_closing
        };
        drop(wait_until(&channel.changed, flights, pause, is_news));
    }
    let in_order = is_done && channel.finish(PARTING, || !has_failed(channel)).is_ok();
    if !in_order {
        channel.abort();
    }
    release(channel);
}

/// Whether the group is known to be of no more use.
fn has_failed(channel: &Channel) -> bool {
    let last = lock(&channel.flights).last.clone();
    last.is_some_and(|site| channel.group.cause(&site).is_some())
}

/// Looks once. False when the group is of no more use.
fn look(channel: &Channel) -> bool {
    let trouble = retire(channel).and_then(|()| match channel.state() {
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    });
    let oldest = {
        let flights = lock(&channel.flights);
        let oldest = flights.queue.front();
        oldest.map(|flight| (flight.site.clone(), flight.issued.elapsed())).or_else(|| {
            let last = flights.last.clone();
            last.map(|site| (site, Duration::ZERO))
        })
    };
    if let Some((site, _)) = &oldest
        && channel.group.cause(site).is_some()
    {
        return false;
    }
    if let Err(reason) = trouble {
        channel.group.abort(&format!("NCCL cannot go on: {reason}"));
        return false;
    }
    if let Some((site, waited)) = oldest
        && waited > channel.gpu.limit
    {
        let _ = channel.group.time_out(&site, waited);
        return false;
    }
    true
}

/// Lets go of the operations that are done.
fn retire(channel: &Channel) -> Result<(), String> {
    loop {
        let mut flights = lock(&channel.flights);
        let Some(flight) = flights.queue.front() else { return Ok(()) };
        match &*lock(&flight.progress.stage) {
            Stage::Queued => return Ok(()),
            Stage::Failed(reason) => return Err(reason.clone()),
            Stage::Running(marks) => {
                if !marks.done.has_passed().map_err(|error| format!("{error:?}"))? {
                    return Ok(());
                }
            }
        }
        if let Some(flight) = flights.queue.pop_front() {
            flights.last = Some(flight.site);
            drop(flights);
            channel.group.recorder().finished(flight.record);
        }
    }
}

/// Lets go of the memory of aborted operations, once the GPU has stopped. If it does not, the memory is
/// lost: something may still write to it.
fn release(channel: &Channel) {
    let flights = std::mem::take(&mut lock(&channel.flights).queue);
    if flights.is_empty() || has_stopped(channel) {
        return;
    }
    for flight in flights {
        std::mem::forget(flight.keep);
    }
}

/// Waits until the stream has nothing left to do.
fn has_stopped(channel: &Channel) -> bool {
    let until = Instant::now() + STOPPING;
    let Ok(end) = Event::new() else { return false };
    if end.mark(&channel.stream).is_err() {
        return false;
    }
    while Instant::now() < until {
        match end.has_passed() {
            Ok(true) => return true,
            Ok(false) => thread::sleep(BUSY),
            Err(_) => return false,
        }
    }
    false
}
