//! As `conformance_tcp`, with all traffic encrypted.

/// Ranks over TCP.
mod backend {
    use crate::support::{Settings, World};
    use kiln_collectives::tcp::Seal;

    pub const NAME: &str = "tcp";

    pub fn world(world_size: usize, settings: Settings) -> World {
        crate::tcp::world(world_size, settings, Seal::Encrypt)
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
#[path = "conformance/tcp.rs"]
mod tcp;
