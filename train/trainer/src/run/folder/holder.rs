//! The holder of a run folder, in a file for users and for machines that do not see each other's locks.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::identity::now;
use crate::process::{ProcessId, Repeat};
use kiln_checkpoint::HeldFolder;
use kiln_sys::files;

const BEAT: Duration = Duration::from_secs(5);

/// Size of the file in bytes. The file is overwritten in place, so its text is padded to cover a longer one.
const BYTES: usize = 512;

const MAX_BYTES: u64 = 64 * 1024;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Holder {
    pub(super) process: ProcessId,
    since: String,
    run: String,
    beat: u64,
    pub(super) ended: bool,
}

impl Holder {
    pub(super) fn this(run: &str) -> Self {
        let run = run.to_owned();
        Holder { process: ProcessId::this(), since: now(), run, beat: 0, ended: false }
    }

    pub(super) fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&files::read(path, MAX_BYTES).ok()?).ok()
    }

    /// Overwrites the file `path`. Opens and closes the file every time, because NFS sends writes on close.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_string(self)?;
        let mut options = OpenOptions::new();
        let mut file = files::open_with(options.write(true).create(true).truncate(false), path)?;
        file.write_all(format!("{text:BYTES$}\n").as_bytes())
    }

    pub(super) fn is_same(&self, other: &Holder) -> bool {
        (&self.process, &self.run) == (&other.process, &other.run)
    }

    /// Describes the holder in the file at `path`, after waiting for a holder that has just begun to write it.
    pub(super) fn describe(path: &Path, mut pause: impl FnMut()) -> String {
        const LOOKS: usize = 10;
        for _ in 0..LOOKS {
            match Holder::read(path) {
                Some(holder) if !holder.ended && holder.process.is_gone() != Some(true) => {
                    return format!("a run on {holder}");
                }
                _ => pause(),
            }
        }
        match Holder::read(path) {
            Some(holder) => format!(
                "ranks of an earlier start that still run, though its first process ({holder}) has ended"
            ),
            None => "an unidentified process".to_owned(),
        }
    }

    /// Returns whether the file at `path` changes within `looks` checks, as it does while its holder lives.
    pub(super) fn moves(&self, path: &Path, looks: usize, mut pause: impl FnMut()) -> bool {
        (0..looks).any(|_| {
            pause();
            Holder::read(path).is_some_and(|now| now != *self && !now.ended)
        })
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Holder { process, since, run, .. } = self;
        write!(f, "host {}, pid {}, since {since}, run {run}", process.host, process.pid)
    }
}

/// Number of checks, [`LOOK`] apart, after which an unchanged file means that its holder is gone.
pub(super) const LOOKS: usize = 20;

pub(super) const LOOK: Duration = Duration::from_secs(1);

/// Keeps the file `path` of `holder` up to date until the result is dropped, which marks the folder as free.
/// Writes only while the folder is `held` or the file names the holder.
pub(super) fn heartbeat(holder: Holder, path: PathBuf, held: HeldFolder) -> io::Result<Repeat> {
    beat_every(BEAT, holder, path, move || held.check().is_ok())
}

fn beat_every(
    pause: Duration,
    mut holder: Holder,
    path: PathBuf,
    is_held: impl Fn() -> bool + Send + 'static,
) -> io::Result<Repeat> {
    Repeat::every(pause, "kiln-heartbeat", move |is_last| {
        holder.beat += u64::from(!is_last);
        holder.ended = is_last;
        // Another run may have taken this path.
        let names_it = || Holder::read(&path).is_some_and(|now| now.is_same(&holder));
        if is_held() || names_it() {
            // If the disk is full or briefly unavailable, the next heartbeat tries again.
            let _ = holder.write(&path);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_moves_its_file_and_says_when_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("holder.json");
        let holder = Holder::this("r");
        holder.write(&path).unwrap();
        assert_eq!(Holder::read(&path), Some(holder.clone()));
        assert!(Holder::describe(&path, || ()).contains(&format!("pid {}", std::process::id())));
        let heartbeat = beat_every(Duration::from_millis(1), holder.clone(), path.clone(), || true).unwrap();
        assert!(holder.moves(&path, usize::MAX, std::thread::yield_now));
        drop(heartbeat);
        let last = Holder::read(&path).unwrap();
        assert!(last.ended && last.beat > 0 && last.is_same(&holder), "{last:?}");
        assert!(Holder::describe(&path, || ()).contains("still run"));
    }

    #[test]
    fn a_heartbeat_leaves_the_file_of_another_holder_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("holder.json");
        let (old, new) = (Holder::this("old"), Holder::this("new"));
        old.write(&path).unwrap();
        let heartbeat =
            |held: bool| beat_every(Duration::from_secs(600), old.clone(), path.clone(), move || held);
        drop(heartbeat(false).unwrap());
        assert!(Holder::read(&path).unwrap().ended);
        new.write(&path).unwrap();
        drop(heartbeat(false).unwrap());
        assert_eq!(Holder::read(&path), Some(new));
        std::fs::remove_file(&path).unwrap();
        drop(heartbeat(false).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_stays_as_it_is_has_no_holder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("holder.json");
        let holder = Holder::this("r");
        holder.write(&path).unwrap();
        let mut looks = 0;
        assert!(!holder.moves(&path, 4, || looks += 1));
        assert_eq!(looks, 4);
        let ended = Holder { ended: true, ..holder.clone() };
        assert!(!holder.moves(&path, 4, || ended.write(&path).unwrap()));
        holder.write(&path).unwrap();
        let mut looks = 0;
        let beats = || {
            looks += 1;
            if looks == 3 {
                Holder { beat: 1, ..holder.clone() }.write(&path).unwrap();
            }
        };
        assert!(holder.moves(&path, 4, beats));
    }

    #[test]
    fn what_is_no_holders_file_tells_of_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("holder.json");
        for text in ["", "{}", "half of {\"process"] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(Holder::read(&path), None, "{text}");
        }
        assert!(Holder::describe(&path, || ()).contains("unidentified"));
    }
}
