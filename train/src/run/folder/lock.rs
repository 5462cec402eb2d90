//! A run folder belongs to one run for as long as any of its processes lives.
//!
//! Rank 0 holds a lock of the system for itself, and the processes of the other ranks share a second one.
//! The kernel lets go of both when a process ends, however it ends. Whoever begins needs the first lock,
//! and needs to find the second one free, so it begins only when nobody is left. `flock` reaches other
//! machines where the file system takes it there, as NFS does. Where it does not, or not beyond this
//! machine, the holder's heartbeat decides; see `holder.rs`.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::error::FolderError;
use super::holder::{Holder, LOOK, LOOKS, heartbeat};
use crate::checkpoint::HeldFolder;
use crate::files;
use crate::metrics::say;
use crate::process::{ProcessId, Repeat};

/// What only locks need is in this folder of the run folder.
pub(super) const FOLDER: &str = ".kiln";
const LOCK_FILE: &str = "lock";
const RANKS_FILE: &str = "ranks";
const HOLDER_FILE: &str = "holder.json";

/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// The kernel lets go of the locks of a process a little before the process is gone.
const EXIT: Duration = Duration::from_secs(5);

/// Anyone who only asks whether the lock is free has it for a moment.
const MOMENT: Duration = Duration::from_millis(500);

/// A run folder is this run's, until this is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    // In this order: first the holder's file says that it ends.
    _heartbeat: Option<Repeat>,
    held: Option<HeldFolder>,
}

/// How long a start waits for another run to let go of the folder.
pub(super) struct Patience<'a> {
    /// So long.
    pub(super) time: Duration,
    /// And no longer than until this becomes true.
    pub(super) stop: &'a AtomicBool,
}

/// What the system says to an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// This process has the lock now, and no rank is left of the one before.
    Locked,
    /// Others hold it.
    Taken,
    /// There are no locks on this file system.
    Unsupported,
}

/// What the holder's file makes of an attempt that nobody has objected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rival {
    /// There is none.
    Gone,
    /// It lives.
    Alive,
    /// It may live on another machine, whose locks are not seen here.
    Unknown,
}

impl Lock {
    /// Takes the folder `out` for the run `run`; the folder is created if it is not there.
    ///
    /// # Errors
    ///
    /// When another run holds the folder and does not let go of it in time, or it cannot be written.
    pub(super) fn take(out: &Path, run: &str, patience: Patience) -> Result<Self, FolderError> {
        fs::create_dir_all(out).map_err(FolderError::io("create", out))?;
        let folder = out.join(FOLDER);
        fs::create_dir_all(&folder).map_err(FolderError::io("create", &folder))?;
        if folder.is_symlink() {
            let link = std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                "it is a link, not a folder of this run",
            );
            return Err(FolderError::io("write into", &folder)(link));
        }
        let holder_path = folder.join(HOLDER_FILE);
        let locks = Locks::open(&folder, true).map_err(FolderError::io("open", &folder))?;
        let start = Instant::now();
        let (mut said, mut watched) = (false, false);
        let attempt = loop {
            let attempt = locks.attempt();
            if attempt != Attempt::Taken && !has_rival(attempt, &holder_path, out, &mut watched) {
                break attempt;
            }
            let stop = patience.stop.load(Ordering::Relaxed);
            // With the lock in hand, whoever still seems to be there is about to end, or somebody has
            // removed the file that it had locked.
            let least = if attempt == Attempt::Locked { EXIT } else { MOMENT };
            if start.elapsed() >= patience.time.max(least) || stop {
                return Err(held(out));
            }
            if !said && patience.time > MOMENT && start.elapsed() >= MOMENT {
                said = true;
                say(&format!(
                    "waiting up to {:.0} s for {} to be free: it is in use by {}",
                    patience.time.as_secs_f64(),
                    out.display(),
                    Holder::describe(&holder_path, || sleep(PAUSE))
                ));
            }
            sleep(PAUSE);
        };
        let holder = Holder::this(run);
        holder.write(&holder_path).map_err(FolderError::io("write", &holder_path))?;
        if attempt == Attempt::Unsupported {
            // Of two that begin at once, the one whose file stays.
            sleep(2 * LOOK);
            if !Holder::read(&holder_path).is_some_and(|now| now.is_same(&holder)) {
                return Err(held(out));
            }
        }
        let held = HeldFolder::new(out, folder.join(LOCK_FILE), Arc::new(locks.first));
        let heartbeat = heartbeat(holder, holder_path, held.clone())
            .map_err(FolderError::io("start a thread for the heartbeat of", out))?;
        Ok(Lock { _heartbeat: Some(heartbeat), held: Some(held) })
    }

    /// Holds the folder `out` of a run whose rank 0 has taken it, as another process of the run.
    ///
    /// # Errors
    ///
    /// When another run has come in between. Where there is nothing to lock, rank 0 answers for all.
    pub(in crate::run) fn share(out: &Path) -> Result<Self, FolderError> {
        let path = out.join(FOLDER).join(RANKS_FILE);
        let file = open(&path, false).ok();
        if let Some(Err(TryLockError::WouldBlock)) = file.as_ref().map(File::try_lock_shared) {
            return Err(held(out));
        }
        let held = file.map(|file| HeldFolder::new(out, path, Arc::new(file)));
        Ok(Lock { _heartbeat: None, held })
    }

    /// What shows whether the folder is still this run's; `None` where this process could not hold it.
    pub(in crate::run) fn held(&self) -> Option<HeldFolder> {
        self.held.clone()
    }

    /// Fails if some run holds `out` now. Writes nothing.
    pub(super) fn check_free(out: &Path) -> Result<(), FolderError> {
        let locks = Locks::open(&out.join(FOLDER), false).ok();
        match locks.map(|locks| locks.attempt()) {
            Some(Attempt::Taken) => Err(held(out)),
            _ => Ok(()),
        }
    }
}

