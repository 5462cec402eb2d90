//! The crash report of a rank that was killed, written by the launcher because the rank could not. Ranks that
//! crash in other ways write the same files themselves.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use kiln_sys::crash_words::{BATCH, TEXT, write_batch, write_samples, write_step};
use kiln_sys::words::time_now;
use signal_hook::consts::SIGKILL;

use super::end::End;
use super::say::signal_name;

/// Writes `crash/rank_<r>` for a rank that was not killed by this launcher, and returns the folder.
pub(super) fn keep(end: &End) -> Option<PathBuf> {
    let crashes = end.crashes.as_deref()?;
    if end.signal != Some(SIGKILL) || end.told {
        return None;
    }
    // The run has failed already; an error here must not hide the cause.
    write(crashes, end).ok()
}

fn write(crashes: &Path, end: &End) -> io::Result<PathBuf> {
    fs::create_dir_all(crashes)?;
    let folder = new_folder(crashes, end.rank)?;
    let seen = end.seen;
    let signal = signal_name(SIGKILL);
    let mut text =
        format!("what     {signal}, told by its launcher: a rank that is killed can write nothing\n");
    // Writing into a String cannot fail.
    let _ = write_step(&mut text, end.rank, seen.step);
    text.push_str("phase    not known; see what the others were waiting for: kiln inspect flight RUN\n");
    text.push_str("unit     not known\n");
    let _ = write_samples(&mut text, seen.micro_batch);
    let host = rustix::system::uname();
    let _ = writeln!(text, "host     {}", host.nodename().to_string_lossy());
    let _ = writeln!(text, "process  {}", end.pid);
    let _ = writeln!(text, "time     {}", time_now());
    let _ = writeln!(text, "\nits last lines on stderr, all of which are in {}:", end.stderr.display());
    end.last_lines.iter().for_each(|line| _ = writeln!(text, "  {line}"));
    fs::write(folder.join(TEXT), text)?;
    if let Some(micro_batch) = seen.micro_batch {
        let mut batch = String::new();
        let _ = write_batch(&mut batch, end.rank, seen.step, micro_batch);
        fs::write(folder.join(BATCH), batch)?;
    }
    Ok(folder)
}

/// Creates the first of `rank_<r>`, `rank_<r>-2`, … that does not exist.
fn new_folder(crashes: &Path, rank: usize) -> io::Result<PathBuf> {
    let mut number = 1;
    loop {
        let name = if number == 1 { format!("rank_{rank}") } else { format!("rank_{rank}-{number}") };
        let folder = crashes.join(name);
        match fs::create_dir(&folder) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            made => return made.map(|()| folder),
        }
    }
}
