//! The memory of one rank's parameter groups over a step: which weights, gradients and optimizer state
//! [`kiln_shard::Engine`] holds at each time.
//!
//! Groups, layouts, mesh and all decisions of the policy come from [`kiln_shard`]. Only the order of events is
//! repeated here, because the engine cannot run without tensors: its states own device buffers, burn's tape and
//! real collectives drive its schedule, and it does not know the times and sizes that a plan needs. Running it on
//! empty tensors would allocate the memory that the plan is to predict. The tests in `train/kiln/tests/memory`
//! compare the peaks of both.

use kiln_collectives::{Operation, Phase};
use kiln_model::meta::{GRADIENTS, Held, Ledger, LedgerEvent, Owner};
use kiln_shard::{Mesh, Owners, PlannedGroup, Policy, ShardOptions};

use super::clock::{Axis, Clock, Finish, PlannedCall, Speed};

/// Owner of the f32 master weights.
pub const WEIGHTS: Owner = "weights";
/// Owner of the optimizer's slots.
pub const OPTIMIZER: Owner = "optimizer state";
/// Owner of the whole weights that a rank has gathered.
pub const GATHERED: Owner = "gathered weights";
/// Owner of buffers in transit between ranks.
pub const COMMUNICATION: Owner = "communication";

/// Bytes of an `f32`.
const F32: u64 = 4;

/// Bytes per second between a GPU and the host: what copies over PCIe 4.0 with 16 lanes reach.
const PCIE: f64 = 25e9;
/// Host memory bandwidth in bytes per second for each rank that updates its parameters on the host.
const HOST: f64 = 20e9;

/// Bytes of an `f64`, the type of losses and norms.
const F64: u64 = 8;

/// The buffers that ranks gather weights into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gathers {
    /// Ranks are threads that read one copy, which is freed after the last use.
    Shared,
    /// Each rank has a copy, whose buffer is reused for a later gather of the same size.
    Pooled,
}

/// A parameter group: its sizes, and the memory that it holds.
struct Group {
    /// Elements of the flat buffer, and of this rank's shard of it.
    padded: u64,
    shard: u64,
    /// Number of values that the optimizer keeps per element.
    slots: u64,
    /// Number of values in the owned slots of the rank with the most.
    owned: u64,
    trainable: bool,
    is_whole: bool,
    /// Shapes of the group's parameters.
    shapes: Vec<Vec<usize>>,
    options: ShardOptions,
    state: Vec<Held>,
    /// This rank's shard in the compute dtype: on a GPU it may be kept, from the first gather on.
    compute: Option<Held>,
    weights: Weights,
    gradient: Gradient,
}

enum Weights {
    Sharded,
    /// The weights are being gathered; `_sent` is this rank's shard in the compute dtype.
    Unsharding {
        whole: Held,
        _sent: Option<Held>,
        finish: Option<Finish>,
    },
    Unsharded(Held),
}

enum Gradient {
    None,
    /// `flat` is the sum over the current micro-batches; `earlier` is the reduced sum of earlier ones, if each
    /// micro-batch is reduced.
    Accumulating {
        flat: Held,
        earlier: Option<Held>,
    },
    /// The gradient is being reduced: `sent` is the whole gradient, `output` this rank's shard of the sum over ranks.
    Scattering {
        sent: Held,
        output: Held,
        earlier: Option<Held>,
        finish: Finish,
    },
    /// A whole gradient is being summed over the replicas, and will be added to the sum of earlier micro-batches.
    Adding {
        sent: Held,
        earlier: Held,
        finish: Option<Finish>,
    },
    /// The reduced gradient of this rank, summed over the micro-batches so far.
    Reduced(Held),
}

/// The parameter groups of one rank.
pub(super) struct Groups {
    ledger: Ledger,
    policy: Policy,
    mesh: Mesh,
    gathers: Gathers,
    /// True if the host computes, so that the plan is for the memory of the host.
    pub(super) on_host: bool,
    offloads: bool,
    groups: Vec<Group>,
    /// For each module, the positions of its groups.
    modules: Vec<std::ops::Range<usize>>,
    /// A free flat buffer and its number of elements, for the next gradient of the same size.
    spare: Option<(u64, Held)>,
    /// The group whose reduction is in progress; the next gradient reuses the buffer that it sends.
    under_way: Option<usize>,
    /// Temporary buffer of the sum over replicas that is in progress.
    replicating: Option<Held>,
    /// Time at which the last sum over replicas is done.
    replicated: Option<Finish>,
    pub(super) clock: Clock,
    /// True if this pass will gather again; and a free buffer for the next gather of the same size.
    pool: (bool, Option<(u64, Held)>),
    /// Position of the last group that forward has read.
    position: usize,
    pub(super) last_micro_batch: bool,
    /// Bytes allocated in total when backward entered its current module.
    pub(super) allocated: u64,
}

