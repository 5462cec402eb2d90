//! The ranks that have arrived and wait for others: one file per process in a run folder that no run has claimed.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::is_foreign;
use super::lock::FOLDER;
use crate::metrics::unix_time;
use crate::process::ProcessId;
use kiln_config::CommSection;
use kiln_launch::place::RankEnv;
use kiln_sys::files;

const PREFIX: &str = "waiting_";
const SUFFIX: &str = ".json";

const MAX_BYTES: u64 = 1 << 20;

const MOST: usize = 1 << 12;

/// Tolerance in seconds for the end of a wait on another machine, because clocks differ.
const LATE: f64 = 60.0;

/// A rank that waits for others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Waiting {
    pub process: ProcessId,
    pub rank: usize,
    pub world_size: usize,
    /// Address at which rank 0 hosts the rendezvous, as `host:port`.
    pub rendezvous: String,
    /// Start and latest end of the wait, in seconds since 1970.
    pub since: f64,
    pub until: f64,
    /// On rank 0: the ranks that have arrived, and the address of each.
    pub come: BTreeMap<usize, IpAddr>,
}

/// Shows in a run folder, until dropped, that this process waits for other ranks.
#[derive(Debug)]
pub(in crate::run) struct Meeting {
    waiting: Waiting,
    path: Option<PathBuf>,
    /// Folders that were created for the file, innermost first.
    made: Vec<PathBuf>,
}

impl Meeting {
    pub(in crate::run) fn begin(out: &Path, place: &RankEnv, comm: &CommSection) -> Self {
        let since = unix_time();
        let waiting = Waiting {
            process: ProcessId::this(),
            rank: place.rank,
            world_size: place.world_size,
            rendezvous: format!("{}:{}", place.master.host, place.master.port),
            since,
            until: since + comm.join_timeout().as_secs_f64(),
            come: BTreeMap::new(),
        };
        let mut meeting = Meeting { waiting, path: None, made: Vec::new() };
        let folder = out.join(FOLDER);
        // Only rank 0 may create the run folder, which it will need anyway.
        let may_show = (place.rank == 0 || out.is_dir()) && !is_foreign(out) && !folder.is_symlink();
        if may_show {
            let missing = folder.ancestors().take_while(|folder| !folder.exists());
            let missing: Vec<_> = missing.filter(|folder| !folder.as_os_str().is_empty()).collect();
            meeting.made = missing.into_iter().map(Path::to_owned).collect();
            let is_made = fs::create_dir_all(&folder).is_ok();
            meeting.path = is_made.then(|| folder.join(format!("{PREFIX}{}{SUFFIX}", place.rank)));
            let _ = meeting.write();
        }
        meeting
    }

    pub(in crate::run) fn show(&mut self, come: BTreeMap<usize, IpAddr>) {
        if self.waiting.come != come {
            self.waiting.come = come;
            let _ = self.write();
        }
    }

    /// Replaces the file atomically, but without a sync: the file need not survive a crash of the machine.
    fn write(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let beside = path.with_extension("new");
        fs::write(&beside, serde_json::to_vec(&self.waiting)?)?;
        fs::rename(&beside, path)
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        // A file that cannot be removed does no harm: the process that it names will be gone.
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
        // Only rank 0 removes the empty folders: no other process can be about to use them.
        if self.waiting.rank == 0 {
            self.made.iter().for_each(|folder| _ = fs::remove_dir(folder));
        }
    }
}

/// Returns the processes that wait in the run folder `out` for other ranks, ordered by rank.
pub fn waiting(out: &Path) -> Vec<Waiting> {
    let entries = fs::read_dir(out.join(FOLDER)).into_iter().flatten().flatten().take(MOST);
    let mut waiting: Vec<Waiting> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let rank: usize = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok()?;
            let found: Waiting = serde_json::from_slice(&files::read(&entry.path(), MAX_BYTES).ok()?).ok()?;
            let is_there = match found.process.is_gone() {
                Some(is_gone) => !is_gone,
                None => unix_time() < found.until + LATE,
            };
            (is_there && found.rank == rank && rank < found.world_size).then_some(found)
        })
        .collect();
    waiting.sort_by_key(|waiting| waiting.rank);
    waiting
}
