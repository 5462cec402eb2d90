//! The conformance suite on ranks as threads, with and without random delays. With the feature `wgpu`, on
//! buffers on a GPU as well.

use kiln_collectives::{LocalGroup, LocalOptions};
use kiln_conformance::{Settings, World, share};
use std::time::Duration;

fn world(world_size: usize, settings: Settings) -> World {
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

kiln_conformance::tests!("local", world);

#[test]
fn a_world_may_be_empty() {
    drop(LocalGroup::new(0));
}

#[cfg(feature = "wgpu")]
#[path = "conformance/device.rs"]
mod device;
#[cfg(feature = "wgpu")]
#[path = "conformance/host_only.rs"]
mod host_only;

#[cfg(feature = "wgpu")]
#[test]
fn fake_refuses_buffers_on_a_gpu() {
    host_only::check_refusal(|| kiln_conformance::fake(2, &[]));
}
