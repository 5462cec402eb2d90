//! AdamW.

use rayon::prelude::*;

#[cfg(feature = "cube")]
use cubecl::server::Handle;
#[cfg(feature = "cube")]
use half::{bf16, f16};

#[cfg(feature = "cube")]
use super::kernels;
#[cfg(feature = "cube")]
use super::rule::{DeviceRule, DeviceShard, HalfDType};
use super::rule::{Rule, Settings, ShardRun, UpdateStep};
use crate::buffers::host::TASK;

/// AdamW (Loshchilov and Hutter, 2019), with PyTorch's formulas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Value added to the square root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay of matrices and embeddings; norms and biases are not decayed.
    pub weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 }
    }
}

impl AdamW {
    /// PyTorch's names of the slots: the first and the second moment.
    pub const SLOTS: [&'static str; 2] = ["exp_avg", "exp_avg_sq"];
}

/// Factors of one step on the host, the same for every element.
#[derive(Clone, Copy)]
struct Factors {
    clip: f32,
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    /// Learning rate divided by the bias correction of the first moment.
    step_size: f32,
    /// Square root of the bias correction of the second moment.
    second_root: f32,
    /// Factor of each weight for weight decay.
    keep: f32,
}

impl Rule for AdamW {
    fn name(&self) -> &str {
        "adamw"
    }

    fn slots(&self) -> &[&'static str] {
        &AdamW::SLOTS
    }

    fn settings(&self, shape: &[usize]) -> Settings {
        let decays = shape.len() >= 2;
        Settings { weight_decay: if decays { self.weight_decay } else { 0.0 }, ..Settings::default() }
    }

    fn update(&self, step: &UpdateStep, mut run: ShardRun<'_>) {
        let [first, second] = &mut run.slots[..] else {
            unreachable!("invariant: a rule is given the slots that it names");
        };
        let learning_rate = step.learning_rate * run.settings.learning_rate * run.settings.scale;
        let correction = |beta: f64| 1.0 - beta.powf(step.step as f64);
        let factors = Factors {
            clip: step.gradient_factor as f32,
            beta1: self.beta1 as f32,
            beta2: self.beta2 as f32,
            epsilon: self.epsilon as f32,
            step_size: (learning_rate / correction(self.beta1)) as f32,
            second_root: correction(self.beta2).sqrt() as f32,
            keep: run.settings.kept(step.learning_rate),
        };
        let arch = pulp::Arch::new();
        run.weights
            .par_chunks_mut(TASK)
            .zip(run.gradient.par_chunks(TASK))
            .zip(first.par_chunks_mut(TASK).zip(second.par_chunks_mut(TASK)))
            .for_each(|((weights, gradient), (first, second))| {
                arch.dispatch(
                    #[inline(always)]
                    || update_task(weights, gradient, first, second, factors),
                );
            });
    }

    #[cfg(feature = "cube")]
    fn on_device(&self) -> Option<&dyn DeviceRule> {
        Some(self)
    }
}

#[cfg(feature = "cube")]
impl DeviceRule for AdamW {
    fn state(&self, client: &cubecl::prelude::Client, updates: u64) -> cubecl::server::Handle {
        let powers = [power(self.beta1 as f32, updates), power(self.beta2 as f32, updates)];
        client.create_from_slice(bytemuck::cast_slice(&[powers, [0.0, 1.0]]))
    }

    fn prepare(
        &self,
        client: &cubecl::prelude::Client,
        state: &cubecl::server::Handle,
        decision: &cubecl::server::Handle,
        learning_rate: f64,
    ) {
        use cubecl::prelude::*;
        // SAFETY: the lengths are those of the buffers that the kernel accesses.
        unsafe {
            kernels::adamw_factors::launch_unchecked(
                client,
                CubeCount::new_1d(1),
                CubeDim::new_1d(1),
                BufferArg::from_raw_parts(state.clone(), 4),
                BufferArg::from_raw_parts(decision.clone(), DeviceShard::DECISION),
                self.beta1 as f32,
                self.beta2 as f32,
                learning_rate as f32,
            );
        }
    }

    fn writes_compute(&self) -> bool {
        true
    }

    fn update(&self, shard: &DeviceShard<'_>) {
        use cubecl::prelude::*;
        let [first, second] = shard.slots[..] else {
            unreachable!("invariant: a rule is given the slots that it names");
        };
        let vectors = shard.len / DeviceShard::VECTOR;
        let (client, count) = (shard.client, shard.segments);
        let cubes = cubecl::calculate_cube_count_elemwise(client, count, CubeDim::new_1d(1));
        let units = CubeDim::new_1d(DeviceShard::THREADS as u32);
        // SAFETY: all of them have `len` elements, and the table lies inside them; `len` is a multiple of the
        // vector length. The compute shard has the named type.
        unsafe {
            let values = |handle: &Handle| BufferArg::from_raw_parts(handle.clone(), vectors);
            macro_rules! launch {
                ($dtype:ty, $compute:expr) => {
                    kernels::adamw::launch_unchecked::<$dtype>(
                        client,
                        cubes,
                        units,
                        DeviceShard::VECTOR,
                        values(shard.weights),
                        values(first),
                        values(second),
                        values(shard.gradient),
                        BufferArg::from_raw_parts(shard.table.clone(), count * 3),
                        BufferArg::from_raw_parts(shard.decision.clone(), DeviceShard::DECISION),
                        BufferArg::from_raw_parts(shard.state.clone(), 4),
                        self.beta1 as f32,
                        self.beta2 as f32,
                        self.epsilon as f32,
                        shard.settings.kept(shard.learning_rate),
                        (shard.settings.learning_rate * shard.settings.scale) as f32,
                        $compute,
                        DeviceShard::THREADS,
                    )
                };
            }
            match shard.compute {
                None => launch!(f32, ComptimeOptionArgs::None),
                Some((compute, HalfDType::Bf16)) => launch!(bf16, ComptimeOptionArgs::Some(values(compute))),
                Some((compute, HalfDType::F16)) => launch!(f16, ComptimeOptionArgs::Some(values(compute))),
            }
        }
    }
}

/// Computes `beta` to the power of `updates`, rounded like the kernel that multiplies once per update, so that a
/// resumed run has the same bits.
#[cfg(feature = "cube")]
fn power(beta: f32, updates: u64) -> f32 {
    let mut power = 1.0;
    for _ in 0..updates {
        power *= beta;
        if power == 0.0 {
            break;
        }
    }
    power
}

/// Performs one AdamW step on a task's elements, in a single pass over them.
#[inline(always)]
fn update_task(
    weights: &mut [f32],
    gradient: &[f32],
    first: &mut [f32],
    second: &mut [f32],
    factors: Factors,
) {
    let Factors { clip, beta1, beta2, epsilon, step_size, second_root, keep } = factors;
    let moments = first.iter_mut().zip(second);
    for ((weight, gradient), (first, second)) in weights.iter_mut().zip(gradient).zip(moments) {
        let gradient = gradient * clip;
        *first = beta1 * *first + (1.0 - beta1) * gradient;
        *second = beta2 * *second + (1.0 - beta2) * gradient * gradient;
        let denominator = second.sqrt() / second_root + epsilon;
        *weight = *weight * keep - step_size * (*first / denominator);
    }
}
