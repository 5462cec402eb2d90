//! Rules that update parameters from gradients.

use std::fmt::Debug;

use burn::tensor::Tensor;
#[cfg(feature = "cube")]
use cubecl::{prelude::Client, server::Handle};
#[cfg(feature = "cube")]
use kiln_collectives::DType;

/// A rule that updates parameters, such as AdamW. An [`Optimizer`](super::Optimizer) assigns rules to parameters.
///
/// A rule's state is kept alongside the weights as *slots*: named f32 values, one per element, which are zero before
/// the first update. They are sharded, saved, offloaded and counted like the weights. A rule on whole matrices may also
/// have [owned slots](Rule::owned_slots) of any shape, which belong to the rank that owns the matrix.
///
/// Most rules update each element independently, from its gradient and state, and therefore work on shards. Such a
/// rule only has [`Rule::update`]. A rule that [works on whole matrices](Rule::is_whole) has three steps:
///
/// 1. [`Rule::direct`] computes a direction from the gradient, element by element, on the shards;
/// 2. [`Rule::transform`], or [`Rule::transform_owned`] on the host, computes updates from the directions of whole
///    matrices, on the rank that owns each matrix;
/// 3. [`Rule::update`] gets the shard of the updates instead of the gradient.
pub trait Rule: Debug + Send + Sync {
    /// Returns the rule's name, such as `adamw`.
    fn name(&self) -> &str;

    /// Returns the names of the slots, as in checkpoints, such as `exp_avg`.
    fn slots(&self) -> &[&'static str] {
        &[]
    }

    /// Returns the settings of a parameter of this shape, before its options are applied.
    fn settings(&self, shape: &[usize]) -> Settings {
        let _ = shape;
        Settings::default()
    }

    /// Updates adjacent elements on the host. May be called several times per step.
    fn update(&self, step: &UpdateStep, run: ShardRun<'_>);

    /// Returns whether the rule works on whole matrices; by default, if it has [owned slots](Rule::owned_slots).
    fn is_whole(&self) -> bool {
        !self.owned_slots().is_empty()
    }

    /// Replaces the gradients of adjacent elements by directions, on the host.
    fn direct(&self, step: &UpdateStep, run: DirectionRun<'_>) {
        let _ = (step, run);
    }

    /// Computes the updates of `matrices` `[matrices, rows, columns]`, which are directions in f32, and returns them
    /// in the same shape. The result for a matrix must not depend on the others.
    fn transform(&self, matrices: Tensor<3>) -> Tensor<3> {
        matrices
    }

    /// Returns the names of the owned slots: f32 values of any shape for a whole parameter, such as a preconditioner.
    /// Only for rules on whole matrices that run on the host. The rank that owns a parameter keeps them, and they are
    /// zero before the first update. The names differ from those of [`Rule::slots`].
    fn owned_slots(&self) -> &[&'static str] {
        &[]
    }

    /// Returns the shape of an owned slot for a parameter of this `shape`; a shape without elements if such a parameter
    /// does not have it.
    fn owned_shape(&self, slot: &str, shape: &[usize]) -> Vec<usize> {
        let _ = slot;
        shape.to_vec()
    }

    /// Computes the updates of one parameter on the host, and updates its owned slots. Called once per step, on the
    /// rank that owns the parameter. Returns the updates in the shape of the matrices.
    fn transform_owned(&self, step: &UpdateStep, run: OwnedRun<'_>) -> Tensor<3> {
        let _ = step;
        self.transform(run.matrices)
    }

    /// Returns the GPU implementation of the rule, or `None` if it only runs on the host.
    #[cfg(feature = "cube")]
    fn on_device(&self) -> Option<&dyn DeviceRule> {
        None
    }
}

/// Settings for the updates of one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Factor for the learning rate of a step.
    pub learning_rate: f64,
    /// Decoupled weight decay: a step multiplies weights by 1 - learning rate × weight decay.
    pub weight_decay: f64,
    /// Additional factor for the update that does not affect weight decay.
    pub scale: f64,
    /// Index of the parameter's learning rate in [`LearningRates`]; 0 is the first.
    pub schedule: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { learning_rate: 1.0, weight_decay: 0.0, scale: 1.0, schedule: 0 }
    }
}

impl Settings {
    /// Returns the factor of a weight for weight decay in a step with this learning rate.
    pub fn kept(&self, learning_rate: f64) -> f32 {
        (1.0 - learning_rate * self.learning_rate * self.weight_decay) as f32
    }
}

/// The learning rates of a step. All parameters use the first one, unless [`Settings::schedule`] selects
/// another.
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
    /// Creates learning rates: the first one, and those of schedules 1, 2 and so on.
    pub fn new(first: f64, others: Vec<f64>) -> Self {
        LearningRates { first, others }
    }

    /// Returns the learning rate of a schedule, or the first one if the schedule has none.
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
    /// Number of the update, counted from 1.
    pub step: u64,
    /// The learning rate from the parameters' schedule; [`Settings::learning_rate`] still multiplies it.
    pub learning_rate: f64,
    /// Factor for the gradients, which includes clipping.
    pub gradient_factor: f64,
}