/// The file that says who holds the folder `out`.
pub(super) fn holder_file(out: &Path) -> PathBuf {
    out.join(FOLDER).join(HOLDER_FILE)
}

fn open(path: &Path, create: bool) -> std::io::Result<File> {
    // For writing, too: without it, NFS gives no lock that keeps others out.
    let mut options = OpenOptions::new();
    files::open_with(options.read(true).write(true).create(create).truncate(false), path)
}

/// The files that are locked.
struct Locks {
    /// Rank 0's alone.
    first: File,
    /// Shared by the others.
    ranks: File,
}

impl Locks {
    fn open(folder: &Path, create: bool) -> std::io::Result<Self> {
        let open = |name| open(&folder.join(name), create);
        Ok(Locks { first: open(LOCK_FILE)?, ranks: open(RANKS_FILE)? })
    }

    /// Takes the first lock if both are free. The second is free again afterwards: nobody but the holder
    /// of the first one lets ranks begin.
    fn attempt(&self) -> Attempt {
        let of = |attempt: Result<(), TryLockError>| match attempt {
            Ok(()) => Attempt::Locked,
            Err(TryLockError::WouldBlock) => Attempt::Taken,
            Err(TryLockError::Error(_)) => Attempt::Unsupported,
        };
        let first = of(self.first.try_lock());
        if first != Attempt::Locked {
            return first;
        }
        let ranks = of(self.ranks.try_lock());
        let released = match ranks {
            Attempt::Locked => self.ranks.unlock(),
            _ => self.first.unlock(),
        };
        if released.is_ok() { ranks } else { Attempt::Unsupported }
    }
}

fn held(out: &Path) -> FolderError {
    let path = out.join(FOLDER).join(HOLDER_FILE);
    let holder = Holder::describe(&path, || sleep(PAUSE));
    FolderError::Held(out.to_owned(), holder)
}

/// Whether the holder's file tells of someone who lives, though the lock does not.
fn has_rival(attempt: Attempt, holder_path: &Path, out: &Path, watched: &mut bool) -> bool {
    let Some(holder) = Holder::read(holder_path) else { return false };
    match rival(attempt, &holder, &ProcessId::this()) {
        Rival::Gone => false,
        Rival::Alive => true,
        Rival::Unknown => {
            if !std::mem::replace(watched, true) {
                say(&format!(
                    "{} was last in use on {holder}, which has not said that it ended: watching for \
                     {} s whether it is still there",
                    out.display(),
                    LOOK.as_secs() * LOOKS as u64
                ));
            }
            holder.moves(holder_path, LOOKS, || sleep(LOOK))
        }
    }
}

