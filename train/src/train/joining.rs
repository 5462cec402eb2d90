//! Meeting the other ranks, for as long as nobody asks for a stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::TrainError;
use crate::config::{CommBackend, CommSection};
use crate::place::Place;
use crate::world::{self, World};

/// Between two looks at whether somebody has asked for a stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Meets the other ranks, as the one at `place`. Some of them may not come for long: a stop that is asked for
/// ends the wait, and what is left of it ends with the process.
pub(super) fn join(
    place: &Place,
    comm: &CommSection,
    stop: &AtomicBool,
) -> Result<World, TrainError> {
    if comm.backend == CommBackend::Mpi {
        // MPI is started on the thread that uses it, and waits by itself.
        return world::join(place, comm);
    }
    let (done, joined) = mpsc::channel();
    let (place, comm) = (place.clone(), comm.clone());
    thread::Builder::new()
        .name("kiln-join".to_owned())
        // If nobody listens any more, the process is about to end.
        .spawn(move || _ = done.send(world::join(&place, &comm)))
        .map_err(|error| TrainError::Crash(format!("cannot start a thread: {error}")))?;
    loop {
        match joined.recv_timeout(LOOK_EVERY) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => {
                return Err(TrainError::Stopped);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(TrainError::Crash("joining the other ranks panicked".to_owned()));
            }
        }
    }
}
