//! The output of ranks: a log file per rank, restart and stream. The console shows rank 0's output as well.

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

/// Bytes at the end of a log that are searched for the last lines.
const TAIL_BYTES: u64 = 16 * 1024;

const TAIL_LINES: usize = 20;

const LINE: usize = 500;

/// A line of unknown kind is shown after this many bytes.
const BEGIN: usize = 512;

/// Time limit for the last output of a rank that has ended.
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

/// Returns the folder of this launch's logs: `wanted`, or, if a running launch uses it, the first free one of `other`,
/// `other-2`, … Keeps logs of the same rank and restart apart. The returned file reserves the folder while it is open.
pub(super) fn claim(
    wanted: &Path,
    other: &Path,
    rank: usize,
    restart: u64,
) -> Result<(PathBuf, Option<File>), LaunchError> {
    let mut folder = wanted.to_owned();
    let mut number = 1;
    loop {
        let Log { file, .. } = Log::open(&folder, rank, restart, Stream::Stdout)?;
        match file.try_lock() {
            Ok(()) => return Ok((folder, Some(file))),
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

pub(super) type Stream = output::Console;

/// A log file, and the position where this rank's output starts.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) path: PathBuf,
    file: File,
    start: u64,
}

impl Log {
    /// Opens `<folder>/rank_<rank>.restart_<restart>.<stdout|stderr>.log` for appending, which keeps earlier lines.
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

    pub(super) fn nowhere() -> Result<Log, LaunchError> {
        let path = PathBuf::from("/dev/null");
        match OpenOptions::new().append(true).open(&path) {
            Ok(file) => Ok(Log { path, file, start: 0 }),
            Err(source) => Err(LaunchError::Log { path, source }),
        }
    }

    /// The child writes directly, so that nothing is lost if the launcher dies.
    pub(super) fn for_child(&self) -> Result<File, LaunchError> {
        let error = |source| LaunchError::Log { path: self.path.clone(), source };
        self.file.try_clone().map_err(error)
    }

    /// Copies `pipe` to the file and the console until it is closed. Omits lines of stderr below `warn` on the console.
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
        let _ = read(&mut bytes);
        let text = String::from_utf8_lossy(&bytes);
        // A progress bar is one line with many carriage returns.
        let lines = text.lines().map(|line| line.rsplit('\r').next().unwrap_or(line));
        let lines: Vec<_> = lines.filter(|line| !line.trim().is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        last.iter().map(|line| line.chars().take(LINE).collect()).collect()
    }
}

/// A copy in progress. At its end it sends the number of bytes missing from the log.
#[derive(Debug)]
pub(super) struct Copying(Receiver<usize>);

impl Copying {
    /// Waits until everything is copied or `deadline` passes, because processes left behind may keep the pipe open.
    /// Returns the number of lost bytes.
    pub(super) fn finish(self, deadline: Instant) -> usize {
        let left = deadline.saturating_duration_since(Instant::now());
        self.0.recv_timeout(left).unwrap_or_default()
    }
}

/// Filters a rank's log, which comes in pieces, for a terminal: omits lines below `warn`.
#[derive(Debug, Default)]
struct Quiet {
    begin: Vec<u8>,
    is_shown: Option<bool>,
}

impl Quiet {
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
