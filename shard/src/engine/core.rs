//! The engine, its fields, and messages between its ranks.

use std::ops::Range;
#[cfg(feature = "cube")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kiln_collectives::{Buffer, Communicator, DType, Label, Phase};

use crate::buffers::LossSum;
use crate::comm::{CommContext, Reducer};
use crate::error::ShardError;
use crate::layout::{Layout, ParamGroupLayout};
use crate::memory;
use crate::mesh::Mesh;
#[cfg(feature = "cube")]
use crate::optim::DeviceStep;
use crate::optim::{GroupRule, LossScale, Optimizer, Owners};
use crate::param_group::{ParamGroup, ParamGroups};
use crate::policy::Policy;

/// The sharding engine of one rank. Every method that communicates must be called by all ranks in
/// the same order.
pub struct Engine {
    pub(super) context: Arc<CommContext>,
    pub(super) reducer: Arc<Reducer>,
    pub(super) groups: ParamGroups,
    /// Positions of the groups of the last module, which computes the loss.
    pub(super) last: Range<usize>,
    pub(super) layout: Layout,
    pub(super) optimizer: Optimizer,
    /// The rule of each group.
    pub(super) rules: Vec<GroupRule>,
    /// The owner of each matrix, which transforms it.
    pub(super) owners: Owners,
    /// Loss of the current step so far, on this rank.
    pub(super) loss: Arc<Mutex<LossSum>>,
    /// Number of updates made. On a GPU, the number when the run started, because the GPU counts later updates
    /// itself.
    pub(super) updates: AtomicU64,
    /// Initial scale of the loss.
    pub(super) first_scale: Mutex<Option<LossScale>>,
    /// Optimizer steps on a GPU; created by the first backward pass.
    #[cfg(feature = "cube")]
    pub(super) device_step: OnceLock<DeviceStep>,
    /// Maximum observed GPU memory of this rank in bytes.
    device_peak: AtomicU64,
}

impl Engine {
    pub(super) fn new(
        context: Arc<CommContext>,
        reducer: Arc<Reducer>,
        groups: ParamGroups,
        optimizer: Optimizer,
        rules: Vec<GroupRule>,
    ) -> Self {
        let layout =
            Layout { mesh: context.mesh, groups: groups.iter().map(|group| group.layout.clone()).collect() };
        let is_whole = |at: usize| layout.groups[at].trainable && optimizer.rule(rules[at].rule).is_whole();
        let owners = Owners::new(&layout.groups, is_whole);
        let last = groups.last().map_or(0..0, |group| group.options.module.clone());
        Engine {
            context,
            reducer,
            groups,
            last,
            layout,
            optimizer,
            rules,
            owners,
            loss: Arc::default(),
            updates: AtomicU64::new(0),
            first_scale: Mutex::default(),
            #[cfg(feature = "cube")]
            device_step: OnceLock::new(),
            device_peak: AtomicU64::new(0),
        }
    }

    /// Returns the layout of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the owners of the parameters that rules on whole matrices update.
    pub fn owners(&self) -> &Owners {
        &self.owners
    }

    /// Returns the optimizer of [`Engine::update`].
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Returns the arrangement of the ranks.
    pub fn mesh(&self) -> Mesh {
        self.context.mesh
    }

    /// Returns the policy this engine was built with.
    pub fn policy(&self) -> &Policy {
        &self.context.policy
    }

