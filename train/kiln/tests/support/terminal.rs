//! A program on a terminal, as a user sees it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Instant;

use kiln_testkit::{PATIENCE, status_of};
use rustix::process::{ioctl_tiocsctty, setsid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// A program on a terminal of its own.
pub struct Terminal {
    child: Child,
    keys: File,
    screen: Receiver<Vec<u8>>,
    /// Received text that no call of `expect` has consumed.
    unread: String,
    /// All received text.
    all: String,
}

impl Terminal {
    /// Starts `command` on a new terminal, as the leader of a session.
    pub fn start(command: &mut Command) -> Terminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&master).expect("a terminal");
        unlockpt(&master).expect("a terminal");
        let name = ptsname(&master, Vec::new()).expect("its name").into_string().expect("text");
        let end = || File::options().read(true).write(true).open(&name).expect("its other end");
        let controlling = end();
        let lead = move || {
            setsid()?;
            ioctl_tiocsctty(&controlling)?;
            Ok(())
        };
        command.stdin(Stdio::from(end())).stdout(Stdio::from(end())).stderr(Stdio::from(end()));
        // SAFETY: two system calls, between fork and exec, which neither lock nor allocate.
        unsafe { command.pre_exec(lead) };
        let child = command.env("TERM", "xterm").spawn().expect("the program starts");
        let keys = File::from(master);
        let mut output = keys.try_clone().expect("a copy");
        let (sender, screen) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal { child, keys, screen, unread: String::new(), all: String::new() }
    }

    /// Waits for `text`. Returns the unconsumed text before it.
    pub fn expect(&mut self, text: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.unread.find(text) {
                let rest = self.unread.split_off(at + text.len());
                return std::mem::replace(&mut self.unread, rest);
            }
            let left = until.saturating_duration_since(Instant::now());
            let Ok(bytes) = self.screen.recv_timeout(left) else {
                panic!("{text:?} did not come; on the screen:\n{}", self.all);
            };
            let bytes = String::from_utf8_lossy(&bytes).into_owned();
            self.all.push_str(&bytes);
            self.unread.push_str(&bytes);
        }
    }

    /// Types a line, or a key with an immediate effect, such as Ctrl-C.
    pub fn enter(&mut self, line: &str) {
        let end = if line.ends_with(char::is_control) { "" } else { "\r" };
        self.keys.write_all(format!("{line}{end}").as_bytes()).expect("it is read");
    }

    /// Waits for the end of the program. Returns how it ended, and all its output.
    pub fn end(mut self) -> (ExitStatus, String) {
        // The output ends when no process keeps the terminal open.
        loop {
            match self.screen.recv_timeout(PATIENCE) {
                Ok(bytes) => self.all.push_str(&String::from_utf8_lossy(&bytes)),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("it does not end; on the screen:\n{}", self.all),
            }
        }
        (status_of(&mut self.child), std::mem::take(&mut self.all))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}
