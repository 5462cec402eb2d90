//! What every communicator promises, checked on ranks connected by TCP: reading each other's memory,
//! and, in the worlds made with a delay seed, over sockets straight or around the ring.

/// Ranks over TCP.
mod backend {
    use crate::support::{Settings, World};
    use kiln_collectives::tcp::Seal;

    pub const NAME: &str = "tcp";

    pub fn world(world_size: usize, settings: Settings) -> World {
        crate::tcp::world(world_size, settings, Seal::Off)
    }
}

#[path = "conformance/accounting.rs"]
mod accounting;
#[path = "conformance/failures.rs"]
mod failures;
#[path = "conformance/groups.rs"]
mod groups;
#[cfg(feature = "wgpu")]
#[path = "conformance/host_only.rs"]
mod host_only;
#[path = "conformance/lifetime.rs"]
mod lifetime;
#[path = "conformance/results.rs"]
mod results;
#[path = "conformance/support.rs"]
mod support;
#[path = "conformance/tcp.rs"]
mod tcp;

#[cfg(feature = "wgpu")]
#[test]
fn buffers_on_a_gpu_are_refused() {
    host_only::check_refusal(|| support::world(2));
}
