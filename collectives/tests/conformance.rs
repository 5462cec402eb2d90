//! The guarantees of every communicator, checked on ranks as threads, with and without random delays, and,
//! where it makes sense for a world without peers, on the fake backend.
//!
//! Each backend has its own test binary that runs the same checks: a module `backend` that creates worlds,
//! and the checks from `conformance/`.

/// Ranks as threads.
mod backend {
    use crate::support::{Settings, World, share};
    use kiln_collectives::{LocalGroup, LocalOptions};
    use std::time::Duration;

    pub const NAME: &str = "local";

    pub fn world(world_size: usize, settings: Settings) -> World {
        share(LocalGroup::with_options(
            world_size,
            LocalOptions {
                random_delay_seed: settings.delay_seed,
                max_delay: Duration::from_micros(300),
                recorder_capacity: settings.recorder_capacity,
                on_worker_start: settings.on_worker_start,
            },
        ))
    }

    #[test]
    fn a_world_may_be_empty() {
        drop(LocalGroup::new(0));
    }
}

include!("conformance/suite.rs");

#[cfg(feature = "wgpu")]
#[path = "conformance/device.rs"]
mod device;
#[cfg(feature = "wgpu")]
#[path = "conformance/host_only.rs"]
mod host_only;

#[cfg(feature = "wgpu")]
#[test]
fn fake_refuses_buffers_on_a_gpu() {
    host_only::check_refusal(|| support::fake(2, &[]));
}