impl Groups {
    /// Creates the groups of `modules` before the first update. `offloaded` is a separate ledger for offloaded
    /// state.
    pub(super) fn new(
        ledger: &Ledger,
        offloaded: Option<&Ledger>,
        policy: &Policy,
        mesh: Mesh,
        gathers: Gathers,
        modules: &[(Vec<PlannedGroup>, ShardOptions)],
        speed: Speed,
    ) -> Self {
        let (host, offloads) = (offloaded.unwrap_or(ledger), offloaded.is_some());
        let mut positions = Vec::new();
        let mut groups = Vec::new();
        let mut owned = owned_slots(modules).into_iter();
        for (planned, options) in modules {
            positions.push(groups.len()..groups.len() + planned.len());
            for group in planned {
                let padded = group.layout.padded_numel() as u64;
                let shard = padded / mesh.shard_size() as u64;
                let slots = group.slots as u64;
                let mut state = vec![host.hold(WEIGHTS, shard.saturating_mul(F32))];
                if offloads {
                    // The shard that gathers start from, and the buffer of the gradient.
                    let width = policy.compute_dtype.size() as u64;
                    state.push(ledger.hold(WEIGHTS, shard.saturating_mul(width)));
                    let gradient = if group.layout.trainable { shard.saturating_mul(F32) } else { 0 };
                    state.push(host.hold(GRADIENTS, gradient));
                }
                groups.push(Group {
                    padded,
                    shard,
                    slots,
                    owned: owned.next().unwrap_or(0),
                    trainable: group.layout.trainable,
                    is_whole: group.is_whole,
                    shapes: group.layout.parameters.iter().map(|p| p.shape.clone()).collect(),
                    options: *options,
                    state,
                    compute: None,
                    weights: Weights::Sharded,
                    gradient: Gradient::None,
                });
            }
        }
        Groups {
            ledger: ledger.clone(),
            policy: policy.clone(),
            mesh,
            gathers,
            on_host: false,
            offloads,
            groups,
            modules: positions,
            spare: None,
            under_way: None,
            replicating: None,
            replicated: None,
            clock: Clock::new(speed),
            pool: (false, None),
            position: 0,
            last_micro_batch: true,
            allocated: 0,
        }
    }

    /// Adds the slots that the optimizer allocates for each group in the first update; `offloaded` is the ledger
    /// for offloaded slots. Returns the allocations by group.
    pub(super) fn add_slots(&mut self, offloaded: Option<&Ledger>) -> Vec<Vec<LedgerEvent>> {
        let own = self.ledger.clone();
        let add = |group: &mut Group| {
            let (ledger, bytes) = (offloaded.unwrap_or(&own), group.shard.saturating_mul(F32));
            group.state.extend((0..group.slots).map(|_| ledger.hold(OPTIMIZER, bytes)));
            if group.owned > 0 {
                group.state.push(ledger.hold(OPTIMIZER, group.owned.saturating_mul(F32)));
            }
            own.take_events()
        };
        self.groups.iter_mut().map(add).collect()
    }

    fn width(&self) -> u64 {
        self.policy.compute_dtype.size() as u64
    }

    /// Starts a collective among the ranks of `axis`, on a whole buffer of `bytes`.
    fn issue(&mut self, operation: Operation, axis: Axis, phase: Phase, bytes: u64) -> Finish {
        let ranks = match axis {
            Axis::Shard => self.mesh.shard_size(),
            Axis::Replicate => self.mesh.replicate_size(),
            Axis::World => self.mesh.world_size(),
        };
        // All ranks of these operations send the same amount.
        let sent = operation.ring_bytes(bytes, 0, ranks, 0);
        self.clock.issue(PlannedCall { operation, axis, phase, sent, times: 1 })
    }

    /// Returns whether ranks gather at all; otherwise weights are read in place, or cast as a whole.
    fn communicates(&self) -> bool {
        self.mesh.shard_size() > 1 || self.policy.shards_alone(self.mesh.world_size())
    }

