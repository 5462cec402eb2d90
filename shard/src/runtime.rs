//! What all units of one rank share: communicators, policy, buffers, statistics, the first error.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use burn::tensor::Device;
use kiln_collectives::{Buffer, Communicator, DType, Work};

use crate::awake::Awake;
use crate::error::ShardError;
use crate::flat::Placement;
use crate::memory::Held;
use crate::mesh::Mesh;
use crate::policy::Policy;
use crate::reducer::Reducer;
use crate::unit::Unit;
use crate::update::Progress;

/// Locks a mutex whose data stays valid when a thread panics while holding it: every critical
/// section in this crate leaves its state consistent between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shared state of one rank.
pub(crate) struct Runtime {
    pub(crate) policy: Policy,
    pub(crate) mesh: Mesh,
    pub(crate) rank: usize,
    pub(crate) world: Arc<dyn Communicator>,
    /// Ranks that share one copy of the model; `None` when a rank holds a whole copy.
    pub(crate) shard: Option<Arc<dyn Communicator>>,
    /// Ranks that hold the same shard; `None` when there is one copy only.
    pub(crate) replicate: Option<Arc<dyn Communicator>>,
    /// Where weights are; set by the first part.
    placement: OnceLock<Placement>,
    pub(crate) pool: BufferPool,
    awake: Awake,
    pub(crate) live: Arc<LiveUnits>,
    pub(crate) reducer: Reducer,
    pub(crate) progress: Progress,
    /// The most bytes of a GPU that this rank was seen to hold.
    pub(crate) device_peak: AtomicU64,
    /// Whether the current backward is the last of its step: then gradients are reduced.
    pub(crate) last_micro_batch: AtomicBool,
    /// How far the current forward pass has come; a part that is used a second time lies behind.
    pub(crate) forward_position: AtomicUsize,
    /// Units in the order of the forward pass; set once when the engine is complete.
    units: OnceLock<Vec<Weak<Unit>>>,
    waited: Mutex<Duration>,
    error: Mutex<Option<ShardError>>,
    pinned: Mutex<Vec<String>>,
}

impl Runtime {
    pub(crate) fn new(
        policy: Policy,
        mesh: Mesh,
        world: Arc<dyn Communicator>,
        shard: Option<Arc<dyn Communicator>>,
        replicate: Option<Arc<dyn Communicator>>,
    ) -> Self {
        Runtime {
            policy,
            mesh,
            rank: world.rank(),
            world,
            shard,
            replicate,
            placement: OnceLock::new(),
            pool: BufferPool::default(),
            awake: Awake::new(),
            live: Arc::default(),
            reducer: Reducer::default(),
            progress: Progress::default(),
            device_peak: AtomicU64::new(0),
            last_micro_batch: AtomicBool::new(true),
            forward_position: AtomicUsize::new(0),
            units: OnceLock::new(),
            waited: Mutex::default(),
            error: Mutex::default(),
            pinned: Mutex::default(),
        }
    }

    /// Where gathered weights and gradients are. What ranks only tell each other is on the host.
    pub(crate) fn placement(&self) -> &Placement {
        self.placement.get().unwrap_or(&Placement::Host)
    }

    /// Where master weights, reduced gradients and moments are.
    pub(crate) fn state_placement(&self) -> &Placement {
        if self.policy.offload { &Placement::Host } else { self.placement() }
    }

    /// Whether they are elsewhere than what computes.
    pub(crate) fn offloads(&self) -> bool {
        self.policy.offload && !self.placement().is_host()
    }

    /// Settles where weights are, unless an earlier part has.
    pub(crate) fn place_on(&self, device: &Device) -> &Placement {
        self.placement.get_or_init(|| Placement::of_device(device))
    }

    /// Keeps the rank's compute threads from sleeping, for a moment, if they compute.
    pub(crate) fn keep_awake(&self) {
        if self.placement().is_host() {
            self.awake.keep();
        }
    }

    pub(crate) fn set_units(&self, units: &[Arc<Unit>]) {
        let weak = units.iter().map(Arc::downgrade).collect();
        // A second call would find the same units: the engine is built once.
        let _ = self.units.set(weak);
    }

    pub(crate) fn unit(&self, position: usize) -> Option<Arc<Unit>> {
        self.units.get()?.get(position)?.upgrade()
    }

    pub(crate) fn last_unit(&self) -> Option<Arc<Unit>> {
        self.units.get()?.last()?.upgrade()
    }

