//! The output of ranks: a log file per rank, restart and stream. Rank 0's output also goes to the console.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use kiln_sys::{is_detail, output};

use super::LaunchError;

/// Name of the folder of logs in a run folder.
pub const LOGS: &str = "logs";

/// Number of bytes at the end of a log that are searched for the last lines.
const TAIL_BYTES: u64 = 16 * 1024;

/// Number of lines of a failed rank's stderr that are shown.
const TAIL_LINES: usize = 20;

/// Maximum number of characters shown of each of these lines.
const LINE: usize = 500;

/// Number of bytes after which a line that is not yet recognised as a log detail is shown.
const BEGIN: usize = 512;

/// How long the launcher waits for the last output of a rank that has ended.
pub(super) const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// Returns whether `path` is a folder that contains only a launcher's logs.
pub fn is_log_folder(path: &Path) -> bool {
    let is_log = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        let mut parts = name.strip_prefix("rank_")?.strip_suffix(".log")?.split('.');
        parts.next()?.parse::<usize>().ok()?;
        parts.next()?.strip_prefix("restart_")?.parse::<u64>().ok()?;
        Some(matches!((parts.next(), parts.next()), (Some("stdout" | "stderr"), None)))
    };
    let is_named = path.file_name().is_some_and(|name| name == LOGS);
    let Ok(mut entries) = fs::read_dir(path) else { return false };
    is_named && entries.all(|entry| is_log(entry) == Some(true))
}

/// Chooses the folder of this launch's logs: `wanted`, or, if a running launch writes there, the first of
/// `other`, `other-2`, … that no running launch uses. Otherwise logs of the same rank and restart would be
/// mixed. The returned file reserves the folder while it is open.
pub(super) fn claim(
    wanted: &Path,
    other: &Path,
    rank: usize,
    restart: u64,
) -> Result<(PathBuf, Option<File>), LaunchError> {
    let mut folder = wanted.to_owned();
    let mut number = 1;
    loop {
        // Any log of this launcher will do, because launchers of other nodes have other ranks.
        let Log { file, .. } = Log::open(&folder, rank, restart, Stream::Stdout)?;
        match file.try_lock() {
            Ok(()) => return Ok((folder, Some(file))),
            // The file system does not support locks.
            Err(TryLockError::Error(_)) => return Ok((folder, None)),
            Err(TryLockError::WouldBlock) => {}
        }
        folder = match number {
            1 => other.to_owned(),
            number => {
                let mut name = other.as_os_str().to_owned();
                name.push(format!("-{number}"));
                name.into()
            }
        };
        number += 1;
    }
}

/// An output stream of a rank.
pub(super) type Stream = output::Console;

/// A log file, and the position in it at which the rank started to write.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) path: PathBuf,
    file: File,
    start: u64,
}

impl Log {
    /// Opens `<folder>/rank_<rank>.restart_<restart>.<stdout|stderr>.log` for appending, so that lines of an
    /// earlier job in the same folder are kept.
    pub(super) fn open(folder: &Path, rank: usize, restart: u64, stream: Stream) -> Result<Log, LaunchError> {
        let name = match stream {
            Stream::Stdout => "stdout",
            Stream::Stderr => "stderr",
        };
        let path = folder.join(format!("rank_{rank}.restart_{restart}.{name}.log"));
        let open = || {
            fs::create_dir_all(folder)?;
            let file = OpenOptions::new().create(true).append(true).open(&path)?;
            let start = file.metadata()?.len();
            Ok((file, start))
        };
        match open() {
            Ok((file, start)) => Ok(Log { path, file, start }),
            Err(source) => Err(LaunchError::Log { path, source }),
        }
    }

    /// Returns a log that discards everything.
    pub(super) fn nowhere() -> Result<Log, LaunchError> {
        let path = PathBuf::from("/dev/null");
        match OpenOptions::new().append(true).open(&path) {
            Ok(file) => Ok(Log { path, file, start: 0 }),
            Err(source) => Err(LaunchError::Log { path, source }),
        }
    }

    /// Returns the file, for a child to write to directly, so that nothing is lost if the launcher dies.
    pub(super) fn for_child(&self) -> Result<File, LaunchError> {
        let error = |source| LaunchError::Log { path: self.path.clone(), source };
        self.file.try_clone().map_err(error)
    }