    fn reshards(&self, group: &Group) -> bool {
        self.policy.reshards_after_forward(group.options.reshard_after_forward)
    }

    pub(super) fn begin_forward(&mut self) {
        self.position = 0;
        self.pool.0 = true;
    }

    fn unshard(&mut self, at: usize, phase: Phase) {
        let width = self.width();
        if !matches!(self.groups[at].weights, Weights::Sharded) {
            return;
        }
        let communicates = self.communicates();
        let by_default = self.groups[at].options.reshard_after_forward;
        let keeps = self.policy.keeps_compute_shard(self.on_host, !communicates, by_default);
        if keeps && !self.offloads && self.groups[at].compute.is_none() {
            let bytes = self.groups[at].shard.saturating_mul(width);
            self.groups[at].compute = Some(self.ledger.hold(WEIGHTS, bytes));
        }
        if !communicates && (width == F32 || keeps) {
            // The weights are read in place.
            self.groups[at].weights = Weights::Unsharded(self.ledger.hold(GATHERED, 0));
            return;
        }
        let (padded, shard) = (self.groups[at].padded, self.groups[at].shard);
        let sent = (communicates && width != F32 && !keeps)
            .then(|| self.ledger.hold(COMMUNICATION, shard.saturating_mul(width)));
        let shares = communicates && self.gathers == Gathers::Shared;
        let kept = if shares { None } else { self.pool.1.take() };
        let kept = kept.filter(|(size, _)| *size == padded).map(|(_, held)| held);
        let whole = kept.unwrap_or_else(|| self.ledger.hold(GATHERED, padded.saturating_mul(width)));
        let bytes = padded.saturating_mul(width);
        let finish = communicates.then(|| self.issue(Operation::AllGather, Axis::Shard, phase, bytes));
        self.groups[at].weights = Weights::Unsharding { whole, _sent: sent, finish };
    }

    fn wait_for_unshard(&mut self, at: usize, phase: Phase) {
        self.unshard(at, phase);
        let group = &mut self.groups[at];
        group.weights = match std::mem::replace(&mut group.weights, Weights::Sharded) {
            Weights::Unsharding { whole, finish, .. } => {
                finish.into_iter().for_each(|finish| self.clock.wait(finish));
                Weights::Unsharded(whole)
            }
            other => other,
        };
    }

    fn reshard(&mut self, at: usize) {
        let weights = std::mem::replace(&mut self.groups[at].weights, Weights::Sharded);
        let (Weights::Unsharded(whole) | Weights::Unsharding { whole, .. }) = weights else { return };
        let is_pooled = !self.communicates() || self.gathers == Gathers::Pooled;
        let (opens, free) = &mut self.pool;
        if is_pooled && *opens && free.is_none() && self.policy.reshards_after_forward(true) {
            let padded = self.groups[at].padded;
            if self.reshards(&self.groups[at]) {
                self.pool.1 = Some((padded, whole));
            }
        }
    }

    /// Reads a module's weights in forward, and starts to gather those of the next module.
    pub(super) fn read_in_forward(&mut self, module: usize) {
        let positions = self.modules[module].clone();
        positions.clone().for_each(|at| self.unshard(at, Phase::Forward));
        for at in positions {
            self.wait_for_unshard(at, Phase::Forward);
            if self.position <= at {
                self.position = at;
                let next = self.modules.get(module + 1).cloned().unwrap_or(0..0);
                next.for_each(|next| self.unshard(next, Phase::Forward));
            }
        }
    }

    /// Leaves a module in forward. With `tape`, constants stay gathered for backward.
    pub(super) fn leave_forward(&mut self, module: usize, tape: bool) {
        for at in self.modules[module].clone() {
            let group = &self.groups[at];
            let ShardOptions { reshard_after_forward, unshard_in_backward, .. } = group.options;
            let is_on_tape = group.trainable || (reshard_after_forward && unshard_in_backward);
            let stays = tape && unshard_in_backward && !is_on_tape;
            if self.reshards(group) && !stays {
                self.reshard(at);
            }
        }
    }

