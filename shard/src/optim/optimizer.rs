//! How parameters are changed by their gradients.

#[cfg(feature = "cube")]
use cubecl::{prelude::Client, server::Handle};

/// An optimizer that changes each element of a parameter by itself, given the element's gradient and
/// its state. It therefore works on shards.
///
/// Its state is kept beside the weights as *slots*: named f32 values, one per element, which are zero
/// before the first update. They are sharded, saved, offloaded and counted like the weights.
pub trait Optimizer: Send + Sync {
    /// The names of the slots, as in checkpoints, such as `exp_avg`.
    fn slots(&self) -> &'static [&'static str];

    /// Updates neighbouring elements on the host. Called several times in a step.
    fn update(&self, step: &UpdateStep, run: ShardRun<'_>);

    /// What the optimizer keeps in the memory of a GPU from step to step, after `updates` updates.
    #[cfg(feature = "cube")]
    fn device_state(&self, client: &Client, updates: u64) -> Handle;

    /// Queues what is computed once in a step on a GPU: brings `state` up to date, if `decision` says
    /// that there is an update.
    #[cfg(feature = "cube")]
    fn prepare_on_device(&self, client: &Client, state: &Handle, decision: &Handle, learning_rate: f64);

    /// Queues the update of one parameter group's shard on a GPU.
    #[cfg(feature = "cube")]
    fn update_on_device(&self, shard: &DeviceShard<'_>);
}

/// The factors of one optimizer step, the same for every element.
#[derive(Clone, Copy, Debug)]
pub struct UpdateStep {
    /// Counts updates from 1.
    pub step: u64,
    /// The learning rate.
    pub learning_rate: f64,
    /// What clipping multiplies gradients by.
    pub gradient_factor: f64,
}

/// Neighbouring elements of parameters of one kind, in the memory of the host. All slices are as long.
#[derive(Debug)]
pub struct ShardRun<'a> {
    /// The f32 master weights.
    pub weights: &'a mut [f32],
    /// The reduced gradient.
    pub gradient: &'a [f32],
    /// The slots, in the order of [`Optimizer::slots`].
    pub slots: Vec<&'a mut [f32]>,
    /// Whether weight decay applies: to matrices and embeddings, not to norms and biases.
    pub decays: bool,
}

/// One parameter group's shard on a GPU, cut into segments that belong to one parameter each.
#[cfg(feature = "cube")]
pub struct DeviceShard<'a> {
    /// The queue.
    pub client: &'a Client,
    /// The f32 master weights.
    pub weights: &'a Handle,
    /// The reduced gradient, f32.
    pub gradient: &'a Handle,
    /// The slots, in the order of [`Optimizer::slots`], f32.
    pub slots: Vec<&'a Handle>,
    /// Elements of each of these.
    pub len: usize,
    /// Three u32 per segment: its start and its end, in vectors of [`DeviceShard::VECTOR`] elements, and
    /// whether weight decay applies.
    pub table: &'a Handle,
    /// Number of segments.
    pub segments: usize,
    /// f32 values: loss, norm, whether to update (if positive), factor of the gradient, scale of the
    /// loss, updates since that was changed.
    pub decision: &'a Handle,
    /// The optimizer's own state, from [`Optimizer::device_state`].
    pub state: &'a Handle,
    /// The learning rate.
    pub learning_rate: f64,
}

#[cfg(feature = "cube")]
impl DeviceShard<'_> {
    /// Elements that a thread reads at once. All parameters start at multiples of it, and what is
    /// between them is zero.
    pub const VECTOR: usize = 4;
    /// Values of a decision.
    pub const DECISION: usize = 6;
    /// Threads of a cube, which works on one segment.
    pub const THREADS: usize = 256;
}
