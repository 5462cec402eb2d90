//! Runs one life of all ranks of a node: starts them, waits until the last one has ended, forwards signals,
//! and ends the other ranks when one fails.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator;

use super::child::End;
use super::child::{Child, Event, Job};
use super::ends::Ends;
use super::{LaunchError, print, signal_name};

/// How long the other ranks get to end by themselves when a rank has failed: they notice the failure,
/// exchange information, and report the cause.
const SETTLE: Duration = Duration::from_secs(5);

/// How long they then get after SIGTERM. Without the failed rank there is nothing left to save, and ranks
/// that could end by themselves have done so.
const GRACE_AFTER_FAILURE: Duration = Duration::from_secs(2);

/// Receives the signals sent to the launcher, until this is dropped.
pub(super) struct Signals {
    events: Sender<Event>,
    receiver: Receiver<Event>,
    handle: iterator::Handle,
}

impl Signals {
    pub(super) fn register() -> Result<Signals, LaunchError> {
        // Signals that `nohup` or a shell ignores on purpose, as for background processes, stay ignored.
        let heard = [SIGTERM, SIGINT, SIGHUP, SIGQUIT].into_iter().chain(kiln_sys::PREEMPTIONS);
        let heard = heard.filter(|signal| !kiln_sys::is_ignored(*signal));
        let mut signals = iterator::Signals::new(heard).map_err(LaunchError::system("watch for signals"))?;
        let handle = signals.handle();
        let (events, receiver) = mpsc::channel();
        let sender = events.clone();
        let forward = move || {
            for signal in signals.forever() {
                if sender.send(Event::Signal(signal)).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new()
            .name("kiln-signals".to_owned())
            .spawn(forward)
            .map_err(LaunchError::system("start a thread"))?;
        Ok(Signals { events, receiver, handle })
    }

    /// Waits for `time` while no rank runs. Returns the signal that ended the wait, if one did; the launcher
    /// then ends.
    pub(super) fn pause(&self, time: Duration) -> Option<i32> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.receiver.recv_timeout(left) {
                Ok(Event::Signal(signal)) => return Some(signal),
                // An event of a rank that has been reaped.
                Ok(Event::Ended { .. }) => {}
                Err(_) => return None,
            }
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.handle.close();
    }
}

/// The next action against ranks that do not end by themselves.
enum Next {
    /// Nothing: the job is running.
    Run,
    /// Send SIGTERM at the given time: a rank has failed, or will not arrive.
    Terminate(Instant),
    /// Send SIGKILL at the time `at`, which is `grace` after SIGTERM was sent.
    Kill { at: Instant, grace: Duration },
    /// Wait: nothing more can be done.
    Wait,
}

/// One life of a node's ranks, from their start to their end.
pub(super) struct Life<'a> {
    pub(super) job: &'a Job,
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [OsString],
    pub(super) log_dir: &'a Path,
}

impl Life<'_> {
    /// Starts the ranks; returns when all have ended.
    pub(super) fn run(&self, signals: &Signals) -> Result<Ends, LaunchError> {
        let mut ends = Ends::default();
        let mut children = Vec::new();
        for index in 0..self.job.node.nproc_per_node {
            children.push(Child::start(
                self.job,
                index,
                self.program,
                self.arguments,
                self.log_dir,
                signals.events.clone(),
            )?);
        }
        let mut next = Next::Run;
        while children.iter().any(Child::exists) {
            match wait(&signals.receiver, &next) {
                Some(Event::Ended { index, at }) => {
                    let end = children[index].reap(at)?;
                    if matches!(next, Next::Run) && (end.was_stopped() || end.failed()) {
                        if end.was_stopped() {
                            // Without that rank, the others would wait forever.
                            children.iter_mut().for_each(Child::stop);
                        }
                        next = Next::Terminate(Instant::now() + SETTLE);
                    }
                    ends.ranks.push(end);
                    if !matches!(next, Next::Run) && ends.ranks.iter().any(End::failed) {
                        next = kill_stopped(&mut children, next);
                    }
                }
                Some(Event::Signal(signal)) => {
                    next = self.signal(signal, &mut children, &mut ends, next);
                }
                None => next = self.deadline(&mut children, next),
            }
        }
        ends.ranks.sort_by_key(|end| end.at);
        let node = &self.job.node;
        let absent = ends.ranks.iter().flat_map(End::absent);
        let absent = absent.map(|rank| rank / node.nproc_per_node);
        let absent: BTreeSet<_> = absent.filter(|other| *other != node.node_rank).collect();
        ends.absent = absent.into_iter().collect();
        Ok(ends)
    }

    /// Forwards a signal to the ranks.
    fn signal(&self, signal: i32, children: &mut [Child], ends: &mut Ends, next: Next) -> Next {
        if kiln_sys::PREEMPTIONS.contains(&signal) {
            ends.preempted = true;
            // Every rank handles this signal, whichever one the launcher received.
            children.iter().for_each(|child| child.notify(Signal::USR1));
            return next;
        }
        let again = ends.signal.is_some() && signal == SIGINT;
        if again {
            print("interrupted again: ending the ranks at once");
            let why = "it was interrupted a second time";
            children.iter_mut().for_each(|child| child.kill(why));
            return Next::Wait;
        }
        if ends.signal.is_some() {
            return next;
        }
        ends.signal = Some(signal);
        print(&format!(
            "{}: the ranks have {} s to save and end",
            signal_name(signal),
            self.job.grace.as_secs_f64()
        ));
        children.iter_mut().for_each(Child::end);
        Next::Kill { at: Instant::now() + self.job.grace, grace: self.job.grace }
    }

    /// Takes the action whose time has come.
    fn deadline(&self, children: &mut [Child], next: Next) -> Next {
        match next {
            Next::Terminate(_) => {
                children.iter_mut().for_each(Child::end);
                let grace = self.job.grace.min(GRACE_AFTER_FAILURE);
                Next::Kill { at: Instant::now() + grace, grace }
            }
            Next::Kill { grace, .. } => {
                let why = format!("it had not ended {} s after SIGTERM", grace.as_secs_f64());
                children.iter_mut().for_each(|child| child.kill(&why));
                Next::Wait
            }
            other => other,
        }
    }
}

/// Kills the remaining ranks if all are stopped. Once a rank has failed, waiting for stopped ranks is
/// pointless.
fn kill_stopped(children: &mut [Child], next: Next) -> Next {
    if children.iter().any(|child| child.exists() && !child.is_stopped()) {
        return next;
    }
    let why = "its process was stopped, and all others have ended";
    children.iter_mut().for_each(|child| child.kill(why));
    Next::Wait
}

/// Returns the next event, or `None` when the time for an action has come.
fn wait(events: &Receiver<Event>, next: &Next) -> Option<Event> {
    let due = match next {
        Next::Terminate(at) | Next::Kill { at, .. } => at.saturating_duration_since(Instant::now()),
        // `Signals` holds a sender, so this ends with an event.
        Next::Run | Next::Wait => return events.recv().ok(),
    };
    events.recv_timeout(due).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_signals_end_a_pause() {
        let signals = Signals::register().unwrap();
        let sender = signals.events.clone();
        sender.send(Event::Ended { index: 0, at: Instant::now() }).unwrap();
        sender.send(Event::Signal(SIGTERM)).unwrap();
        // Returns long before the hour.
        assert_eq!(signals.pause(Duration::from_secs(3600)), Some(SIGTERM));
        assert_eq!(signals.pause(Duration::ZERO), None);
    }
}
