//! Flight recordings: files that ranks leave behind when their run fails.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_collectives::Communicator;

use crate::metrics::write_atomic;
use crate::process::position::MakeFlight;
use kiln_checkpoint::HeldFolder;

const FLIGHT: &str = "flight";

/// Returns the folder of the flight recordings of the run in `out`.
pub fn flight_folder(out: &Path) -> PathBuf {
    out.join(FLIGHT)
}

/// Returns the rank of a flight recording, from its file name.
pub fn rank_of_file(name: &str) -> Option<usize> {
    name.strip_prefix("rank_")?.strip_suffix(".json")?.parse().ok()
}

/// Returns the names of the flight recordings in `folder`, sorted; other files are ignored.
pub fn files_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| rank_of_file(name).is_some()).collect();
    names.sort();
    names
}

/// Returns a function that makes the flight recording of this rank of `world` when called.
pub fn made_later(world: &Arc<dyn Communicator>) -> MakeFlight {
    let world = Arc::downgrade(world);
    Box::new(move || {
        let flight = world.upgrade().map(|world| world.flight());
        serde_json::to_vec(&flight).unwrap_or_default()
    })
}

/// Writes a rank's flight recording to the run folder when dropped, even by a panic, unless the rank succeeded.
pub struct FlightGuard {
    out: PathBuf,
    held: Option<HeldFolder>,
    world: Arc<dyn Communicator>,
    /// Set once the rank has succeeded.
    pub landed: bool,
}

impl FlightGuard {
    /// Creates a guard for the run in `out`, which writes only while the folder is `held`.
    pub fn new(out: &Path, held: Option<HeldFolder>, world: Arc<dyn Communicator>) -> Self {
        FlightGuard { out: out.to_owned(), held, world, landed: false }
    }

    fn write(&self) -> io::Result<()> {
        let folder = flight_folder(&self.out);
        fs::create_dir_all(&folder)?;
        let flight = serde_json::to_vec(&self.world.flight())?;
        write_atomic(&folder.join(format!("rank_{}.json", self.world.rank())), &flight)
    }
}

impl Drop for FlightGuard {
    fn drop(&mut self) {
        if self.landed || self.held.as_ref().is_some_and(HeldFolder::is_lost) {
            return;
        }
        if std::thread::panicking() {
            self.world.recorder().set_activity("a panic");
        }
        // The run is failing already; a failed write must not hide the reason.
        if let Err(error) = self.write() {
            let out = self.out.display();
            tracing::warn!(%out, %error, "cannot write the flight recorder");
        }
    }
}