    /// Returns the communicator of all ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.context.world
    }

    /// Sets this rank's current activity other than communication, such as `"data loading"`. Ranks that wait for this
    /// one name the activity in their messages.
    pub fn set_activity(&self, name: &'static str) {
        self.context.world.recorder().set_activity(name);
    }

    /// Returns the first failure, if any. Operations on the tape cannot return errors, so call this after a forward
    /// pass.
    pub fn check(&self) -> Result<(), ShardError> {
        self.context.check()
    }

    /// Returns the chunk that this rank writes; it owns the matrices of this chunk's owner.
    pub(super) fn own_chunk(&self) -> usize {
        ParamGroupLayout::own_chunk(&self.context.mesh, self.context.rank)
    }

    /// Returns the elements of `group`'s flat buffer that this rank holds.
    pub(super) fn shard_of(&self, group: &ParamGroup) -> Range<usize> {
        group.layout.shard_range(&self.context.mesh, self.context.rank)
    }

    /// Sums `values` over all ranks in f64, in rank order. Values that replicas share, such as shards of weights
    /// under `NO_SHARD` and the hybrid strategies, count once per replica; for sums over shards, see
    /// [`Engine::sum_over_shards`]. Collective.
    pub fn sum_over_ranks(&self, label: &str, values: &[f64]) -> Result<Vec<f64>, ShardError> {
        self.all_reduce_f64(Phase::Loss, label, values)
    }

    /// Sums `values` over the ranks that hold different shards, in f64, so that each shard of the model counts once
    /// under every strategy. Collective.
    pub fn sum_over_shards(&self, label: &str, values: &[f64]) -> Result<Vec<f64>, ShardError> {
        let Some(group) = &self.context.shard else { return Ok(values.to_vec()) };
        self.sum_within(&**group, Label::new(label, Phase::Loss), values)
    }

    /// Like [`Engine::sum_over_ranks`], in the given phase. Collective.
    pub fn all_reduce_f64(&self, phase: Phase, label: &str, values: &[f64]) -> Result<Vec<f64>, ShardError> {
        self.sum_within(&*self.context.world, Label::new(label, phase), values)
    }

    fn sum_within(
        &self,
        group: &dyn Communicator,
        label: Label,
        values: &[f64],
    ) -> Result<Vec<f64>, ShardError> {
        let sum = self.context.wait(group.all_reduce(label, Buffer::from_slice(values)));
        self.context.check()?;
        Ok(sum.map_or(Ok(Vec::new()), |sum| sum.as_slice::<f64>().map(<[f64]>::to_vec))?)
    }

    /// Returns the messages of all ranks, in rank order; they may differ in length. Collective.
    pub fn all_gather_bytes(
        &self,
        phase: Phase,
        label: &str,
        message: &[u8],
    ) -> Result<Vec<Vec<u8>>, ShardError> {
        let ranks = self.context.world.world_size();
        let mut lengths = vec![0.0; ranks];
        lengths[self.context.rank] = message.len() as f64;
        // Exact, because messages are far shorter than 2^53 bytes.
        let lengths = self.all_reduce_f64(phase, label, &lengths)?;
        let longest = lengths.iter().fold(0.0, |a: f64, b| a.max(*b)) as usize;
        if longest == 0 {
            return Ok(vec![Vec::new(); ranks]);
        }
        let mut mine = message.to_vec();
        mine.resize(longest, 0);
        let all = Buffer::zeros(DType::U8, longest * ranks);
        let mine = Arc::new(Buffer::from_slice(&mine));
        let work = self.context.world.all_gather(Label::new(label, phase), mine, all);
        let all = self.context.wait(work);
        self.context.check()?;
        let all = all.as_ref().map_or(&[][..], Buffer::as_bytes);
        let messages = all.chunks(longest).zip(lengths);
        Ok(messages.map(|(bytes, length)| bytes[..length as usize].to_vec()).collect())
    }

    /// Returns the names of parameter groups whose gathered weights were kept alive by a view after they
    /// should have been freed.
    pub fn pinned_groups(&self) -> Vec<String> {
        self.context.pinned()
    }

    /// Returns the maximum number of parameter groups that were unsharded at the same time since the last call, not
    /// counting those that stay unsharded from forward to backward.
    pub fn take_peak_unsharded(&self) -> usize {
        self.context.unsharded.take_peak()
    }

    /// Returns the peak number of bytes that this rank has held in the memory that it computes with.
    ///
    /// On the host, these are the bytes allocated by its threads since [`memory::reset_peak`]. On a GPU, this is the
    /// largest number of bytes that CubeCL had reserved for this rank at any call of this method. CubeCL keeps free
    /// memory for reuse, so a call at the end of a step covers the whole step. Memory of the driver, its libraries
    /// and NCCL is not included. Waits for CubeCL's thread, but not for the GPU. Must be called on the rank's own
    /// thread.
    pub fn peak_bytes(&self) -> u64 {
        match self.context.placement().device_bytes() {
            None => memory::peak_bytes(self.context.rank) as u64,
            Some(now) => self.device_peak.fetch_max(now, Ordering::Relaxed).max(now),
        }
    }
}
