//! Waits in tests. Every wait has the deadline [`PATIENCE`]; when it passes, the test fails and shows the last known
//! state. Wait for a state that is reached whichever process or rank comes first.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The deadline of a wait: longer than anything in a test, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(600);

const LOOK: Duration = Duration::from_millis(5);

/// Calls `look` until it returns `Ok`, and returns the value. `what` describes the expected value; errors of `look`
/// describe the actual state.
///
/// # Panics
///
/// When [`PATIENCE`] passes, with the last state.
#[track_caller]
pub fn wait_for<T>(what: &str, look: impl FnMut() -> Result<T, String>) -> T {
    found_within(PATIENCE, what, look).unwrap_or_else(|problem| panic!("{problem}"))
}

/// Waits until `is_done` returns true.
///
/// # Panics
///
/// When [`PATIENCE`] passes.
#[track_caller]
pub fn wait_until(what: &str, mut is_done: impl FnMut() -> bool) {
    wait_for(what, || if is_done() { Ok(()) } else { Err("nothing of it".to_owned()) });
}

/// Waits for a message and returns it; `what` describes the message.
///
/// # Panics
///
/// When [`PATIENCE`] passes, or if the sender is gone.
#[track_caller]
pub fn receive<T>(what: &str, from: &Receiver<T>) -> T {
    from.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("waited in vain for {what}: {error}"))
}

fn found_within<T>(
    patience: Duration,
    what: &str,
    mut look: impl FnMut() -> Result<T, String>,
) -> Result<T, String> {
    let start = Instant::now();
    loop {
        match look() {
            Ok(found) => return Ok(found),
            Err(seen) if start.elapsed() >= patience => {
                return Err(format!("waited {patience:?} in vain for {what}; seen last: {seen}"));
            }
            Err(_) => thread::sleep(LOOK),
        }
    }
}

/// Runs `command` to its end with empty input, and returns its output.
///
/// # Panics
///
/// Like [`output_of`], or if the command cannot be started.
#[track_caller]
pub fn run_to_end(command: &mut Command) -> Output {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    output_of(child)
}

/// Waits until `child` ends, and returns the output from its pipes.
///
/// # Panics
///
/// When [`PATIENCE`] passes, with the output so far. Kills the child.
#[track_caller]
pub fn output_of(child: Child) -> Output {
    output_within(PATIENCE, child).unwrap_or_else(|problem| panic!("{problem}"))
}

/// Waits until `child` ends.
///
/// # Panics
///
/// When [`PATIENCE`] passes. Kills the child.
#[track_caller]
pub fn status_of(child: &mut Child) -> ExitStatus {
    status_within(PATIENCE, child).unwrap_or_else(|problem| panic!("{problem}"))
}

fn status_within(patience: Duration, child: &mut Child) -> Result<ExitStatus, String> {
    let id = child.id();
    let ended = found_within(patience, &format!("the end of process {id}"), || {
        child.try_wait().expect("its state").ok_or_else(|| "it runs".to_owned())
    });
    ended.inspect_err(|_| _ = child.kill())
}