    /// Frees the frozen units at the end of backward, which has not left those before the first
    /// trained parameter.
    pub(crate) fn reshard_frozen(&self) {
        for unit in self.units.get().into_iter().flatten().filter_map(Weak::upgrade) {
            if !unit.layout.trainable && unit.reshards_after_forward() {
                unit.reshard();
            }
        }
    }

    /// Waits for a collective. On failure the error is kept, the other ranks are told, and `None`
    /// is returned; the caller goes on with zeros until the step is checked.
    pub(crate) fn wait(&self, work: Work) -> Option<Buffer> {
        let start = Instant::now();
        let result = work.wait(self.policy.timeout);
        *lock(&self.waited) += start.elapsed();
        result.map_err(|error| self.fail(error.into())).ok()
    }

    /// Keeps the first error and makes the other ranks stop waiting for this one.
    pub(crate) fn fail(&self, error: ShardError) {
        let mut first = lock(&self.error);
        if first.is_none() {
            self.world.abort(&error.to_string());
            *first = Some(error);
        }
    }

    pub(crate) fn failed(&self) -> bool {
        lock(&self.error).is_some()
    }

    pub(crate) fn check(&self) -> Result<(), ShardError> {
        lock(&self.error).clone().map_or(Ok(()), Err)
    }

    pub(crate) fn is_last_micro_batch(&self) -> bool {
        self.last_micro_batch.load(Ordering::Relaxed)
    }

    /// Notes that a view outlived the weights of `unit`. Each unit is logged once, by rank 0: the
    /// other ranks run the same model.
    pub(crate) fn report_pinned(&self, unit: &str) {
        let mut pinned = lock(&self.pinned);
        if !pinned.iter().any(|name| name == unit) {
            if self.rank == 0 {
                tracing::warn!(
                    unit,
                    "a view still pins the gathered weights of this unit, so they stay in memory; \
                     keep the weight itself instead of a transposed, sliced or detached view of it"
                );
            }
            pinned.push(unit.to_owned());
        }
    }

    pub(crate) fn pinned(&self) -> Vec<String> {
        lock(&self.pinned).clone()
    }

    /// Time spent waiting for collectives since the last call.
    pub(crate) fn take_waited(&self) -> Duration {
        std::mem::take(&mut lock(&self.waited))
    }
}

/// A gather buffer that waits for its next use inside a pass. One is enough: when a unit is freed,
/// the next one is computed with and the one after it takes the buffer.
#[derive(Default)]
pub(crate) struct BufferPool {
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    free: Option<Buffer>,
    /// Whether the current pass will gather again.
    open: bool,
}

impl BufferPool {
    /// A buffer of the given dtype and length, with arbitrary contents.
    pub(crate) fn take(&self, placement: &Placement, dtype: DType, len: usize) -> Buffer {
        // What is here with another size makes room before allocating.
        let free = lock(&self.state).free.take();
        match free {
            Some(buffer) if buffer.dtype() == dtype && buffer.len() == len => buffer,
            other => {
                drop(other);
                placement.empty(dtype, len)
            }
        }
    }

    /// Keeps `buffer` for the next gather of the pass, if there will be one and no other rank reads it.
    pub(crate) fn put(&self, buffer: Buffer) {
        if buffer.is_shared() {
            return;
        }
        let mut state = lock(&self.state);
        if state.open && state.free.is_none() {
            state.free = Some(buffer);
        }
    }

    /// Starts keeping buffers.
    pub(crate) fn open(&self) {
        lock(&self.state).open = true;
    }

    /// Frees what is here and keeps nothing more, because nothing will be gathered soon.
    pub(crate) fn close(&self) {
        *lock(&self.state) = PoolState::default();
    }
}

/// Counts the units that are unsharded at one time, kept outer parts aside.
#[derive(Default)]
pub(crate) struct LiveUnits {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl LiveUnits {
    pub(crate) fn enter(self: &Arc<Self>) -> LiveUnit {
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        self.peak.fetch_max(now, Ordering::Relaxed);
        LiveUnit(self.clone())
    }

    pub(crate) fn take_peak(&self) -> usize {
        self.peak.swap(self.now.load(Ordering::Relaxed), Ordering::Relaxed)
    }
}

/// What is counted for as long as a unit's gathered buffer is there.
#[derive(Default)]
pub(crate) struct Counted {
    pub(crate) _unit: Option<LiveUnit>,
    /// The bytes, where ranks hold the buffer together.
    pub(crate) _held: Option<Held>,
}

/// One unit of the count.
pub(crate) struct LiveUnit(Arc<LiveUnits>);

impl Drop for LiveUnit {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}
