//! The output of ranks in a run's folder `logs`, read as it grows.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MOST_BYTES: u64 = 64 * 1024;

const MOST_LINES: usize = 4000;

const MOST_FILES: usize = 512;

const MOST_CHARACTERS: usize = 2000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogLine {
    pub rank: usize,
    /// True for standard error.
    pub is_error: bool,
    pub text: Arc<str>,
}

#[derive(Debug)]
pub(super) struct Logs {
    folder: PathBuf,
    read: BTreeMap<PathBuf, u64>,
    lines: Vec<LogLine>,
}

/// Parts of the file name `rank_<rank>.restart_<restart>.<stdout|stderr>.log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    rank: usize,
    is_error: bool,
    restart: u64,
}

impl Logs {
    pub(super) fn new(run: &Path) -> Self {
        Logs { folder: run.join("logs"), read: BTreeMap::new(), lines: Vec::new() }
    }

    /// Reads new lines. Returns all kept lines if there are new ones.
    pub(super) fn refresh(&mut self) -> Option<Arc<Vec<LogLine>>> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let name = |entry: fs::DirEntry| Some((Name::parse(entry.file_name().to_str()?)?, entry.path()));
        let mut files: Vec<(Name, PathBuf)> = entries.filter_map(name).collect();
        files.sort();
        // Only files of the last restart grow.
        let newest = files.chunk_by(|a, b| (a.0.rank, a.0.is_error) == (b.0.rank, b.0.is_error));
        let newest: Vec<_> = newest.filter_map(|files| files.last().cloned()).take(MOST_FILES).collect();
        let before = self.lines.len();
        let mut is_new = false;
        for (name, path) in newest {
            is_new |= self.read_file(name, path).unwrap_or(false);
        }
        if self.lines.len() > MOST_LINES {
            self.lines.drain(..self.lines.len() - MOST_LINES);
        }
        (is_new || self.lines.len() != before).then(|| Arc::new(self.lines.clone()))
    }

    fn read_file(&mut self, name: Name, path: PathBuf) -> io::Result<bool> {
        let mut file = File::open(&path)?;
        let length = file.metadata()?.len();
        let known = self.read.get(&path).copied().filter(|read| *read <= length);
        let from = known.unwrap_or(0).max(length.saturating_sub(MOST_BYTES));
        if from == length {
            return Ok(false);
        }
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(length - from).read_to_end(&mut bytes)?;
        let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') else { return Ok(false) };
        let is_cut = from > known.unwrap_or(0);
        let lines = bytes[..end].split(|byte| *byte == b'\n').skip(usize::from(is_cut));
        self.lines.extend(lines.map(|line| name.line(line)));
        self.read.insert(path, from + end as u64 + 1);
        Ok(true)
    }
}

impl Name {
    fn parse(name: &str) -> Option<Name> {
        let mut parts = name.strip_prefix("rank_")?.strip_suffix(".log")?.split('.');
        let rank = parts.next()?.parse().ok()?;
        let restart = parts.next()?.strip_prefix("restart_")?.parse().ok()?;
        let is_error = match parts.next()? {
            "stdout" => false,
            "stderr" => true,
            _ => return None,
        };
        parts.next().is_none().then_some(Name { rank, is_error, restart })
    }

    fn line(self, bytes: &[u8]) -> LogLine {
        let text = String::from_utf8_lossy(bytes);
        // A progress bar rewrites its line; only its last state is shown.
        let text = text.trim_end().rsplit('\r').next().unwrap_or_default();
        let text: String = text.chars().take(MOST_CHARACTERS).collect();
        LogLine { rank: self.rank, is_error: self.is_error, text: text.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_of_the_last_restart_come_once() {
        let run = tempfile::tempdir().unwrap();
        let logs = run.path().join("logs");
        fs::create_dir(&logs).unwrap();
        let write = |name: &str, text: &[u8]| {
            let path = logs.join(name);
            fs::OpenOptions::new().create(true).append(true).open(path).unwrap().write_all(text).unwrap();
        };
        write("rank_1.restart_0.stdout.log", b"old\n");
        write("rank_1.restart_1.stdout.log", b"one\n10 %\r50 %\n\xff no text\nhal");
        write("rank_0.restart_0.stderr.log", b"error\n");
        write("notes.txt", b"mine\n");
        let mut read = Logs::new(run.path());
        let lines = |lines: Option<Arc<Vec<LogLine>>>| {
            let line = |line: &LogLine| {
                format!("{}{} {}", line.rank, ["", "!"][usize::from(line.is_error)], line.text)
            };
            lines.map(|lines| lines.iter().map(line).collect::<Vec<_>>())
        };
        assert_eq!(lines(read.refresh()).unwrap(), ["0! error", "1 one", "1 50 %", "1 \u{fffd} no text"]);
        assert_eq!(lines(read.refresh()), None);
        write("rank_1.restart_1.stdout.log", b"f a line\n");
        assert_eq!(lines(read.refresh()).unwrap()[4..], ["1 half a line"]);
        let long = vec![b'x'; 3 * MOST_BYTES as usize];
        write("rank_1.restart_1.stdout.log", &[&long[..], b"\nlast\n"].concat());
        assert_eq!(lines(read.refresh()).unwrap()[5..], ["1 last"]);
        assert_eq!(Logs::new(&run.path().join("none")).refresh(), None);
    }
}
