//! `kiln watch` on a real terminal: the terminal is restored however the program ends.
//!
//! The program under test is this one, started again with a pseudo-terminal as its standard streams.

use std::env;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kiln_observe::status::{Look, LookAt, State};
use kiln_observe::watch::{Theme, WatchError, WatchOptions, run};
use kiln_testkit::{PATIENCE, run_to_end, status_of, wait_until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

/// Variables that give the program under test its way of looking at the run, and the run's folder.
const HOW: &str = "KILN_WATCH_TEST";
const RUN: &str = "KILN_WATCH_TEST_RUN";

/// Escape sequences that enter and leave the alternate screen of the terminal.
const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?1049l";

fn healthy() -> Look {
    Look {
        run: "runs/a".into(),
        state: State::Healthy,
        text: "well-behaved".into(),
        culprits: Vec::new(),
        step: Some(3),
        steps: Some(10),
        saved: None,
        loss: None,
        tokens_per_s: None,
        deadline_s: None,
        ranks: Vec::new(),
        processes: Vec::new(),
    }
}

/// The program under test; does nothing if the variable is not set.
#[test]
fn program() {
    let Ok(how) = env::var(HOW) else { return };
    let look_at: LookAt = match how.as_str() {
        "panics" => Arc::new(|_| panic!("a bug in a look")),
        "hangs" => Arc::new(|_| {
            loop {
                thread::park();
            }
        }),
        _ => Arc::new(|_| Ok(healthy())),
    };
    let runs = vec![PathBuf::from(env::var(RUN).unwrap())];
    let theme = Theme { has_colours: true, has_unicode: true };
    match run(WatchOptions { runs, look_at, theme }) {
        Ok(()) => println!("left as it should be"),
        Err(WatchError::Panicked) => println!("left after a panic"),
        Err(error) => println!("refused: {error}"),
    }
}

fn this_program(how: &str, run: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "program", "--nocapture"]).env(HOW, how).env(RUN, run);
    command
}

/// The output of the terminal so far.
type Shown = Arc<(Mutex<String>, Condvar)>;

struct Terminal {
    master: File,
    /// The program's side of the terminal, to inspect its settings.
    slave: File,
    child: Child,
    shown: Shown,
    reader: JoinHandle<()>,
    is_over: Arc<AtomicBool>,
    _run: tempfile::TempDir,
}

impl Terminal {
    fn start(how: &str) -> Terminal {
        let run = tempfile::tempdir().unwrap();
        std::fs::write(run.path().join("metrics.jsonl"), "{\"step\":1,\"loss\":2.0}\n").unwrap();
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let slave = File::options().read(true).write(true).open(path).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).unwrap();
        let stdio = || Stdio::from(slave.try_clone().unwrap());
        let mut command = this_program(how, run.path().to_str().unwrap());
        let child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
        let shown = Shown::default();
        let master = File::from(master);
        let (mut from, to) = (master.try_clone().unwrap(), Arc::clone(&shown));
        let is_over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&is_over);
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            let patience = Timespec::try_from(Duration::from_millis(20)).unwrap();
            while !stop.load(Ordering::Relaxed) {
                if poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&patience)) != Ok(1) {
                    continue;
                }
                // The end is reported as an error: no one has the other side open any more.
                let Ok(count @ 1..) = from.read(&mut bytes) else { return };
                to.0.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
                to.1.notify_all();
            }
        });
        Terminal { master, slave, child, shown, reader, is_over, _run: run }
    }

    /// Waits until `text`, a single word, has been shown since the output was last cleared. Blanks may not be
    /// sent.
    fn wait_for(&self, text: &str) {
        let shown = self.shown.0.lock().unwrap();
        let (shown, timeout) =
            self.shown.1.wait_timeout_while(shown, PATIENCE, |shown| !shown.contains(text)).unwrap();
        assert!(!timeout.timed_out(), "{text:?} does not come: {shown:?}");
    }

    fn forget(&self) {
        self.shown.0.lock().unwrap().clear();
    }

    fn type_in(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until a signal has stopped it.
    fn wait_for_stop(&self) {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let id = || WaitId::Pid(Pid::from_child(&self.child));
        wait_until("its stop", || waitid(id(), options).unwrap().is_some());
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Returns true if keys reach the program one by one, without echo.
    fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    /// Waits for the end, and checks that the terminal is restored.
    fn end(mut self) -> (ExitStatus, String) {
        let status = status_of(&mut self.child);
        assert!(!self.is_raw());
        self.wait_for(LEAVE);
        self.wait_for("\x1b[?25h");
        let shown = self.shown.0.lock().unwrap().clone();
        (status, shown)
    }
}

#[test]
fn quitting_restores_the_terminal() {
    for keys in ["q", "\x03"] {
        let mut terminal = Terminal::start("healthy");
        terminal.wait_for(ENTER);
        terminal.wait_for("well-behaved");
        assert!(terminal.is_raw());
        terminal.type_in(keys);
        terminal.wait_for("left as it should be");
        assert!(terminal.end().0.success());
    }
}

#[test]
fn signals_restore_the_terminal() {
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let terminal = Terminal::start("healthy");
        terminal.wait_for("well-behaved");
        terminal.send(signal);
        let (status, _) = terminal.end();
        assert_eq!(status.signal(), Some(signal.as_raw()));
    }
}

