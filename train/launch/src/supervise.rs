//! One life of a node's ranks: starts them, forwards signals, ends the others when one fails, and waits for the last.

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

/// Time for the other ranks to end by themselves after a failure: they exchange information and report the cause.
const SETTLE: Duration = Duration::from_secs(5);

/// Time after SIGTERM that follows. Without the failed rank there is nothing left to save.
const GRACE_AFTER_FAILURE: Duration = Duration::from_secs(2);

pub(super) struct Signals {
    events: Sender<Event>,
    receiver: Receiver<Event>,
    handle: iterator::Handle,
}

impl Signals {
    pub(super) fn register() -> Result<Signals, LaunchError> {
        // Signals that `nohup` or a shell ignores on purpose stay ignored.
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

    pub(super) fn pause(&self, time: Duration) -> Option<i32> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.receiver.recv_timeout(left) {
                Ok(Event::Signal(signal)) => return Some(signal),
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

enum Next {
    /// The job is running.
    Run,
    /// Send SIGTERM at this time: a rank has failed or will not arrive.
    Terminate(Instant),
    /// Send SIGKILL at `at`, which is `grace` after SIGTERM.
    Kill { at: Instant, grace: Duration },
    /// Nothing more can be done.
    Wait,
}

pub(super) struct Life<'a> {
    pub(super) job: &'a Job,
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [OsString],
    pub(super) log_dir: &'a Path,
}

impl Life<'_> {
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
                            // The others would wait forever for the stopped rank.
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

    fn signal(&self, signal: i32, children: &mut [Child], ends: &mut Ends, next: Next) -> Next {
        if kiln_sys::PREEMPTIONS.contains(&signal) {
            ends.preempted = true;
            // Every rank handles SIGUSR1, whichever signal the launcher received.
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

/// Kills the remaining ranks if all are stopped: after a failure, waiting for them is pointless.
fn kill_stopped(children: &mut [Child], next: Next) -> Next {
    if children.iter().any(|child| child.exists() && !child.is_stopped()) {
        return next;
    }
    let why = "its process was stopped, and all others have ended";
    children.iter_mut().for_each(|child| child.kill(why));
    Next::Wait
}

fn wait(events: &Receiver<Event>, next: &Next) -> Option<Event> {
    let due = match next {
        Next::Terminate(at) | Next::Kill { at, .. } => at.saturating_duration_since(Instant::now()),
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
        assert_eq!(signals.pause(Duration::from_secs(3600)), Some(SIGTERM));
        assert_eq!(signals.pause(Duration::ZERO), None);
    }
}
