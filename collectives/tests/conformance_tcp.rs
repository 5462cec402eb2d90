//! The conformance suite on ranks connected by TCP, in one process over the loopback interface: with peer reads,
//! and, in worlds created with a delay seed, over sockets, directly or on the ring.

use kiln_collectives::tcp::Seal;
use kiln_conformance::{Settings, World};

#[path = "conformance/tcp.rs"]
mod tcp;

fn world(world_size: usize, settings: Settings) -> World {
    tcp::world(Seal::Off, world_size, settings)
}

kiln_conformance::tests!("tcp", world);

#[cfg(feature = "wgpu")]
#[path = "conformance/host_only.rs"]
mod host_only;

#[cfg(feature = "wgpu")]
#[test]
fn buffers_on_a_gpu_are_refused() {
    host_only::check_refusal(|| world(2, Settings::default()));
}
