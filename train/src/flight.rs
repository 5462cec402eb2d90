//! What a rank leaves behind when its run fails: its flight recorder, as a file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_collectives::Communicator;

use crate::checkpoint::HeldFolder;
use crate::metrics::write_beside;
use crate::process::position::MakeFlight;

/// Folder of the flight recorders inside a run folder.
const FLIGHT: &str = "flight";

/// Folder of the flight recorders of the run in `out`.
pub fn folder_of_run(out: &Path) -> PathBuf {
    out.join(FLIGHT)
}

/// The rank that a file belongs to by its name.
pub(crate) fn rank_of_file(name: &str) -> Option<usize> {
    name.strip_prefix("rank_")?.strip_suffix(".json")?.parse().ok()
}

/// Names of the flight recorders in `folder`, sorted; other files are not ours.
pub(crate) fn files_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| rank_of_file(name).is_some()).collect();
    names.sort();
    names
}

/// Makes the flight recorder of a rank of `world` when it is asked for.
pub(crate) fn made_later(world: &Arc<dyn Communicator>) -> MakeFlight {
    let world = Arc::downgrade(world);
    Box::new(move || {
        let flight = world.upgrade().map(|world| world.flight());
        serde_json::to_vec(&flight).unwrap_or_default()
    })
}

/// Writes a rank's flight recorder to the run folder unless the rank gets through, also when it panics.
pub(crate) struct FlightGuard {
    out: PathBuf,
    held: Option<HeldFolder>,
    world: Arc<dyn Communicator>,
    landed: bool,
}

impl FlightGuard {
    /// Of the run in `out`, for as long as that is `held`.
    pub(crate) fn new(out: &Path, held: Option<HeldFolder>, world: Arc<dyn Communicator>) -> Self {
        FlightGuard { out: out.to_owned(), held, world, landed: false }
    }

    /// Runs the rank.
    pub(crate) fn watch<T, E>(mut self, run: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let outcome = run();
        self.landed = outcome.is_ok();
        outcome
    }

    fn write(&self) -> io::Result<()> {
        let folder = folder_of_run(&self.out);
        fs::create_dir_all(&folder)?;
        let flight = serde_json::to_vec(&self.world.flight())?;
        write_beside(&folder.join(format!("rank_{}.json", self.world.rank())), &flight)
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
        // The run fails already; that its last words are lost must not hide why.
        if let Err(error) = self.write() {
            let out = self.out.display();
            tracing::warn!(%out, %error, "cannot write the flight recorder");
        }
    }
}
