//! Ranks of one process that talk over the loopback interface, as processes would.

use crate::support::{Settings, World, share};
use kiln_collectives::tcp::{self, Ring, Seal, Secret};

/// Reads the memory of peers, or, with a delay seed, goes over sockets straight or around the ring.
pub fn world(world_size: usize, settings: Settings, seal: Seal) -> World {
    // Delays themselves are left to the system; the seed chooses the way.
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
