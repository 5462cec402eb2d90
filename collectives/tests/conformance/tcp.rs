//! Ranks of one process that communicate over the loopback interface, as processes would.

use kiln_collectives::tcp::{self, Ring, Seal, Secret};
use kiln_conformance::{Settings, World, share};

/// Creates ranks that read each other's memory or, with a delay seed, use sockets, directly or on the ring.
pub fn world(seal: Seal, world_size: usize, settings: Settings) -> World {
    // The seed selects the algorithm; the system provides the delays.
    let ring = settings.delay_seed.is_some_and(|seed| seed % 2 == 1);
    let ranks = tcp::loopback(world_size, |options| {
        if seal != Seal::Off {
            options.seal = seal;
            options.secret = Secret::new("of this world");
        }
        options.recorder_capacity = settings.recorder_capacity;
        options.on_worker_start = settings.on_worker_start.clone();
        options.read_memory = settings.delay_seed.is_none();
        options.ring = if ring { Ring::Always } else { Ring::Never };
    });
    share(ranks.unwrap())
}
