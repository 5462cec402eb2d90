//! The guarantees of every communicator, checked on ranks connected by TCP: with peer reads, and, in worlds
//! created with a delay seed, over sockets, directly or on the ring.

use kiln_collectives::tcp::Seal;

include!("conformance/suite.rs");

#[path = "conformance/tcp.rs"]
mod backend;
#[cfg(feature = "wgpu")]
#[path = "conformance/host_only.rs"]
mod host_only;

const SEAL: Seal = Seal::Off;

#[cfg(feature = "wgpu")]
#[test]
fn buffers_on_a_gpu_are_refused() {
    host_only::check_refusal(|| support::world(2));
}
