//! Connects to the other ranks, unless a stop is requested first.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use kiln_collectives::tcp::{Arrivals, JoinError};

use super::folder::Meeting;
use crate::error::{Result, TrainError};
use crate::world::{self, World};
use kiln_config::{CommBackend, CommSection};
use kiln_launch::place::RankEnv;

const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A wait for other ranks that lasts longer than this is shown in the run folder.
const SHOWN_AFTER: Duration = Duration::from_secs(1);

/// Maximum time for which a rank that was asked to stop tries to notify the others.
const FAREWELL: Duration = Duration::from_secs(2);

/// Connects to the other ranks, as the rank at `place`. A stop requested of any rank ends the wait of all ranks.
/// If the others cannot be notified within [`FAREWELL`], the joining thread ends with the process.
/// Shows a wait longer than [`SHOWN_AFTER`] in the run folder `out`, for `kiln status`.
pub(super) fn join(
    place: &RankEnv,
    comm: &CommSection,
    stop: &Arc<AtomicBool>,
    out: Option<&Path>,
) -> Result<World> {
    let arrivals = Arrivals::default();
    if comm.backend == CommBackend::Mpi {
        // MPI must be started on the thread that uses it, and waits on its own.
        return world::join(place, comm, None, &arrivals);
    }
    let (done, joined) = mpsc::channel();
    let (here, options, told, come) = (place.clone(), comm.clone(), Arc::clone(stop), arrivals.clone());
    thread::Builder::new()
        .name("kiln-join".to_owned())
        .spawn(move || _ = done.send(world::join(&here, &options, Some(&told), &come)))
        .map_err(TrainError::threads("a thread that joins the other ranks"))?;
    let mut until: Option<Instant> = None;
    let (begun, mut meeting) = (Instant::now(), None);
    loop {
        match joined.recv_timeout(LOOK_EVERY) {
            Ok(Err(TrainError::Join(JoinError::Stopped { .. }))) => {
                return Err(TrainError::Stopped);
            }
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(TrainError::Crash("joining the other ranks panicked".to_owned()));
            }
        }
        if let Some(out) = out.filter(|_| begun.elapsed() > SHOWN_AFTER) {
            meeting.get_or_insert_with(|| Meeting::begin(out, place, comm)).show(arrivals.ranks());
        }
        if stop.load(Ordering::Relaxed)
            && Instant::now() > *until.get_or_insert_with(|| Instant::now() + FAREWELL)
        {
            return Err(TrainError::Stopped);
        }
    }
}
