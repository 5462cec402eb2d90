//! The end of a step, as in [`kiln_shard::Engine::update`]: memory, collectives and time.

use kiln_collectives::{Operation, Phase};
use kiln_model::meta::{Held, LedgerEvent};

use super::clock::Axis;
use super::engine::{COMMUNICATION, F32, Gathers, Gradient, Group, Groups, OPTIMIZER};

/// Bytes per second between a GPU and the host: effective speed of copies over PCIe 4.0 with 16 lanes.
const PCIE: f64 = 25e9;
/// Host memory bandwidth in bytes per second for each rank that updates there.
const HOST: f64 = 20e9;

/// Bytes of an `f64`, the type of losses and norms.
const F64: u64 = 8;

impl Groups {
    /// Runs the update, after which each group's gradient is freed. Rules that need whole parameters gather
    /// them. Returns the allocations and frees, by group, and then those of the end.
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
                // Values are read and written once, but the gradient is read twice, also for its norm.
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
        // The directions of a group are gathered while those of the previous group are transformed.
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

    /// Transforms the matrices of the group at `at` into updates, which are returned, and reduces these.
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

/// Returns the elements that the orthogonalisation of a parameter of this `shape` needs in addition to it:
/// copies of its matrices, and of their products with their transposes, as tensors and as operands of products.
/// On a GPU, burn writes some sums to new memory.
fn orthogonalisation(shape: &[usize], on_host: bool) -> u64 {
    let [others @ .., rows, columns] = shape else { return 0 };
    let product = |sizes: &[usize]| sizes.iter().fold(1, |n: u64, size| n.saturating_mul(*size as u64));
    let (matrices, least) = (product(shape), rows.min(columns));
    let squares = product(others).saturating_mul(product(&[*least, *least]));
    let both = |n: u64, m: u64| matrices.saturating_mul(n).saturating_add(squares.saturating_mul(m));
    both(4, if on_host { 2 } else { 4 })
}
