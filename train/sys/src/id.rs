//! Identities of processes that stay unique when the kernel reuses process ids.

use std::fs;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// A process, with an identity that is unique across machines and time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Host name.
    pub host: String,
    boot: String,
    /// Process id.
    pub pid: i32,
    started: u64,
}

impl ProcessId {
    /// Returns this process.
    pub fn this() -> Self {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        Self::here(pid, started(pid).unwrap_or_default())
    }

    /// Returns the parent of this process; `None` if the system does not report one.
    pub fn parent() -> Option<Self> {
        let pid = rustix::process::getppid()?.as_raw_nonzero().get();
        let parent = Self::here(pid, started(pid)?);
        (!parent.boot.is_empty()).then_some(parent)
    }

    fn here(pid: i32, started: u64) -> Self {
        ProcessId { host: host(), boot: boot().to_owned(), pid, started }
    }

    /// Returns whether both processes run under the same kernel, which manages their file locks.
    pub fn shares_kernel_with(&self, other: &ProcessId) -> bool {
        !self.boot.is_empty() && self.boot == other.boot
    }

    /// Returns a short name of the process's kernel, for file names.
    pub fn kernel(&self) -> String {
        format!("{:.8}", format!("{:x}", Sha256::digest(&self.boot)))
    }

    /// Returns whether the process has ended; `None` if it runs on another machine or in another container.
    pub fn is_gone(&self) -> Option<bool> {
        let is_here = !self.boot.is_empty() && self.boot == boot() && self.host == host();
        is_here.then(|| started(self.pid) != Some(self.started))
    }
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn boot() -> &'static str {
    static BOOT: LazyLock<String> = LazyLock::new(|| {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        boot.trim().to_owned()
    });
    &BOOT
}

/// Start time of a process in clock ticks since boot; `None` if the process is missing or a zombie.
fn started(pid: i32) -> Option<u64> {
    let fields = stat_of(pid)?;
    // Field 3 of the line, the state, has index 0 here. Field 22 is the start time.
    let ticks = fields.get(22 - 3)?.parse().ok()?;
    (fields[0] != "Z" && fields[0] != "X").then_some(ticks)
}

/// Returns the fields of `/proc/PID/stat` from the state letter on.
pub(super) fn stat_of(pid: i32) -> Option<Vec<String>> {
    // The name before the state, in brackets, may contain anything.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use kiln_testkit::{status_of, wait_until};

    use super::*;

    #[test]
    fn a_reused_number_is_another_process() {
        let this = ProcessId::this();
        assert_eq!(this, ProcessId::this());
        assert_eq!(this.is_gone(), Some(false));
        assert_ne!(ProcessId::parent(), Some(this.clone()));
        let later = ProcessId { started: this.started + 1, ..this.clone() };
        assert_eq!(later.is_gone(), Some(true));
        for elsewhere in [
            ProcessId { host: "other".to_owned(), ..this.clone() },
            ProcessId { boot: "other".to_owned(), ..this.clone() },
            ProcessId { boot: String::new(), ..this.clone() },
        ] {
            assert_eq!(elsewhere.is_gone(), None);
        }
    }

    #[test]
    fn a_zombie_is_gone() {
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", "read line"]).stdin(std::process::Stdio::piped());
        let mut child = shell.spawn().unwrap();
        let pid = child.id().cast_signed();
        let process = ProcessId::here(pid, started(pid).expect("it runs"));
        assert_eq!(process.is_gone(), Some(false));
        drop(child.stdin.take());
        wait_until("the end of the shell", || process.is_gone() != Some(false));
        status_of(&mut child);
    }
}