    /// Enters a module in backward; `goes_on` is true if the pass continues to the previous module.
    pub(super) fn enter_backward(&mut self, module: usize, goes_on: bool) {
        for at in self.modules[module].clone() {
            if self.groups[at].options.unshard_in_backward {
                self.unshard(at, Phase::Backward);
            }
        }
        let previous = (0..module).rev().find(|before| {
            self.modules[*before].clone().any(|at| self.groups[at].options.unshard_in_backward)
        });
        match previous.filter(|_| goes_on) {
            Some(before) => {
                self.modules[before].clone().for_each(|at| self.unshard(at, Phase::Backward));
            }
            None => self.pool = (false, None),
        }
    }

    /// Reads a module's weights in backward.
    pub(super) fn read_in_backward(&mut self, module: usize) {
        let positions = self.modules[module].clone();
        positions.for_each(|at| self.wait_for_unshard(at, Phase::Backward));
    }

    /// Leaves a module in backward, after the gradients `written` have been computed.
    pub(super) fn leave_backward(&mut self, module: usize, written: Vec<Held>) {
        self.accumulate(module);
        // The gradients are first added to the flat buffers, one after the other.
        drop(written);
        if self.reduces() {
            for at in self.modules[module].clone() {
                self.post_backward(at);
            }
        }
    }

    /// Adds the gradients of one use of a module to its flat buffers. The use no longer needs the weights.
    pub(super) fn accumulate(&mut self, module: usize) {
        for at in self.modules[module].clone() {
            self.reshard_after_use(at);
            if !self.groups[at].trainable {
                continue;
            }
            let earlier = match std::mem::replace(&mut self.groups[at].gradient, Gradient::None) {
                Gradient::None => None,
                Gradient::Reduced(sum) => Some(sum),
                other => {
                    self.groups[at].gradient = other;
                    continue;
                }
            };
            let flat = self.take_buffer(self.groups[at].padded);
            self.groups[at].gradient = Gradient::Accumulating { flat, earlier };
        }
    }

    /// Returns whether the current micro-batch is reduced on its own.
    fn reduces(&self) -> bool {
        let communicates = self.communicates() || self.mesh.replicate_size() > 1;
        self.policy.reduces(self.last_micro_batch, communicates)
    }

    fn reshard_after_use(&mut self, at: usize) {
        if self.reshards(&self.groups[at]) || self.last_micro_batch {
            self.reshard(at);
        }
    }

    fn take_buffer(&mut self, padded: u64) -> Held {
        self.settle();
        let spare = self.spare.take().filter(|(size, _)| *size == padded);
        match spare {
            Some((_, held)) => held,
            None => self.ledger.hold(GRADIENTS, padded.saturating_mul(F32)),
        }
    }

    /// Starts to reduce the gradient of the group at `at`.
    fn post_backward(&mut self, at: usize) {
        let (flat, earlier) = match std::mem::replace(&mut self.groups[at].gradient, Gradient::None) {
            Gradient::Accumulating { flat, earlier } => (flat, earlier),
            other => {
                self.groups[at].gradient = other;
                return;
            }
        };
        let (padded, shard) = (self.groups[at].padded, self.groups[at].shard);
        let wire = self.policy.reduce_dtype.size() as u64;
        let casts = wire != F32 && (self.communicates() || self.mesh.replicate_size() > 1);
        let (sent, original) = match casts {
            true => (self.ledger.hold(COMMUNICATION, padded.saturating_mul(wire)), Some(flat)),
            false => (flat, None),
        };
        if !self.communicates() {
            if let Some(earlier) = earlier {
                self.settle();
                self.replicate(padded, Phase::Backward);
                let finish = self.replicated.take();
                self.groups[at].gradient = Gradient::Adding { sent, earlier, finish };
                self.spare = original.map(|held| (padded, held));
                self.under_way = Some(at);
                return;
            }
            // Replicas sum the buffer in place; each replica sums one part of it.
            self.replicate(padded, Phase::Backward);
            drop(original);
            let reduced = match casts {
                true => self.ledger.hold(GRADIENTS, padded.saturating_mul(F32)),
                false => sent,
            };
            self.groups[at].gradient = Gradient::Reduced(reduced);
            return;
        }
        self.settle();
        let output = self.ledger.hold(GRADIENTS, shard.saturating_mul(wire));
        let bytes = padded.saturating_mul(wire);
        let finish = self.issue(Operation::ReduceScatter, Axis::Shard, Phase::Backward, bytes);
        self.groups[at].gradient = Gradient::Scattering { sent, output, earlier, finish };
        self.spare = original.map(|held| (padded, held));
        self.under_way = Some(at);
    }

