//! The sign of the gradient.

#[cfg(feature = "cube")]
use super::kernels;
#[cfg(feature = "cube")]
use super::rule::{DeviceRule, DeviceShard};
use super::rule::{Rule, ShardRun, UpdateStep};

/// Moves each element by a fixed rate against the sign of its gradient; an element whose gradient is zero does not
/// move. For values that are controlled rather than learned, such as the biases that balance experts: learning rate,
/// weight decay and clipping have no effect. Keeps no state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sign {
    /// Distance by which an element moves per step.
    pub rate: f64,
}

impl Rule for Sign {
    fn name(&self) -> &str {
        "sign"
    }

    fn update(&self, _step: &UpdateStep, run: ShardRun<'_>) {
        let rate = self.rate as f32;
        for (weight, gradient) in run.weights.iter_mut().zip(run.gradient) {
            if *gradient > 0.0 {
                *weight -= rate;
            } else if *gradient < 0.0 {
                *weight += rate;
            }
        }
    }

    #[cfg(feature = "cube")]
    fn on_device(&self) -> Option<&dyn DeviceRule> {
        Some(self)
    }
}

#[cfg(feature = "cube")]
impl DeviceRule for Sign {
    fn update(&self, shard: &DeviceShard<'_>) {
        use cubecl::prelude::*;
        let (client, count) = (shard.client, shard.segments);
        // SAFETY: both have `len` elements, and the table lies inside them.
        unsafe {
            kernels::sign::launch_unchecked(
                client,
                cubecl::calculate_cube_count_elemwise(client, count, CubeDim::new_1d(1)),
                CubeDim::new_1d(DeviceShard::THREADS as u32),
                BufferArg::from_raw_parts(shard.weights.clone(), shard.len),
                BufferArg::from_raw_parts(shard.gradient.clone(), shard.len),
                BufferArg::from_raw_parts(shard.table.clone(), count * 3),
                BufferArg::from_raw_parts(shard.decision.clone(), DeviceShard::DECISION),
                self.rate as f32,
                DeviceShard::VECTOR,
                DeviceShard::THREADS,
            );
        }
    }
}
