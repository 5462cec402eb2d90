//! The conformance suite on ranks connected by TCP, with all traffic encrypted.

use kiln_collectives::tcp::Seal;
use kiln_conformance::{Settings, World};

#[path = "conformance/tcp.rs"]
mod tcp;

fn world(world_size: usize, settings: Settings) -> World {
    tcp::world(Seal::Encrypt, world_size, settings)
}

kiln_conformance::tests!("tcp", world);
