//! The memory of one rank's parameter groups over a step: the weights, gradients and optimizer state that
//! [`kiln_shard::Engine`] holds, and when.

use kiln_collectives::{Operation, Phase};
use kiln_model::meta::{GRADIENTS, Held, Ledger, LedgerEvent, Owner};
use kiln_shard::{Mesh, PlannedGroup, Policy, ShardOptions};

use super::clock::{Axis, Clock, Finish, PlannedCall, Speed};

/// Owner of the f32 master weights.
pub const WEIGHTS: Owner = "weights";
/// Owner of the optimizer's slots.
pub const OPTIMIZER: Owner = "optimizer state";
/// Owner of gathered whole weights.
pub const GATHERED: Owner = "gathered weights";
/// Owner of buffers in transit between ranks.
pub const COMMUNICATION: Owner = "communication";

/// Bytes of an `f32`.
pub(super) const F32: u64 = 4;

/// The buffers that ranks gather weights into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gathers {
    /// Ranks are threads that read one copy, which is freed after its last use.
    Shared,
    /// Each rank has a copy, whose buffer is reused for a later gather of the same size.
    Pooled,
}

/// A parameter group: its sizes, and its memory.
pub(super) struct Group {
    /// Elements of the flat buffer, and of this rank's shard of it.
    pub(super) padded: u64,
    pub(super) shard: u64,
    /// Number of values that the optimizer keeps per element.
    pub(super) slots: u64,
    pub(super) trainable: bool,
    pub(super) is_whole: bool,
    /// Shapes of its parameters.
    pub(super) shapes: Vec<Vec<usize>>,
    options: ShardOptions,
    state: Vec<Held>,
    /// This rank's shard in the compute dtype, from the first gather on, if it is kept on a GPU.
    compute: Option<Held>,
    weights: Weights,
    pub(super) gradient: Gradient,
}

enum Weights {
    Sharded,
    /// Being gathered, with this rank's shard in the compute dtype, which is sent.
    Unsharding {
        whole: Held,
        _sent: Option<Held>,
        finish: Option<Finish>,
    },
    Unsharded(Held),
}

pub(super) enum Gradient {
    None,
    /// The sum over the current micro-batches, and the reduced sum of earlier ones, if micro-batches are
    /// reduced one by one.
    Accumulating {
        flat: Held,
        earlier: Option<Held>,
    },
    /// Being reduced, with the buffer to send and this rank's shard of the sum.
    Scattering {
        sent: Held,
        output: Held,
        earlier: Option<Held>,
        finish: Finish,
    },
    /// A whole gradient, summed over the replicas, to be added to the sum of earlier micro-batches.
    Adding {
        sent: Held,
        earlier: Held,
        finish: Option<Finish>,
    },
    /// This rank's shard, summed over the micro-batches so far.
    Reduced(Held),
}

/// The parameter groups of one rank.
pub(super) struct Groups {
    pub(super) ledger: Ledger,
    policy: Policy,
    pub(super) mesh: Mesh,
    pub(super) gathers: Gathers,
    /// True if the plan is for the host's memory.
    pub(super) on_host: bool,
    pub(super) offloads: bool,
    pub(super) groups: Vec<Group>,
    /// Positions of the groups of each module.
    modules: Vec<std::ops::Range<usize>>,
    /// A flat buffer for the next gradient of the same size.
    spare: Option<(u64, Held)>,
    /// The group whose reduction is in progress, and whose buffer the next gradient reuses.
    under_way: Option<usize>,
    /// Temporary buffer of the sum over replicas in progress.
    replicating: Option<Held>,
    /// End of the last sum over replicas.
    replicated: Option<Finish>,
    pub(super) clock: Clock,
    /// A flag that is true if the pass will gather again, and a buffer for the next gather of the same size.
    pool: (bool, Option<(u64, Held)>),
    /// Position of the forward pass.
    position: usize,
    pub(super) last_micro_batch: bool,
    /// Bytes allocated so far when backward entered its current module.
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

    /// Adds the optimizer's slots of the first update for each group, in a separate ledger if they are
    /// `offloaded`. Returns the allocations by group.
    pub(super) fn add_slots(&mut self, offloaded: Option<&Ledger>) -> Vec<Vec<LedgerEvent>> {
        let own = self.ledger.clone();
        let add = |group: &mut Group| {
            let (ledger, bytes) = (offloaded.unwrap_or(&own), group.shard.saturating_mul(F32));
            group.state.extend((0..group.slots).map(|_| ledger.hold(OPTIMIZER, bytes)));
            own.take_events()
        };
        self.groups.iter_mut().map(add).collect()
    }

    pub(super) fn width(&self) -> u64 {
        self.policy.compute_dtype.size() as u64
    }

    /// Starts a collective over an axis, on a whole buffer of `bytes`.
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
    pub(super) fn communicates(&self) -> bool {
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

    /// Reads a module's weights in forward, while those of the next module are gathered.
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

    /// Leaves a module in forward. With `tape`, frozen weights stay for backward.
    pub(super) fn leave_forward(&mut self, module: usize, tape: bool) {
        for at in self.modules[module].clone() {
            let group = &self.groups[at];
            let stays = tape && group.options.unshard_in_backward && !group.trainable;
            if self.reshards(group) && !stays {
                self.reshard(at);
            }
        }
    }

    /// Enters a module's output in backward; the pass `goes_on` to the previous module.
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
        // The gradients are added to the flat buffers one after the other.
        drop(written);
        if self.reduces() {
            for at in self.modules[module].clone() {
                self.post_backward(at);
            }
        }
    }

    /// Adds the gradients of one use of a module to its flat buffers. This use does not read the weights any
    /// more.
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

    /// Returns whether the current micro-batch is reduced.
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

    /// Starts to reduce a gradient.
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
            // Replicas sum the buffer in place, each one a part of it.
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

    /// Starts the sum of `elements` over the replicas.
    fn replicate(&mut self, elements: u64, phase: Phase) {
        let replicas = self.mesh.replicate_size() as u64;
        if replicas > 1 {
            let bytes = elements.saturating_mul(self.policy.reduce_dtype.size() as u64);
            let part = bytes / replicas;
            self.replicated = Some(self.issue(Operation::AllReduce, Axis::Replicate, phase, bytes));
            // The previous sum is done.
            self.replicating = None;
            self.replicating = Some(self.ledger.hold(COMMUNICATION, part));
        }
    }

    /// Waits for the reduction in progress: its flat buffer is reused for the next gradient.
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

    /// Keeps the buffer of a sent gradient for the next one if it is f32.
    fn keep(&mut self, padded: u64, sent: Held, is_f32: bool) {
        if is_f32 {
            self.spare = Some((padded, sent));
        }
    }

    /// Returns the sum of `earlier` micro-batches after adding `elements` to it.
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

    pub(super) fn wait_for(&mut self, operation: Operation, axis: Axis, phase: Phase, bytes: u64) {
        let finish = self.issue(operation, axis, phase, bytes);
        self.clock.wait(finish);
    }
}