fn output_within(patience: Duration, mut child: Child) -> Result<Output, String> {
    let start = Instant::now();
    drop(child.stdin.take());
    let streams = [child.stdout.take().map(Collected::of), child.stderr.take().map(Collected::of)];
    let left = || patience.saturating_sub(start.elapsed());
    let are_read = streams.iter().flatten().all(|stream| stream.ends_within(left()));
    let status = match are_read {
        true => status_within(left(), &mut child),
        false => Err(format!("waited {patience:?} in vain for the end of process {}", child.id())),
    };
    let [stdout, stderr] = streams.map(|stream| stream.map(|stream| stream.bytes()).unwrap_or_default());
    match status {
        Ok(status) => Ok(Output { status, stdout, stderr }),
        Err(problem) => {
            let _ = child.kill();
            let _ = child.wait();
            let [stdout, stderr] = [stdout, stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
            Err(format!("{problem}; its output:\n{stdout}\nits errors:\n{stderr}"))
        }
    }
}

struct Collected {
    bytes: Arc<Mutex<Vec<u8>>>,
    end: Receiver<()>,
}

impl Collected {
    fn of(mut source: impl Read + Send + 'static) -> Self {
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let (into, (at_end, end)) = (Arc::clone(&bytes), mpsc::channel());
        thread::spawn(move || {
            let mut part = [0; 1 << 16];
            while let Ok(count @ 1..) = source.read(&mut part) {
                into.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&part[..count]);
            }
            drop(at_end);
        });
        Collected { bytes, end }
    }

    fn ends_within(&self, patience: Duration) -> bool {
        self.end.recv_timeout(patience) == Err(RecvTimeoutError::Disconnected)
    }

    fn bytes(&self) -> Vec<u8> {
        std::mem::take(&mut self.bytes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A point where threads wait for each other, but unlike at a [`Barrier`](std::sync::Barrier), not forever.
pub struct Meeting {
    size: usize,
    arrivals: AtomicUsize,
}

impl Meeting {
    /// Creates a meeting of `size` threads.
    pub fn of(size: usize) -> Self {
        Meeting { size, arrivals: AtomicUsize::new(0) }
    }

    /// Waits until all threads have arrived. Every thread may call it several times.
    ///
    /// # Panics
    ///
    /// When [`PATIENCE`] passes.
    #[track_caller]
    pub fn wait(&self) {
        let before = self.arrivals.fetch_add(1, Ordering::AcqRel);
        let all = (before / self.size + 1) * self.size;
        wait_for(&format!("{} threads", self.size), || match self.arrivals.load(Ordering::Acquire) {
            arrived if arrived >= all => Ok(()),
            arrived => Err(format!("{} of them", arrived + self.size - all)),
        });
    }
}

/// The lines that a process writes, received one after another.
pub struct Said {
    lines: Receiver<String>,
    all: String,
}

impl Said {
    /// Reads the lines of `source` in a thread.
    pub fn of(source: impl Read + Send + 'static) -> Self {
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let mut source = BufReader::new(source);
            let mut line = Vec::new();
            while let Ok(1..) = source.read_until(b'\n', &mut line) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
                line.clear();
            }
        });
        Said { lines, all: String::new() }
    }

    /// Returns the next line with its line end; `None` after the last line.
    ///
    /// # Panics
    ///
    /// When [`PATIENCE`] passes, with the lines received so far.
    #[track_caller]
    pub fn next_line(&mut self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => {
                self.all.push_str(&line);
                Some(line)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                panic!("waited {PATIENCE:?} in vain for a line after:\n{}", self.all)
            }
        }
    }

    /// Waits for a line that contains `text`, and returns it.
    ///
    /// # Panics
    ///
    /// When [`PATIENCE`] passes or there are no more lines, with the lines received so far.
    #[track_caller]
    pub fn expect(&mut self, text: &str) -> String {
        loop {
            match self.next_line() {
                Some(line) if line.contains(text) => return line,
                Some(_) => {}
                None => panic!("{text:?} was not said:\n{}", self.all),
            }
        }
    }

    /// Waits until the output ends, and returns all lines from the first one on.
    ///
    /// # Panics
    ///
    /// When [`PATIENCE`] passes without another line.
    #[track_caller]
    pub fn all(mut self) -> String {
        while self.next_line().is_some() {}
        self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a shell")
    }

    const SHORT: Duration = Duration::from_millis(200);

    #[test]
    fn a_wait_in_vain_says_what_was_seen() {
        let mut looks = 0;
        let seen = found_within(SHORT, "the sun", || {
            looks += 1;
            Err::<(), _>(format!("cloud {looks}"))
        });
        assert_eq!(seen, Err(format!("waited {SHORT:?} in vain for the sun; seen last: cloud {looks}")));
        assert_eq!(found_within(SHORT, "it", || Ok(7)), Ok(7));
    }

    #[test]
    fn a_process_that_does_not_end_is_killed_and_its_words_are_shown() {
        let child = shell("echo here; echo there >&2; exec sleep 1000");
        let id = child.id();
        let problem = output_within(SHORT, child).expect_err("no end");
        for part in ["in vain for the end of process", "here", "there"] {
            assert!(problem.contains(part), "{problem}");
        }
        assert!(!std::path::Path::new(&format!("/proc/{id}")).exists());
        assert!(output_within(SHORT, shell("exec sleep 1000 > /dev/null 2>&1")).is_err());
        let output = output_of(shell("echo here; echo there >&2; exit 3"));
        assert_eq!(
            (output.status.code(), &output.stdout[..], &output.stderr[..]),
            (Some(3), &b"here\n"[..], &b"there\n"[..])
        );
    }

    #[test]
    fn threads_meet_again_and_again() {
        let (meeting, rounds) = (Meeting::of(3), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for round in 1..=4 {
                        rounds.fetch_add(1, Ordering::SeqCst);
                        meeting.wait();
                        assert!(rounds.load(Ordering::SeqCst) >= 3 * round);
                    }
                });
            }
        });
    }

    #[test]
    fn lines_are_waited_for_one_by_one() {
        let mut child = shell("echo one; echo two; echo three");
        let mut said = Said::of(child.stdout.take().expect("its output"));
        assert_eq!(said.expect("tw"), "two\n");
        assert_eq!(said.all(), "one\ntwo\nthree\n");
        assert!(status_of(&mut child).success());
    }
}