    /// Starts to sum `elements` elements over the replicas.
    fn replicate(&mut self, elements: u64, phase: Phase) {
        let replicas = self.mesh.replicate_size() as u64;
        if replicas > 1 {
            let bytes = elements.saturating_mul(self.policy.reduce_dtype.size() as u64);
            let part = bytes / replicas;
            self.replicated = Some(self.issue(Operation::AllReduce, Axis::Replicate, phase, bytes));
            // The previous sum is done. On the host, its thread may free the buffer a little later.
            if !self.on_host {
                self.replicating = None;
            }
            self.replicating = Some(self.ledger.hold(COMMUNICATION, part));
        }
    }

    /// Waits for the reduction in progress, so that the next gradient can reuse its flat buffer.
    fn settle(&mut self) {
        let Some(at) = self.under_way.take() else { return };
        let (padded, shard) = (self.groups[at].padded, self.groups[at].shard);
        let is_f32 = self.policy.reduce_dtype.size() as u64 == F32;
        let reduced = match std::mem::replace(&mut self.groups[at].gradient, Gradient::None) {
            Gradient::Scattering { sent, output, earlier, finish } => {
                self.clock.wait(finish);
                self.keep(padded, sent, is_f32);
                let reduced = match earlier {
                    Some(earlier) => self.added(earlier, shard),
                    None if is_f32 => output,
                    None => self.ledger.hold(GRADIENTS, shard.saturating_mul(F32)),
                };
                if self.last_micro_batch {
                    self.replicate(shard, Phase::Backward);
                }
                reduced
            }
            Gradient::Adding { sent, earlier, finish } => {
                finish.into_iter().for_each(|finish| self.clock.wait(finish));
                self.replicating = None;
                self.keep(padded, sent, is_f32);
                self.added(earlier, padded)
            }
            other => {
                self.groups[at].gradient = other;
                return;
            }
        };
        self.groups[at].gradient = Gradient::Reduced(reduced);
    }

    /// Keeps the buffer of a sent gradient, if it is f32, for the next gradient.
    fn keep(&mut self, padded: u64, sent: Held, is_f32: bool) {
        if is_f32 {
            self.spare = Some((padded, sent));
        }
    }

    /// Adds `elements` elements to `earlier`, the sum of earlier micro-batches, and returns the sum.
    fn added(&mut self, earlier: Held, elements: u64) -> Held {
        self.clock.compute(0.0, elements.saturating_mul(3 * F32) as f64);
        earlier
    }

    /// Ends a backward pass.
    pub(super) fn finish_backward(&mut self) {
        if self.reduces() {
            (0..self.groups.len()).rev().for_each(|at| self.post_backward(at));
            self.settle();
            self.replicated.take().into_iter().for_each(|finish| self.clock.wait(finish));
            (self.spare, self.replicating) = (None, None);
        }
        if self.last_micro_batch {
            (0..self.groups.len()).for_each(|at| self.reshard(at));
        }
        for at in 0..self.groups.len() {
            if !self.groups[at].trainable && self.reshards(&self.groups[at]) {
                self.reshard(at);
            }
        }
        self.pool = (false, None);
    }

    fn wait_for(&mut self, operation: Operation, axis: Axis, phase: Phase, bytes: u64) {
        let finish = self.issue(operation, axis, phase, bytes);
        self.clock.wait(finish);
    }