    /// Copies the output of `pipe` to the file and the console until the pipe is closed. On standard error,
    /// the console gets no log lines below `warn`.
    pub(super) fn copy(
        &self,
        mut pipe: impl Read + Send + 'static,
        mut stream: Stream,
    ) -> Result<Copying, LaunchError> {
        let mut file = self.for_child()?;
        let (done, finished) = mpsc::channel();
        let copy = move || {
            let mut buffer = vec![0; 64 * 1024];
            let mut lost = 0;
            let mut quiet = matches!(stream, Stream::Stderr).then(Quiet::default);
            loop {
                let read = match pipe.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(read) => read,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                    Err(_) => break,
                };
                // A full disk or a closed console must not stop the rank.
                if file.write_all(&buffer[..read]).is_err() {
                    lost += read;
                }
                let _ = match &mut quiet {
                    Some(quiet) => stream.write_all(&quiet.shown(&buffer[..read])),
                    None => stream.write_all(&buffer[..read]),
                };
            }
            if let Some(quiet) = quiet {
                let _ = stream.write_all(&quiet.rest());
            }
            let _ = done.send(lost);
        };
        thread::Builder::new()
            .name("kiln-log".to_owned())
            .spawn(copy)
            .map_err(LaunchError::system("start a thread"))?;
        Ok(Copying(finished))
    }

    /// Returns the last lines that were written to the log since it was opened.
    pub(super) fn tail(&self) -> Vec<String> {
        let mut bytes = Vec::new();
        let read = |bytes: &mut Vec<u8>| {
            let mut file = File::open(&self.path)?;
            let found = file.metadata()?;
            if found.is_file() {
                let start = self.start.max(found.len().saturating_sub(TAIL_BYTES));
                file.seek(SeekFrom::Start(start))?;
                file.take(TAIL_BYTES).read_to_end(bytes)?;
            }
            Ok::<_, std::io::Error>(())
        };
        // If reading fails, the report only lacks these lines.
        let _ = read(&mut bytes);
        let text = String::from_utf8_lossy(&bytes);
        // A progress bar that redraws itself is one line with many carriage returns.
        let lines = text.lines().map(|line| line.rsplit('\r').next().unwrap_or(line));
        let lines: Vec<_> = lines.filter(|line| !line.trim().is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        last.iter().map(|line| line.chars().take(LINE).collect()).collect()
    }
}

/// A copy in progress, which sends the number of bytes that could not be written to the log when it ends.
#[derive(Debug)]
pub(super) struct Copying(Receiver<usize>);

impl Copying {
    /// Waits until everything is copied, or until `deadline`, because a process that the rank has left behind
    /// may keep the pipe open. Returns the number of bytes known to be lost.
    pub(super) fn finish(self, deadline: Instant) -> usize {
        let left = deadline.saturating_duration_since(Instant::now());
        self.0.recv_timeout(left).unwrap_or_default()
    }
}

/// Filters a rank's log for a terminal: omits lines below `warn`, which are in the rank's log file. The
/// output may arrive in pieces.
#[derive(Debug, Default)]
struct Quiet {
    /// The beginning of a line for which it is not yet known whether to show it.
    begin: Vec<u8>,
    /// `Some(true)` if the current line is shown; `None` while that is unknown.
    is_shown: Option<bool>,
}

impl Quiet {
    /// Returns the part of `bytes`, the next piece of output, that should be shown.
    fn shown(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut shown = Vec::with_capacity(bytes.len());
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let is_whole = piece.ends_with(b"\n");
            if self.is_shown.is_none() {
                self.begin.extend(piece);
                let is_detail = is_detail(&self.begin);
                // A prompt or a progress bar must not wait for the end of its line.
                let may_be_one = self.begin.len() < BEGIN && matches!(self.begin[0], b'0'..=b'9' | b' ');
                if !is_whole && !is_detail && may_be_one {
                    continue;
                }
                let begin = std::mem::take(&mut self.begin);
                self.is_shown = Some(!is_detail);
                if !is_detail {
                    shown.extend(begin);
                }
            } else if self.is_shown == Some(true) {
                shown.extend(piece);
            }
            if is_whole {
                self.is_shown = None;
            }
        }
        shown
    }

    /// Returns the beginning of an unfinished line at the end of the output.
    fn rest(self) -> Vec<u8> {
        self.begin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "2026-11-24T18:03:59.042Z host=n rank=0 step=3 phase=- module=- DEBUG kiln::run: a step\n\
                        step 3 of 5\n INFO device: CPU\n\
                        2026-11-24T18:03:59.043Z host=n rank=0 step=3 phase=- module=- WARN kiln::run: slow\n\
                        \n bar";
    const SHOWN: &str = "step 3 of 5\n\
                         2026-11-24T18:03:59.043Z host=n rank=0 step=3 phase=- module=- WARN kiln::run: slow\n\
                         \n bar";

    #[test]
    fn details_are_omitted_in_any_split() {
        for size in [1, 2, 7, 60, 61, 64, 1000] {
            let mut quiet = Quiet::default();
            let mut shown: Vec<u8> =
                TEXT.as_bytes().chunks(size).flat_map(|part| quiet.shown(part)).collect();
            shown.extend(quiet.rest());
            assert_eq!(String::from_utf8(shown).unwrap(), SHOWN, "{size}");
        }
    }

    #[test]
    fn incomplete_lines_are_shown_at_once() {
        let mut quiet = Quiet::default();
        assert_eq!(quiet.shown(b"go on? "), b"go on? ");
        assert_eq!(quiet.shown(b"yes\n"), b"yes\n");
        assert_eq!(quiet.shown(b" I"), b"");
        assert_eq!(quiet.shown(b"NFO a\nb"), b"b");
    }
}