#[test]
fn closed_terminal_ends_the_program() {
    let terminal = Terminal::start("healthy");
    terminal.wait_for("well-behaved");
    let Terminal { master, mut child, reader, is_over, .. } = terminal;
    // No one has its other side open then.
    is_over.store(true, Ordering::Relaxed);
    reader.join().unwrap();
    drop(master);
    // Ended by the signal, or because it can no longer draw.
    assert!(!status_of(&mut child).success());
}

#[test]
fn panic_restores_the_terminal() {
    let terminal = Terminal::start("panics");
    terminal.wait_for("left after a panic");
    let (_, shown) = terminal.end();
    let (left, told) = (shown.find(LEAVE).unwrap(), shown.find("a bug in a look").unwrap());
    assert!(left < told, "{shown:?}");
    // Nothing is drawn after that.
    assert!(!shown[told..].contains("kiln watch"), "{shown:?}");
}

#[test]
fn suspension_restores_the_terminal() {
    // With Ctrl-Z, and with a signal from elsewhere.
    for by_key in [true, false] {
        let mut terminal = Terminal::start("healthy");
        terminal.wait_for("well-behaved");
        terminal.forget();
        if by_key {
            terminal.type_in("\x1a")
        } else {
            terminal.send(Signal::TSTP)
        }
        terminal.wait_for_stop();
        terminal.wait_for(LEAVE);
        assert!(!terminal.is_raw());
        terminal.send(Signal::CONT);
        terminal.wait_for(ENTER);
        terminal.wait_for("well-behaved");
        assert!(terminal.is_raw());
        terminal.type_in("q");
        assert!(terminal.end().0.success());
    }
}

#[test]
fn screen_returns_after_sigstop() {
    let mut terminal = Terminal::start("healthy");
    terminal.wait_for("well-behaved");
    terminal.send(Signal::STOP);
    terminal.wait_for_stop();
    terminal.forget();
    terminal.send(Signal::CONT);
    // The whole screen is drawn again.
    terminal.wait_for(ENTER);
    terminal.wait_for("well-behaved");
    terminal.type_in("q");
    assert!(terminal.end().0.success());
}

#[test]
fn hung_run_does_not_block_keys() {
    let mut terminal = Terminal::start("hangs");
    terminal.wait_for("Overview");
    terminal.type_in("?");
    terminal.wait_for("Shift-Tab");
    terminal.type_in("q");
    assert!(terminal.end().0.success());
}

#[test]
fn new_size_is_used() {
    let mut terminal = Terminal::start("healthy");
    terminal.wait_for("well-behaved");
    tcsetwinsize(&terminal.master, Winsize { ws_row: 8, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    // The system notifies only the terminal's own session.
    terminal.send(Signal::WINCH);
    terminal.wait_for("small:");
    terminal.type_in("q");
    assert!(terminal.end().0.success());
}

#[test]
fn missing_terminal_is_an_error() {
    let output = run_to_end(&mut this_program("healthy", "runs/a"));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("refused: ") && said.contains("standard input is not one"), "{said}");
    assert!(said.contains("kiln status RUN") && said.contains("--http"), "{said}");
}