/// Adjacent elements of parameters with the same settings, in host memory. All slices have the same length.
#[derive(Debug)]
pub struct ShardRun<'a> {
    /// The f32 master weights.
    pub weights: &'a mut [f32],
    /// The reduced gradient, or the update computed by [`Rule::transform`] if the rule works on whole
    /// matrices.
    pub gradient: &'a [f32],
    /// The slots, in the order of [`Rule::slots`].
    pub slots: Vec<&'a mut [f32]>,
    /// Settings of the parameters.
    pub settings: Settings,
}

/// Adjacent elements whose directions are computed, in host memory. All slices have the same length.
#[derive(Debug)]
pub struct DirectionRun<'a> {
    /// The reduced gradient, replaced by the direction.
    pub gradient: &'a mut [f32],
    /// The slots, in the order of [`Rule::slots`].
    pub slots: Vec<&'a mut [f32]>,
}

/// A whole parameter on the rank that owns it, in host memory.
#[derive(Debug)]
pub struct OwnedRun<'a> {
    /// Full name of the parameter, such as `layers.3.attention.q_proj.weight`.
    pub name: &'a str,
    /// The directions `[matrices, rows, columns]` in f32; a vector is one row. Unless the rule has its own
    /// [`Rule::direct`], these are the reduced gradient without [`UpdateStep::gradient_factor`].
    pub matrices: Tensor<3>,
    /// The owned slots, in the order of [`Rule::owned_slots`], as `[matrices, rows, columns]`; without elements if the
    /// parameter does not have the slot. Replace them by their new values, of the same shape.
    pub slots: &'a mut [Tensor<3>],
}

/// The GPU implementation of a rule. The host does not wait for the decision whether to update.
#[cfg(feature = "cube")]
pub trait DeviceRule: Send + Sync {
    /// Creates the rule's state in GPU memory, after `updates` updates. The state is kept from step to step and must
    /// not be empty. The default, one unused f32, is for rules without state; a rule with state also needs
    /// [`DeviceRule::prepare`].
    fn state(&self, client: &Client, updates: u64) -> Handle {
        let _ = updates;
        client.create_from_slice(bytemuck::bytes_of(&0.0f32))
    }

    /// Queues the computations that are needed once per step and learning rate, each of which has its own `state`:
    /// updates `state`, if `decision` allows the update.
    fn prepare(&self, client: &Client, state: &Handle, decision: &Handle, learning_rate: f64) {
        let _ = (client, state, decision, learning_rate);
    }

    /// Queues [`Rule::update`] of one parameter group's shard.
    fn update(&self, shard: &DeviceShard<'_>);

    /// Returns whether `update` writes [`DeviceShard::compute`] if it is present. Otherwise, weights are cast to the
    /// compute dtype before their next use.
    fn writes_compute(&self) -> bool {
        false
    }

    /// Queues [`Rule::direct`] of one parameter group's shard.
    fn direct(&self, shard: &DeviceShard<'_>) {
        let _ = shard;
    }
}

/// A dtype to which a rule rounds weights on a GPU.
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
    /// Returns the variant for `dtype`, if there is one.
    pub(super) fn of(dtype: DType) -> Option<HalfDType> {
        match dtype {
            DType::BF16 => Some(HalfDType::Bf16),
            DType::F16 => Some(HalfDType::F16),
            _ => None,
        }
    }
}

/// One parameter group's shard on a GPU, or the parameters in it that have the same settings apart from whether they
/// decay. It is cut into segments, each of which belongs to one parameter.
#[cfg(feature = "cube")]
#[derive(Clone)]
pub struct DeviceShard<'a> {
    /// The queue.
    pub client: &'a Client,
    /// The f32 master weights.
    pub weights: &'a Handle,
    /// The weights in the compute dtype, which the rule may update as well.
    pub compute: Option<(&'a Handle, HalfDType)>,
    /// The reduced gradient, or the direction or update computed from it, in f32.
    pub gradient: &'a Handle,
    /// The slots, in the order of [`Rule::slots`], f32.
    pub slots: Vec<&'a Handle>,
    /// Number of elements of each of these buffers.
    pub len: usize,
    /// Three u32 per segment: its start and its end, in vectors of [`DeviceShard::VECTOR`] elements, and
    /// whether weight decay applies.
    pub table: &'a Handle,
    /// Number of segments.
    pub segments: usize,
    /// Six f32 values: loss, norm, whether to update (if positive), factor for the gradient, loss scale, number of
    /// updates since the loss scale was changed.
    pub decision: &'a Handle,
    /// The rule's own state, from [`DeviceRule::state`].
    pub state: &'a Handle,
    /// The learning rate of its parameters' schedule.
    pub learning_rate: f64,
    /// Settings of the parameters that decay; the others have no weight decay.
    pub settings: Settings,
}

#[cfg(feature = "cube")]
impl DeviceShard<'_> {
    /// Number of elements that a thread reads at once. All parameters start at multiples of this, and the gaps
    /// between them are zero.
    pub const VECTOR: usize = 4;
    /// Number of values in a decision.
    pub const DECISION: usize = 6;
    /// Number of threads per cube; one cube processes one segment.
    pub const THREADS: usize = 256;
}
