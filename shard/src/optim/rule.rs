//! How parameters are changed by their gradients.

use std::fmt::Debug;

use burn::tensor::Tensor;
#[cfg(feature = "cube")]
use cubecl::{prelude::Client, server::Handle};
#[cfg(feature = "cube")]
use kiln_collectives::DType;

/// A rule by which parameters change, such as AdamW. An [`Optimizer`](super::Optimizer) says which rule is
/// whose.
///
/// Its state is kept beside the weights as *slots*: named f32 values, one per element, which are zero
/// before the first update. They are sharded, saved, offloaded and counted like the weights.
///
/// Most rules change each element by itself, given its gradient and its state, and therefore work on shards:
/// [`Rule::update`] is all of such a rule. A rule that [works on whole matrices](Rule::is_whole) has three
/// steps:
///
/// 1. [`Rule::direct`] makes a direction of the gradient, element by element, on the shards;
/// 2. [`Rule::transform`] gets the directions of whole matrices, each on the one rank that owns it, and makes
///    updates of them;
/// 3. [`Rule::update`] gets the shard of the updates in the place of the gradient.
pub trait Rule: Debug + Send + Sync {
    /// What it is called, such as `adamw`.
    fn name(&self) -> &str;

    /// The names of the slots, as in checkpoints, such as `exp_avg`.
    fn slots(&self) -> &[&'static str];

    /// How a parameter of this shape is updated, unless its options say otherwise.
    fn settings(&self, shape: &[usize]) -> Settings {
        let _ = shape;
        Settings::default()
    }

    /// Updates neighbouring elements on the host. Called several times in a step.
    fn update(&self, step: &UpdateStep, run: ShardRun<'_>);

    /// Whether it works on whole matrices.
    fn is_whole(&self) -> bool {
        false
    }

    /// Replaces the gradient of neighbouring elements by their direction, on the host.
    fn direct(&self, step: &UpdateStep, run: DirectionRun<'_>) {
        let _ = (step, run);
    }

    /// The updates of `matrices` `[matrices, rows, columns]`, directions in f32; of the same shape. What it
    /// makes of a matrix must not depend on the others.
    fn transform(&self, matrices: Tensor<3>) -> Tensor<3> {
        matrices
    }

    /// The rule on a GPU; `None` if it knows the host alone.
    #[cfg(feature = "cube")]
    fn on_device(&self) -> Option<&dyn DeviceRule> {
        None
    }
}

/// How one parameter is updated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// What the learning rate of a step is multiplied by.
    pub learning_rate: f64,
    /// Decoupled weight decay: a step multiplies weights by 1 - learning rate × this.
    pub weight_decay: f64,
    /// What the update is multiplied by besides, and weight decay is not.
    pub scale: f64,
    /// Which of the [`LearningRates`] of a step it follows; 0 is the first.
    pub schedule: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { learning_rate: 1.0, weight_decay: 0.0, scale: 1.0, schedule: 0 }
    }
}

impl Settings {
    /// What weight decay leaves of a weight in a step with this learning rate.
    pub fn kept(&self, learning_rate: f64) -> f32 {
        (1.0 - learning_rate * self.learning_rate * self.weight_decay) as f32
    }
}

/// The learning rates of a step. All parameters follow the first, as long as [`Settings::schedule`] names no
/// other.
///
/// ```
/// # use kiln_shard::LearningRates;
/// let rates = LearningRates::new(3e-3, vec![1e-4]);
/// assert_eq!([rates.of(0), rates.of(1)], [3e-3, 1e-4]);
/// // A number is one for all parameters, whatever their settings say.
/// assert_eq!(LearningRates::from(3e-3).of(1), 3e-3);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LearningRates {
    first: f64,
    others: Vec<f64>,
}

impl LearningRates {
    /// The first, and those for the schedules 1, 2 and so on.
    pub fn new(first: f64, others: Vec<f64>) -> Self {
        LearningRates { first, others }
    }

    /// That of a schedule; the first if there is none for it.
    pub fn of(&self, schedule: usize) -> f64 {
        let other = schedule.checked_sub(1).and_then(|index| self.others.get(index));
        other.copied().unwrap_or(self.first)
    }
}

