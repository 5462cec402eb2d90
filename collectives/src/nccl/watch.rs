//! The thread that watches a communicator's operations: releases completed ones and aborts stuck ones.

use super::channel::{Channel, InFlight, Stage};
use super::cuda::Event;
use crate::sync::lock;
use std::thread;
use std::time::{Duration, Instant};

const BUSY: Duration = Duration::from_millis(2);

const IDLE: Duration = Duration::from_millis(100);

const PARTING: Duration = Duration::from_secs(5);

const STOPPING: Duration = Duration::from_secs(10);

/// Watches until the group fails or the rank leaves. Finalizes the communicator if the rank leaves and all operations
/// are done; otherwise aborts it.
pub(crate) fn run(channel: &Channel) {
    if let Err(error) = channel.gpu.enter() {
        channel.control.abort(&error.to_string());
    }
    let mut leaving = None;
    let mut is_done = false;
    while look(channel) {
        let in_flight = channel.in_flight.lock();
        if in_flight.closing {
            let since: Instant = *leaving.get_or_insert_with(Instant::now);
            is_done = in_flight.queue.is_empty();
            if is_done || since.elapsed() > PARTING {
                break;
            }
        }
        let (was_idle, was_closing) = (in_flight.queue.is_empty(), in_flight.closing);
        let pause = if was_idle { IDLE } else { BUSY };
        let is_news = |in_flight: &InFlight| {
            was_idle && !in_flight.queue.is_empty() || in_flight.closing && !was_closing
        };
        drop(channel.in_flight.wait_until(in_flight, pause, is_news));
    }
    let in_order = is_done && channel.finish(PARTING, || !has_failed(channel)).is_ok();
    if !in_order {
        channel.abort();
    }
    release(channel);
}

fn has_failed(channel: &Channel) -> bool {
    let last = channel.in_flight.lock().last.clone();
    last.is_some_and(|site| channel.control.cause(&site).is_some())
}

fn look(channel: &Channel) -> bool {
    let trouble = retire(channel).and_then(|()| channel.state().map_err(|error| error.to_string()));
    let oldest = {
        let in_flight = channel.in_flight.lock();
        let oldest = in_flight.queue.front();
        let holds = &channel.control.identity().shared.holds;
        let oldest = oldest.map(|operation| {
            let held = holds.total() - operation.held_before;
            (operation.site.clone(), operation.issued.elapsed().saturating_sub(held))
        });
        oldest.or_else(|| in_flight.last.clone().map(|site| (site, Duration::ZERO)))
    };
    if let Some((site, _)) = &oldest
        && channel.control.cause(site).is_some()
    {
        return false;
    }
    if let Err(reason) = trouble {
        channel.control.abort(&format!("NCCL cannot continue: {reason}"));
        return false;
    }
    if let Some((site, waited)) = oldest
        && waited > channel.gpu.limit
    {
        let _ = channel.control.time_out(&site, waited);
        return false;
    }
    true
}

fn retire(channel: &Channel) -> Result<(), String> {
    loop {
        let mut in_flight = channel.in_flight.lock();
        let Some(operation) = in_flight.queue.front() else { return Ok(()) };
        match &*lock(&operation.progress.stage) {
            Stage::Queued => return Ok(()),
            Stage::Failed(reason) => return Err(reason.clone()),
            Stage::Running(events) => {
                if !events.done.has_passed().map_err(|error| format!("{error:?}"))? {
                    return Ok(());
                }
            }
        }
        if let Some(operation) = in_flight.queue.pop_front() {
            *lock(&operation.progress.buffers) = None;
            in_flight.last = Some(operation.site);
            drop(in_flight);
            channel.control.identity().shared.recorder.finished(operation.record);
        }
    }
}

/// Waits until the GPU has stopped, then releases the memory of aborted operations. If the GPU does not stop, leaks the
/// memory, because an operation may still write to it.
fn release(channel: &Channel) {
    let in_flight = std::mem::take(&mut channel.in_flight.lock().queue);
    let is_safe = in_flight.is_empty() || has_stopped(channel);
    for operation in in_flight {
        let buffers = lock(&operation.progress.buffers).take();
        if !is_safe {
            std::mem::forget(buffers);
        }
    }
}

fn has_stopped(channel: &Channel) -> bool {
    let until = Instant::now() + STOPPING;
    let Ok(end) = Event::new() else { return false };
    if end.record_on(&channel.stream).is_err() {
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