    /// Runs the update, which frees the gradient of each group. Rules that need whole parameters gather them.
    /// Returns the allocations and frees, by group, and then those at the end of the update.
    pub(super) fn update(&mut self) -> Vec<Vec<LedgerEvent>> {
        let mut events = Vec::new();
        self.wait_for(Operation::AllReduce, Axis::World, Phase::Loss, F64);
        if self.communicates() {
            let squares = F64.saturating_mul(self.mesh.world_size() as u64);
            self.wait_for(Operation::AllReduce, Axis::Shard, Phase::Optimizer, squares);
        }
        for at in 0..self.groups.len() {
            let Group { shard, slots, trainable, is_whole, .. } = self.groups[at];
            if trainable {
                // Values are read and written once, but the gradient is read a second time for its norm.
                let values = shard.saturating_mul(slots.saturating_mul(2).saturating_add(4));
                let bytes = values.saturating_mul(F32) as f64;
                if self.offloads {
                    // The gradient goes to the host, and the new weights come back.
                    let moved = shard.saturating_mul(F32.saturating_add(self.width())) as f64;
                    self.clock.pass(moved / PCIE + bytes / HOST);
                } else {
                    self.clock.compute(0.0, bytes);
                }
            }
            if !is_whole {
                self.groups[at].gradient = Gradient::None;
            }
            events.push(self.ledger.take_events());
        }
        // While the directions of one group are transformed, those of the next group are gathered.
        let wholes: Vec<_> = (0..self.groups.len()).filter(|at| self.groups[*at].is_whole).collect();
        let (mut directions, mut updates) = (None, None);
        for at in wholes.iter().copied().map(Some).chain([None]) {
            let next = at.map(|at| {
                let whole = self.whole_bytes(at);
                let gathered = self.communicates().then(|| {
                    self.wait_for(Operation::AllGather, Axis::Shard, Phase::Optimizer, whole);
                    // Threads read one copy, which belongs to no rank.
                    let own = if self.gathers == Gathers::Shared { 0 } else { whole };
                    self.ledger.hold(COMMUNICATION, own)
                });
                let gradient = std::mem::replace(&mut self.groups[at].gradient, Gradient::None);
                (at, gradient, gathered)
            });
            if let Some((before, ..)) = std::mem::replace(&mut directions, next) {
                let made = self.transform(before);
                drop(updates.replace(made));
            }
        }
        drop(updates);
        events.push(self.ledger.take_events());
        events
    }

    /// Transforms the matrices of the group at `at` into updates, and reduces them. Returns the buffer of the updates.
    fn transform(&mut self, at: usize) -> Held {
        let whole = self.whole_bytes(at);
        let made = self.ledger.hold(COMMUNICATION, whole);
        let needed = self.groups[at].shapes.iter().map(|shape| orthogonalisation(shape, self.on_host));
        drop(self.ledger.hold(OPTIMIZER, needed.max().unwrap_or(0).saturating_mul(F32)));
        if self.communicates() {
            self.wait_for(Operation::ReduceScatter, Axis::Shard, Phase::Optimizer, whole);
        }
        if self.mesh.replicate_size() > 1 {
            let part = if self.communicates() { self.groups[at].shard.saturating_mul(F32) } else { whole };
            self.wait_for(Operation::AllReduce, Axis::Replicate, Phase::Optimizer, part);
        }
        made
    }

    /// Returns the bytes of the whole group at `at` in f32.
    fn whole_bytes(&self, at: usize) -> u64 {
        self.groups[at].padded.saturating_mul(F32)
    }
}

/// Returns the number of elements of the owned slots in each group, on the rank that has the most in total.
fn owned_slots(modules: &[(Vec<PlannedGroup>, ShardOptions)]) -> Vec<u64> {
    let groups: Vec<_> = modules.iter().flat_map(|(groups, _)| groups).collect();
    let owners = Owners::new(groups.iter().map(|group| &group.layout), |at| groups[at].is_whole);
    let chunks = groups.first().map_or(0, |group| group.layout.chunks);
    let of_rank = |chunk: usize| {
        let of_group = |(position, group): (usize, &&PlannedGroup)| {
            let owned = owners.owned_by(chunk, position).map(|index| &group.layout.parameters[index]);
            owned.flat_map(|parameter| &parameter.owned_slots).map(|slot| slot.numel() as u64).sum()
        };
        groups.iter().enumerate().map(of_group).collect::<Vec<u64>>()
    };
    (0..chunks).map(of_rank).max_by_key(|owned| owned.iter().sum::<u64>()).unwrap_or_default()
}

/// Returns how many elements the orthogonalisation of a parameter of this `shape` needs in addition to the
/// parameter: copies of its matrices, and of their products with their transposes, as tensors and as operands of
/// products. On a GPU, burn writes some sums to new memory.
fn orthogonalisation(shape: &[usize], on_host: bool) -> u64 {
    let [others @ .., rows, columns] = shape else { return 0 };
    let product = |sizes: &[usize]| sizes.iter().fold(1, |n: u64, size| n.saturating_mul(*size as u64));
    let (matrices, least) = (product(shape), rows.min(columns));
    let squares = product(others).saturating_mul(product(&[*least, *least]));
    let both = |n: u64, m: u64| matrices.saturating_mul(n).saturating_add(squares.saturating_mul(m));
    both(4, if on_host { 2 } else { 4 })
}