fn rival(attempt: Attempt, holder: &Holder, this: &ProcessId) -> Rival {
    if holder.ended {
        return Rival::Gone;
    }
    match holder.process.is_gone() {
        Some(true) => Rival::Gone,
        // Runs of one process know each other by their locks.
        Some(false) if attempt == Attempt::Locked && holder.process == *this => Rival::Gone,
        // Also with the lock in hand: somebody may have removed the file that it has locked.
        Some(false) => Rival::Alive,
        // In another container. The kernel of both has just said that nobody holds the lock.
        None if attempt == Attempt::Locked && holder.process.shares_kernel_with(this) => Rival::Gone,
        None => Rival::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    static NONE: AtomicBool = AtomicBool::new(false);

    fn now(stop: &AtomicBool) -> Patience<'_> {
        Patience { time: Duration::ZERO, stop }
    }

    fn holder_of(out: &Path) -> PathBuf {
        out.join(FOLDER).join(HOLDER_FILE)
    }

    /// Two runs as threads of one process are two runs.
    #[test]
    fn a_folder_has_one_run_and_the_next_one_when_all_of_it_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("run");
        let lock = Lock::take(&out, "first", now(&NONE)).unwrap();
        let refused = || Lock::take(&out, "second", now(&NONE)).unwrap_err().to_string();
        let (me, said) = (format!("pid {}", std::process::id()), refused());
        assert!(said.contains(&me) && said.contains("run first"), "{said}");
        assert!(Lock::check_free(&out).unwrap_err().to_string().contains(&me));
        let other_rank = Lock::share(&out).unwrap();
        drop(lock);
        let said = refused();
        assert!(said.contains("ranks of an earlier start that have not ended"), "{said}");
        drop(other_rank);
        Lock::check_free(&out).unwrap();
        Lock::take(&out, "second", now(&NONE)).unwrap();
    }

    #[test]
    fn of_many_that_begin_at_once_one_begins() {
        const STARTS: usize = 8;
        for _ in 0..4 {
            let folder = tempfile::tempdir().unwrap();
            let meeting = kiln_testkit::Meeting::of(STARTS);
            let begun = std::thread::scope(|scope| {
                let start = |index: usize| {
                    let (meeting, out) = (&meeting, folder.path().join("run"));
                    scope.spawn(move || {
                        meeting.wait();
                        let lock = Lock::take(&out, &index.to_string(), now(&NONE));
                        // Nobody lets go before all have tried.
                        meeting.wait();
                        usize::from(lock.is_ok())
                    })
                };
                let threads: Vec<_> = (0..STARTS).map(start).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
            });
            assert_eq!(begun, 1);
        }
    }

    #[test]
    fn a_start_with_patience_begins_when_the_folder_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("run");
        let first = Lock::take(&out, "first", now(&NONE)).unwrap();
        // Whoever is told to stop waits no longer.
        let stop = AtomicBool::new(true);
        let stopped = Patience { time: Duration::MAX, stop: &stop };
        assert!(matches!(Lock::take(&out, "second", stopped), Err(FolderError::Held(..))));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let patience = Patience { time: kiln_testkit::PATIENCE, stop: &NONE };
                Lock::take(&out, "second", patience).map(|_| ())
            });
            drop(first);
            waiting.join().unwrap().unwrap();
        });
        assert!(Holder::read(&holder_of(&out)).unwrap().to_string().ends_with("run second"));
    }

    #[test]
    fn without_locks_that_reach_everyone_the_holders_file_decides() {
        use Attempt::{Locked, Unsupported};
        let this = ProcessId::this();
        let parent = ProcessId::parent().unwrap();
        let holder = |process: &ProcessId, ended: bool| {
            let mut holder = Holder::this("r");
            (holder.process, holder.ended) = (process.clone(), ended);
            holder
        };
        let changed = |key: &str, value: serde_json::Value| -> ProcessId {
            let mut json = serde_json::to_value(&this).unwrap();
            json[key] = value;
            serde_json::from_value(json).unwrap()
        };
        let elsewhere = changed("host", "elsewhere".into());
        let other_machine = changed("boot", "another".into());
        let gone = changed("started", 1.into());
        for (attempt, process, expected) in [
            // It lives: its lock was removed.
            (Locked, &parent, Rival::Alive),
            (Locked, &this, Rival::Gone),
            (Locked, &gone, Rival::Gone),
            // Under one kernel, its locks are the truth about other containers.
            (Locked, &elsewhere, Rival::Gone),
            (Locked, &other_machine, Rival::Unknown),
            (Unsupported, &parent, Rival::Alive),
            (Unsupported, &gone, Rival::Gone),
            (Unsupported, &elsewhere, Rival::Unknown),
            (Unsupported, &other_machine, Rival::Unknown),
        ] {
            let found = rival(attempt, &holder(process, false), &this);
            assert_eq!(found, expected, "{attempt:?} {process:?}");
            assert_eq!(rival(attempt, &holder(process, true), &this), Rival::Gone);
        }
    }
}
