//! State that all parameter groups of one rank share: communicators, policy, gather buffers, the time spent waiting,
//! and the first error. Called `FSDPCommContext` in FSDP2.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use burn::backend::autodiff::NodeId;
use burn::tensor::Device;
use kiln_collectives::{Buffer, Communicator, DType, Phase, Work};

use crate::buffers::{BufferPool, Placement, UnshardedCount};
use crate::error::ShardError;
use crate::memory::{MemoryOwner, owned_by};
use crate::mesh::Mesh;
use crate::policy::Policy;
use crate::spin_wait::SpinWait;
use crate::sync::lock;

/// The direction of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

impl Direction {
    /// Returns the phase under which collectives in this direction are recorded.
    pub(crate) fn phase(self) -> Phase {
        match self {
            Direction::Forward => Phase::Forward,
            Direction::Backward => Phase::Backward,
        }
    }
}

/// Shared state of one rank.
pub(crate) struct CommContext {
    pub(crate) policy: Policy,
    pub(crate) mesh: Mesh,
    pub(crate) rank: usize,
    pub(crate) world: Arc<dyn Communicator>,
    /// Communicator of the ranks that share one copy of the model; `None` if a rank holds a whole copy.
    pub(crate) shard: Option<Arc<dyn Communicator>>,
    /// Communicator of the ranks that hold the same shard; `None` if there is only one copy of the model.
    pub(crate) replicate: Option<Arc<dyn Communicator>>,
    /// Placement of the weights, and the device that computes with them; set by the first module.
    placement: OnceLock<(Placement, Device)>,
    pub(crate) pool: Arc<BufferPool>,
    spin_wait: SpinWait,
    pub(crate) unsharded: Arc<UnshardedCount>,
    /// True during the backward of the last micro-batch of a step.
    last_micro_batch: AtomicBool,
    /// Position that the current forward pass has reached. A module that is used again has a lower position.
    pub(crate) forward_position: AtomicUsize,
    error: Mutex<Option<ShardError>>,
    pinned: Mutex<Vec<String>>,
    /// Marks a frozen weight on the tape for the operations that will read it.
    mark_frozen: OnceLock<fn(NodeId)>,
}

impl CommContext {
    /// Splits `world` into the groups that `policy.strategy` needs. Collective.
    pub(crate) fn new(
        world: Arc<dyn Communicator>,
        policy: Policy,
        shard_size: Option<usize>,
    ) -> Result<Self, ShardError> {
        let mesh = Mesh::new(policy.strategy, world.world_size(), shard_size)?;
        let (row, column) = (mesh.replicate_index(world.rank()), mesh.shard_index(world.rank()));
        let group = |name, size, color, key| match size {
            1 => Ok(None),
            size if size == world.world_size() => Ok(Some(world.clone())),
            _ => world.split_within(name, Some(color as u32), key as i64, policy.timeout),
        };
        let shard = match policy.shards_alone(world.world_size()) {
            true => Some(world.clone()),
            false => group("shard", mesh.shard_size(), row, column)?,
        };
        let replicate = group("replicate", mesh.replicate_size(), column, row)?;
        Ok(CommContext {
            policy,
            mesh,
            rank: world.rank(),
            world,
            shard,
            replicate,
            placement: OnceLock::new(),
            pool: Arc::default(),
            spin_wait: SpinWait::new(),
            unsharded: Arc::default(),
            last_micro_batch: AtomicBool::new(true),
            forward_position: AtomicUsize::new(0),
            error: Mutex::default(),
            pinned: Mutex::default(),
            mark_frozen: OnceLock::new(),
        })
    }

    /// Sets how frozen weights are marked.
    pub(crate) fn mark_frozen_with(&self, mark: fn(NodeId)) {
        // A second call would set the same function.
        let _ = self.mark_frozen.set(mark);
    }

    /// Marks the frozen weight `node` on the tape for the operations that will read it.
    pub(crate) fn mark_frozen(&self, node: NodeId) {
        if let Some(mark) = self.mark_frozen.get() {
            mark(node);
        }
    }

    /// Returns where gathered weights and gradients are. Messages between ranks are in host memory.
    pub(crate) fn placement(&self) -> &Placement {
        self.placement.get().map_or(&Placement::Host, |(placement, _)| placement)
    }

