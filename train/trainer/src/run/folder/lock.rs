//! The lock of a run folder, which belongs to one run for as long as any of the run's processes lives.
//! Rank 0 holds one `flock` exclusively; other ranks share a second one, which must be free before a new run begins.
//! If no locks reach the other machines, the holder's heartbeat decides (`holder.rs`).

use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::holder::{Holder, LOOK, LOOKS, heartbeat};
use crate::error::FolderError;
use crate::metrics::print_line;
use crate::process::{ProcessId, Repeat};
use kiln_checkpoint::HeldFolder;
use kiln_sys::files;

/// Folder within the run folder for the files that only locking needs.
pub(super) const FOLDER: &str = ".kiln";
const LOCK_FILE: &str = "lock";
const RANKS_FILE: &str = "ranks";
const HOLDER_FILE: &str = "holder.json";

const PAUSE: Duration = Duration::from_millis(50);

/// Maximum time for which an ending process exists after the kernel has released its locks.
const EXIT: Duration = Duration::from_secs(5);

/// Maximum time for which a process that only checks the lock holds it.
const MOMENT: Duration = Duration::from_millis(500);

/// Keeps a run folder for this run until it is dropped.
#[derive(Debug)]
pub struct Lock {
    // Dropped in this order: first the holder's file is marked as ended.
    _heartbeat: Option<Repeat>,
    held: Option<HeldFolder>,
}

pub(super) struct Patience<'a> {
    pub(super) time: Duration,
    pub(super) stop: &'a AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    Locked,
    Taken,
    Unsupported,
}

/// The state of the holder named in the file, after an attempt that found no lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rival {
    Gone,
    Alive,
    /// The holder may be alive on another machine, whose locks are invisible here.
    Unknown,
}

impl Lock {
    /// Takes the folder `out`, created if missing, for the run `run`; fails unless the folder becomes free in time.
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
            // If this process has the lock, the rival that seems alive is ending, or its lock file was removed.
            let least = if attempt == Attempt::Locked { EXIT } else { MOMENT };
            if start.elapsed() >= patience.time.max(least) || stop {
                return Err(held(out));
            }
            if !said && patience.time > MOMENT && start.elapsed() >= MOMENT {
                said = true;
                print_line(&format!(
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
            // If two runs begin at once, the one whose file remains wins.
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

    /// Holds `out`, which rank 0 has taken, for another rank of the run; fails if another run has taken it since.
    /// Without lock support, rank 0 holds the folder for all ranks.
    pub(in crate::run) fn share(out: &Path) -> Result<Self, FolderError> {
        let path = out.join(FOLDER).join(RANKS_FILE);
        let file = open(&path, false).ok();
        if let Some(Err(TryLockError::WouldBlock)) = file.as_ref().map(File::try_lock_shared) {
            return Err(held(out));
        }
        let held = file.map(|file| HeldFolder::new(out, path, Arc::new(file)));
        Ok(Lock { _heartbeat: None, held })
    }

    /// Returns a handle that shows whether the folder still belongs to this run, if this process could lock it.
    pub(in crate::run) fn held(&self) -> Option<HeldFolder> {
        self.held.clone()
    }

    pub(super) fn check_free(out: &Path) -> Result<(), FolderError> {
        let locks = Locks::open(&out.join(FOLDER), false).ok();
        match locks.map(|locks| locks.attempt()) {
            Some(Attempt::Taken) => Err(held(out)),
            _ => Ok(()),
        }
    }
}

pub(super) fn holder_file(out: &Path) -> PathBuf {
    out.join(FOLDER).join(HOLDER_FILE)
}

fn open(path: &Path, create: bool) -> std::io::Result<File> {
    // Opened for writing too: otherwise NFS grants no exclusive lock.
    let mut options = OpenOptions::new();
    files::open_with(options.read(true).write(true).create(create).truncate(false), path)
}

struct Locks {
    /// Locked exclusively by rank 0.
    first: File,
    /// Shared by the other ranks.
    ranks: File,
}

impl Locks {
    fn open(folder: &Path, create: bool) -> std::io::Result<Self> {
        let open = |name| open(&folder.join(name), create);
        Ok(Locks { first: open(LOCK_FILE)?, ranks: open(RANKS_FILE)? })
    }

    /// Takes the first lock if both are free, and releases the second for this run's ranks, which begin later.
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

/// Returns whether the holder's file names a process that is alive although the lock shows none.
fn has_rival(attempt: Attempt, holder_path: &Path, out: &Path, watched: &mut bool) -> bool {
    let Some(holder) = Holder::read(holder_path) else { return false };
    match rival(attempt, &holder, &ProcessId::this()) {
        Rival::Gone => false,
        Rival::Alive => true,
        Rival::Unknown => {
            if !std::mem::replace(watched, true) {
                print_line(&format!(
                    "{} was last in use on {holder}, which did not record its end: watching for {} s to see \
                     whether it still runs",
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
        // Runs in the same process see each other's locks.
        Some(false) if attempt == Attempt::Locked && holder.process == *this => Rival::Gone,
        // Even if this process has the lock: the rival's lock file may have been removed.
        Some(false) => Rival::Alive,
        // The holder is in another container of the same kernel, which has just granted the lock.
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
        assert!(said.contains("ranks of an earlier start that still run"), "{said}");
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
            // The parent is alive: its lock was removed.
            (Locked, &parent, Rival::Alive),
            (Locked, &this, Rival::Gone),
            (Locked, &gone, Rival::Gone),
            // Under one kernel, locks are reliable across containers.
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
