//! Information from the kernel about processes that do not answer.

use std::fs;

use super::message::Thread;

/// State of a process on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// Running or sleeping.
    Running,
    /// Stopped by a signal or a debugger.
    Stopped,
    /// In an uninterruptible wait, for example for a disk.
    Stuck,
    /// No such process.
    Gone,
}

fn state_in(stat: &str) -> Option<char> {
    // The process name in brackets may contain anything.
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Returns the state of process `pid` on this machine.
pub fn state_of(pid: i32) -> ProcessState {
    match state_in(&fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default()) {
        None | Some('Z' | 'X' | 'x') => ProcessState::Gone,
        Some('T' | 't') => ProcessState::Stopped,
        Some('D') => ProcessState::Stuck,
        Some(_) => ProcessState::Running,
    }
}

/// Returns the threads of process `pid` according to the kernel.
pub fn threads_of(pid: i32) -> Vec<Thread> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut ids: Vec<i32> = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect();
    ids.sort_unstable();
    let thread = |id: i32| {
        let read = |file: &str| {
            let text = fs::read_to_string(format!("/proc/{pid}/task/{id}/{file}")).unwrap_or_default();
            text.trim().to_owned()
        };
        let mut calls = vec![format!("state {}", state_in(&read("stat")).unwrap_or('?'))];
        // Ordinary users often cannot read these files.
        let (place, call) = (read("wchan"), read("syscall"));
        if !place.is_empty() && place != "0" {
            calls.push(format!("in {place}"));
        }
        let number = call.split_whitespace().next().filter(|number| *number != "running");
        calls.extend(number.map(|number| format!("system call {number}")));
        let problem = Some("its process does not answer; the kernel reports this".to_owned());
        Thread { id, name: read("comm"), calls, addresses: Vec::new(), problem }
    };
    ids.into_iter().map(thread).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::thread::sleep;
    use std::time::{Duration, Instant};

    use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

    use super::*;

    /// Waits until the process was seen in `state` once: the kernel may read its program from the disk ("D") at any
    /// moment, again and again.
    fn wait_for(pid: i32, state: ProcessState) {
        let start = Instant::now();
        loop {
            let seen = state_of(pid);
            if seen == state {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "wanted {state:?}, but it is still {seen:?}");
            sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn process_states_are_recognised() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id().cast_signed();
        wait_for(pid, ProcessState::Running);
        let id = Pid::from_raw(pid).unwrap();
        kill_process(id, Signal::STOP).unwrap();
        waitid(WaitId::Pid(id), WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT).unwrap();
        wait_for(pid, ProcessState::Stopped);
        let [thread] = &threads_of(pid)[..] else { panic!("one thread") };
        assert_eq!((thread.name.as_str(), thread.calls[0].as_str()), ("sleep", "state T"));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(state_of(pid), ProcessState::Gone);
    }
}
