//! The conformance suite of Kiln's collectives on this backend.

use kiln_conformance::{Settings, World, share};

fn world(world_size: usize, settings: Settings) -> World {
    share(own_backend::world(world_size, settings.recorder_capacity, settings.on_worker_start))
}

kiln_conformance::tests!("table", world);