impl From<f64> for LearningRates {
    fn from(first: f64) -> Self {
        LearningRates::new(first, Vec::new())
    }
}

/// The factors of one optimizer step for parameters with the same settings.
#[derive(Clone, Copy, Debug)]
pub struct UpdateStep {
    /// Counts updates from 1.
    pub step: u64,
    /// The learning rate of their schedule, which their settings refer to.
    pub learning_rate: f64,
    /// What clipping multiplies gradients by.
    pub gradient_factor: f64,
}

/// Neighbouring elements of parameters with the same settings, in the memory of the host. All slices are as
/// long.
#[derive(Debug)]
pub struct ShardRun<'a> {
    /// The f32 master weights.
    pub weights: &'a mut [f32],
    /// The reduced gradient; the update that [`Rule::transform`] has made, if the rule works on whole
    /// matrices.
    pub gradient: &'a [f32],
    /// The slots, in the order of [`Rule::slots`].
    pub slots: Vec<&'a mut [f32]>,
    /// How the parameters are updated.
    pub settings: Settings,
}

/// Neighbouring elements of which directions are wanted, in the memory of the host. All slices are as long.
#[derive(Debug)]
pub struct DirectionRun<'a> {
    /// The reduced gradient; the direction afterwards.
    pub gradient: &'a mut [f32],
    /// The slots, in the order of [`Rule::slots`].
    pub slots: Vec<&'a mut [f32]>,
}

/// A rule on a GPU, where nothing on the host waits for what is decided about an update.
#[cfg(feature = "cube")]
pub trait DeviceRule: Send + Sync {
    /// What the rule keeps in the memory of a GPU from step to step, after `updates` updates. Never empty. The default
    /// is for rules without state, one unused f32; a rule that has one also needs [`DeviceRule::prepare`].
    fn state(&self, client: &Client, updates: u64) -> Handle {
        let _ = updates;
        client.create_from_slice(bytemuck::bytes_of(&0.0f32))
    }

    /// Queues what is computed once in a step, for each of its learning rates with a state of its own: brings
    /// `state` up to date, if `decision` says that there is an update.
    fn prepare(&self, client: &Client, state: &Handle, decision: &Handle, learning_rate: f64) {
        let _ = (client, state, decision, learning_rate);
    }

    /// [`Rule::update`] of one parameter group's shard, queued.
    fn update(&self, shard: &DeviceShard<'_>);

    /// Whether `update` writes [`DeviceShard::compute`] where there is one. Where it does not, weights are
    /// cast before they are used again.
    fn writes_compute(&self) -> bool {
        false
    }

    /// [`Rule::direct`] of one parameter group's shard, queued.
    fn direct(&self, shard: &DeviceShard<'_>) {
        let _ = shard;
    }
}

/// A dtype that a rule rounds weights to on a GPU.
#[cfg(feature = "cube")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfDType {
    /// bf16.
    Bf16,
    /// f16.
    F16,
}

#[cfg(feature = "cube")]
impl HalfDType {
    /// `dtype`, if it is one of these.
    pub(super) fn of(dtype: DType) -> Option<HalfDType> {
        match dtype {
            DType::BF16 => Some(HalfDType::Bf16),
            DType::F16 => Some(HalfDType::F16),
            _ => None,
        }
    }
}

/// One parameter group's shard on a GPU, or those of its parameters that have the same settings apart from
/// whether they decay, cut into segments that belong to one parameter each.
#[cfg(feature = "cube")]
#[derive(Clone)]
pub struct DeviceShard<'a> {
    /// The queue.
    pub client: &'a Client,
    /// The f32 master weights.
    pub weights: &'a Handle,
    /// The same in the compute dtype, for a rule to write as well.
    pub compute: Option<(&'a Handle, HalfDType)>,
    /// The reduced gradient, or what has come of it; f32.
    pub gradient: &'a Handle,
    /// The slots, in the order of [`Rule::slots`], f32.
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
    /// The rule's own state, from [`DeviceRule::state`].
    pub state: &'a Handle,
    /// The learning rate of the schedule of its parameters.
    pub learning_rate: f64,
    /// How parameters are updated that decay; others do not decay.
    pub settings: Settings,
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