    /// Returns the device that holds master weights, reduced gradients and optimizer state, without autodiff.
    pub(crate) fn state_device(&self) -> Device {
        match self.placement.get() {
            Some((_, device)) if !self.policy.offload => device.clone(),
            _ => Device::flex(),
        }
    }

    /// Returns where master weights, reduced gradients and optimizer state are.
    pub(crate) fn state_placement(&self) -> &Placement {
        if self.policy.offload { &Placement::Host } else { self.placement() }
    }

    /// Returns `true` if master weights and optimizer state are on the host although a GPU computes.
    pub(crate) fn offloads(&self) -> bool {
        self.policy.offload && !self.placement().is_host()
    }

    /// Places the weights on `device`, unless an earlier module has already placed them.
    pub(crate) fn place_on(&self, device: &Device) -> &Placement {
        let place = || (Placement::from_device(device), device.clone().without_autodiff());
        &self.placement.get_or_init(place).0
    }

    /// Returns a buffer for gathered weights, with arbitrary contents.
    pub(crate) fn gather_buffer(&self, dtype: DType, len: usize) -> Buffer {
        let new = || self.placement().empty(dtype, len);
        self.pool.take(dtype, len).unwrap_or_else(|| owned_by(MemoryOwner::GatheredWeights, new))
    }

    /// Keeps the rank's compute threads awake for a short time, if they compute.
    pub(crate) fn keep_awake(&self) {
        if self.placement().is_host() {
            self.spin_wait.keep();
        }
    }

    /// Waits for a collective. If it fails, stores the error, notifies the other ranks and returns `None`; the caller
    /// continues with zeros until the error is checked.
    pub(crate) fn wait(&self, work: Work) -> Option<Buffer> {
        let site = work.site().map(|site| (Arc::clone(&site.group), site.sequence, Instant::now()));
        let result = work.wait(self.policy.timeout);
        if let Some((group, sequence, start)) = site {
            self.world.recorder().waited(&group, sequence, start);
        }
        result.map_err(|error| self.fail(error.into())).ok()
    }

    /// Stores the first error and makes the other ranks stop waiting for this one.
    pub(crate) fn fail(&self, error: ShardError) {
        let mut first = lock(&self.error);
        if first.is_none() {
            self.world.abort(&error.to_string());
            *first = Some(error);
        }
    }

    /// Returns the value. If `result` is an error, passes it to [`CommContext::fail`] and returns `None`.
    pub(crate) fn or_fail<T>(&self, result: Result<T, ShardError>) -> Option<T> {
        result.map_err(|error| self.fail(error)).ok()
    }

    pub(crate) fn failed(&self) -> bool {
        lock(&self.error).is_some()
    }

    /// Returns the first error, if there is one.
    pub(crate) fn check(&self) -> Result<(), ShardError> {
        lock(&self.error).clone().map_or(Ok(()), Err)
    }

    /// Returns the first error. Call this only after an operation has failed.
    pub(crate) fn failure(&self) -> ShardError {
        match self.check() {
            Err(error) => error,
            Ok(()) => unreachable!("invariant: a failed wait has left an error"),
        }
    }

    pub(crate) fn begin_backward(&self, last_micro_batch: bool) {
        self.last_micro_batch.store(last_micro_batch, Ordering::Relaxed);
    }

    pub(crate) fn is_last_micro_batch(&self) -> bool {
        self.last_micro_batch.load(Ordering::Relaxed)
    }

    /// Returns true if the current backward reduces gradients.
    pub(crate) fn reduces(&self) -> bool {
        let communicates = self.shard.is_some() || self.replicate.is_some();
        self.policy.reduces(self.is_last_micro_batch(), communicates)
    }

    /// Reports that a view outlived the weights of `group`. Each group is logged once, by rank 0 only, because all
    /// ranks run the same model.
    pub(crate) fn report_pinned(&self, group: &str) {
        let mut pinned = lock(&self.pinned);
        if !pinned.iter().any(|name| name == group) {
            if self.rank == 0 {
                tracing::warn!(
                    group,
                    "a view still pins the gathered weights of this parameter group, so they stay in \
                     memory; keep the weight itself instead of a transposed, sliced or detached view of it"
                );
            }
            pinned.push(group.to_owned());
        }
    }

    pub(crate) fn pinned(&self) -> Vec<String> {
        lock(&self.pinned).clone()
    }
}
