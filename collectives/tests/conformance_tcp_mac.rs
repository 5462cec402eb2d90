//! As `conformance_tcp`, with all traffic authenticated.

/// Ranks of one process that talk over the loopback interface, as processes would.
mod backend {
    use crate::support::{Settings, World, share};
    use kiln_collectives::tcp::{self, Ring, Seal, Secret};

    pub const NAME: &str = "tcp";

    pub fn world(world_size: usize, settings: Settings) -> World {
        // Delays themselves are left to the system; the seed chooses the way.
        let ring = settings.delay_seed.is_some_and(|seed| seed % 2 == 1);
        let ranks = tcp::loopback(world_size, |options| {
            options.seal = Seal::Mac;
            options.secret = Secret::new("of this world");
            options.recorder_capacity = settings.recorder_capacity;
            options.on_worker_start = settings.on_worker_start.clone();
            options.read_memory = settings.delay_seed.is_none();
            options.ring = if ring { Ring::Always } else { Ring::Never };
        });
        share(ranks.unwrap())
    }
}

#[path = "conformance/accounting.rs"]
mod accounting;
#[path = "conformance/failures.rs"]
mod failures;
#[path = "conformance/groups.rs"]
mod groups;
#[path = "conformance/lifetime.rs"]
mod lifetime;
#[path = "conformance/results.rs"]
mod results;
#[path = "conformance/support.rs"]
mod support;
