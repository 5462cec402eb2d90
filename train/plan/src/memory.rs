//! The memory of one rank over a training step.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::rc::Rc;

use kiln_model::meta::{ACTIVATIONS, Ledger, MemoryPeak, MetaBatch, MetaTape, MetaTensor, Products};
use kiln_model::{Decoder, Layer, Layers, ModelConfig};
use kiln_shard::{Mesh, MeshError, Optimizer, PlannedGroup, Policy, Recompute, ShardOptions};

use super::clock::{Axis, PlannedCall, Speed};
use super::engine::{COMMUNICATION, Gathers, Groups};
use super::pages::Pages;
use kiln_checkpoint::sharded::{ModuleOutline, modules_of};
use kiln_checkpoint::source::ModelSource;
use kiln_config::{CROSS_ENTROPY, Config, Frozen};

/// Everything that determines the memory of a rank.
#[derive(Clone, Debug)]
pub struct RankShape<'a> {
    /// The model, without values.
    pub decoder: &'a Decoder,
    /// The model's configuration.
    pub model: &'a ModelConfig,
    /// The optimizer.
    pub optimizer: &'a Optimizer,
    /// The sharding policy.
    pub policy: Policy,
    /// The arrangement of the ranks.
    pub mesh: Mesh,
    /// The buffers that ranks gather weights into.
    pub gathers: Gathers,
    /// The parameters that are not trained.
    pub frozen: Frozen,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// Micro-batches per step.
    pub micro_batches: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// True if the loss needs all logits at once.
    pub token_loss: bool,
    /// Bytes of this rank's shards of the models that an objective reads: those of `loss.frozen` that can be opened.
    pub frozen_models: u64,
    /// True if the host computes.
    pub on_host: bool,
}

/// The planned resources of a step on one rank.
#[derive(Clone, Debug)]
pub struct PlannedStep {
    /// Peak memory of the rank on the device that computes.
    pub peak: MemoryPeak,
    /// Bytes of the rank's largest buffer on the device that computes.
    pub largest: u64,
    /// Bytes of the pages that hold all buffers on a GPU; 0 on the host.
    pub reserved: u64,
    /// Memory of the rank on the host while a GPU computes.
    pub offloaded: MemoryPeak,
    /// Duration of the step in seconds.
    pub seconds: f64,
    /// Seconds that the rank waits for other ranks.
    pub waited: f64,
    /// Collectives of the step.
    pub(crate) calls: Vec<PlannedCall>,
    /// Types of layers that do not describe their memory ([`Layer::meta_forward`]), so that it is estimated from
    /// their parameters.
    pub undescribed: BTreeSet<&'static str>,
}

/// Bytes of cuBLASLt's workspace, from Hopper on.
const WORKSPACE: u64 = 32 << 20;

impl PlannedStep {
    /// Returns the bytes that a GPU's runtime holds in addition to the peak: partly filled pages, and the
    /// workspace of products. 0 on the host.
    pub fn kept(&self) -> u64 {
        match self.reserved {
            0 => 0,
            reserved => reserved.saturating_sub(self.peak.bytes).saturating_add(WORKSPACE),
        }
    }

    /// Returns the bytes that the rank sends over `axis`.
    pub fn sent(&self, axis: Axis) -> u64 {
        let calls = self.calls.iter().filter(|call| call.axis == axis);
        calls.fold(0, |sum, call| sum.saturating_add(call.sent.saturating_mul(call.times)))
    }
}

/// The parameter groups of a decoder's modules, and the sharding options of each module.
pub(super) type PlannedModules = Vec<(Vec<PlannedGroup>, ShardOptions)>;

impl<'a> RankShape<'a> {
    /// Describes a rank of a run of `config`, whose `auto` values must be settled.
    ///
    /// # Errors
    ///
    /// If the strategy cannot arrange that many ranks.
    pub fn from_config(
        config: &'a Config,
        model: &'a ModelConfig,
        decoder: &'a Decoder,
        optimizer: &'a Optimizer,
        gathers: Gathers,
        on_host: bool,
    ) -> Result<Self, MeshError> {
        let ranks = config.train.ranks.max(1);
        let micro_batch = config.micro_batch().max(1);
        let mesh = Mesh::new(config.shard.strategy, ranks, config.shard.shard_size)?;
        Ok(RankShape {
            decoder,
            model,
            optimizer,
            policy: config.policy(),
            mesh,
            gathers,
            frozen: config.frozen_parameters(),
            micro_batch,
            micro_batches: (config.train.global_batch / ranks / micro_batch).max(1),
            seq_len: config.data.seq_len,
            token_loss: config.loss.kind != CROSS_ENTROPY,
            frozen_models: frozen_models(config, &mesh),
            on_host,
        })
    }

    /// Returns the parameter groups of each module.
    pub(super) fn modules(&self) -> PlannedModules {
        let is_frozen = |name: &str| self.frozen.contains(name);
        let of_module = |ModuleOutline { name, shapes, options }| {
            let world_size = self.mesh.world_size();
            (PlannedGroup::from_module(&name, shapes, self.optimizer, &is_frozen, world_size), options)
        };
        modules_of(self.decoder).into_iter().map(of_module).collect()
    }

    /// Plans one step, not the first of the run, on a rank of this speed.
    pub fn step(&self, speed: &Speed) -> PlannedStep {
        let ledger = Ledger::default();
        let modules = self.modules();
        let offloads = self.policy.offload && !self.on_host;
        let host = Ledger::default();
        let offloaded = offloads.then_some(&host);
        let mut groups =
            Groups::new(&ledger, offloaded, &self.policy, self.mesh, self.gathers, &modules, speed.clone());
        groups.on_host = self.on_host;
        let weights = ledger.take_events();
        let slots = groups.add_slots(offloaded);
        // Buffers of the sockets between processes, with data that they have received.
        let sockets = if self.on_host && self.gathers == Gathers::Pooled { SOCKETS } else { 0 };
        let _sockets = ledger.hold(COMMUNICATION, sockets);
        let _frozen = ledger.hold(FROZEN_MODELS, self.frozen_models);
        let trained: Vec<bool> =
            modules.iter().map(|(groups, _)| groups.iter().any(|group| group.layout.trainable)).collect();
        let groups = Rc::new(RefCell::new(groups));
        let undescribed = RefCell::default();
        let pass = Pass { shape: self, ledger: ledger.clone(), groups, trained, undescribed };
        // The first micro-batch, the middle ones and the last differ in the state that exists and, unless each is
        // reduced, in their reductions. One middle micro-batch stands for all.
        let (passes, mut middle) = (self.micro_batches, (0.0, 0.0, Vec::new()));
        let more = passes.saturating_sub(3);
        for index in 0..passes.min(3) {
            let before = pass.time();
            pass.run(index + 1 == passes.min(3));
            if index == 1 && more > 0 {
                let (seconds, waited, count) = pass.time();
                let calls = pass.groups.borrow().clock.read().2[before.2..count].to_vec();
                middle = (seconds - before.0, waited - before.1, calls);
            }
        }
        let passes_events = ledger.take_events();
        ledger.enter("update");
        let update = pass.groups.borrow_mut().update();
        let (mut seconds, mut waited, _) = pass.time();
        let mut calls = pass.groups.borrow().clock.read().2.to_vec();
        (seconds, waited) = (seconds + more as f64 * middle.0, waited + more as f64 * middle.1);
        calls.extend(middle.2.into_iter().map(|call| PlannedCall { times: more as u64, ..call }));
        // Follows two steps; the first one starts without optimizer slots.
        let mut pages = Pages::for_largest(ledger.largest());
        if !self.on_host {
            pages.follow(&weights);
            pages.follow(&passes_events);
            for (slots, update) in slots.iter().map(Some).chain([None]).zip(&update) {
                slots.into_iter().for_each(|slots| pages.follow(slots));
                pages.follow(update);
            }
            pages.follow(&passes_events);
            update.iter().for_each(|update| pages.follow(update));
        }
        PlannedStep {
            peak: ledger.peak(),
            largest: ledger.largest(),
            reserved: if self.on_host { 0 } else { pages.reserved() },
            offloaded: host.peak(),
            seconds,
            waited,
            calls,
            undescribed: pass.undescribed.into_inner(),
        }
    }
}

/// The owner of the shards of frozen models.
const FROZEN_MODELS: &str = "frozen models";

/// Returns the bytes of a rank's f32 shards of the models of `loss.frozen`.
fn frozen_models(config: &Config, mesh: &Mesh) -> u64 {
    let shards = mesh.shard_size() as u64;
    let bytes = |path: &PathBuf| {
        let source = ModelSource::open(path).ok()?;
        let parameters = Decoder::count_parameters(&Layers::default(), source.model()).ok()?;
        Some(4 * (parameters as u64).div_ceil(shards))
    };
    config.loss.frozen.values().filter_map(bytes).sum()
}

/// Bytes that a rank holds for its sockets to other processes.
const SOCKETS: u64 = 1 << 19;

/// Number of times that the output of an operation is read or written in total.
const PASSES: f64 = 2.0;

/// Returns the name of a type without its module path and its type parameters.
fn short_name(name: &'static str) -> &'static str {
    let name = name.split('<').next().unwrap_or(name);
    name.rsplit("::").next().unwrap_or(name)
}

/// The forward and backward passes of a step.
struct Pass<'a> {
    shape: &'a RankShape<'a>,
    ledger: Ledger,
    groups: Rc<RefCell<Groups>>,
    /// One flag per module: true if any of its parameters is trained.
    trained: Vec<bool>,
    /// Type names of layers that do not describe their memory.
    undescribed: RefCell<BTreeSet<&'static str>>,
}

impl<'a> Pass<'a> {
    /// Returns the seconds so far, the part spent waiting, and the number of collectives.
    fn time(&self) -> (f64, f64, usize) {
        let groups = self.groups.borrow();
        let (seconds, waited, calls) = groups.clock.read();
        (seconds, waited, calls.len())
    }

    /// Calls `run`, and advances the clock by `flops` of computation and by reading and writing the memory
    /// that `run` allocates.
    fn compute<T>(&self, flops: f64, run: impl FnOnce() -> T) -> T {
        let before = self.ledger.allocated();
        let result = run();
        let written = (self.ledger.allocated() - before) as f64;
        self.groups.borrow_mut().clock.compute(flops, PASSES * written);
        result
    }

    /// Runs forward and backward of one micro-batch; `last` marks the last one of the step.
    fn run(&self, last: bool) {
        let RankShape { decoder, model, ref policy, micro_batch, seq_len, token_loss, on_host, .. } =
            *self.shape;
        let batch = MetaBatch {
            batch: micro_batch as u64,
            seq_len: seq_len as u64,
            element: policy.compute_dtype.size() as u64,
            products: match on_host {
                true => Products::on_host(policy.compute_dtype.size()),
                false => Products::InPlace,
            },
            dropout: model.dropout > 0.0,
            on_host,
        };
        let tape = MetaTape::new(self.ledger.clone(), batch);
        let (head, rows) = (decoder.layers.len() + 1, batch.rows());
        // Inputs and targets, of 32 bits each.
        let tokens = [(); 2].map(|()| self.ledger.hold(ACTIVATIONS, batch.rows().saturating_mul(4)));
        {
            let mut groups = self.groups.borrow_mut();
            groups.last_micro_batch = last;
            groups.begin_forward();
        }

        self.ledger.enter("forward of the embedding");
        tape.set_trained(self.trained[0]);
        // Backward does not reach a frozen embedding.
        if self.trained[0] {
            self.on_leave(&tape, 0, 0.0);
        }
        self.groups.borrow_mut().read_in_forward(0);
        let mut x = self.compute(0.0, || decoder.embed.meta_forward(&tape));
        self.groups.borrow_mut().leave_forward(0, true);
        let mut goes_on = self.trained[0];
        for index in 0..decoder.layers.len() {
            self.ledger.enter(format!("forward of layers.{index}"));
            x = self.block(&tape, index, x, goes_on);
            goes_on |= self.trained[index + 1];
        }
        self.ledger.enter("forward of the head");
        tape.set_trained(self.trained[head]);
        self.on_leave(&tape, head, 0.0);
        {
            let mut groups = self.groups.borrow_mut();
            groups.read_in_forward(head);
            if decoder.head.lm_head.is_none() {
                groups.read_in_forward(0);
            }
        }
        let flops = rows as f64 * decoder.head_flops_per_token();
        // The loss computes its gradients in forward.
        let loss = self.compute(flops, || {
            let hidden = decoder.head.meta_norm(x, &tape);
            self.on_tied_gradient(&tape);
            decoder.head.meta_loss(hidden, model.vocab_size, token_loss, &tape)
        });
        {
            let mut groups = self.groups.borrow_mut();
            groups.leave_forward(head, true);
            if decoder.head.lm_head.is_none() {
                groups.leave_forward(0, true);
            }
        }
        self.ledger.enter("backward of the head");
        self.groups.borrow_mut().enter_backward(head, true);
        self.groups.borrow_mut().allocated = self.ledger.allocated();
        tape.backward(loss);
        self.undescribed.borrow_mut().extend(tape.undescribed().into_iter().map(short_name));
        drop(tokens);
        self.ledger.enter("end of backward");
        self.groups.borrow_mut().finish_backward();
    }

    /// Registers what happens in backward when it leaves the module that forward has just reached.
    fn on_leave(&self, tape: &MetaTape<'a>, module: usize, flops: f64) {
        let groups = self.groups.clone();
        tape.on_backward(move |tape| {
            let (written, mut groups) = (tape.take_weight_gradients(), groups.borrow_mut());
            let allocated = tape.ledger().allocated();
            let bytes = allocated - std::mem::replace(&mut groups.allocated, allocated);
            groups.clock.compute(flops, PASSES * bytes as f64);
            groups.leave_backward(module, written);
        });
    }

    /// With tied embeddings, adds the gradient of the embedding's use in the head as soon as it is computed.
    fn on_tied_gradient(&self, tape: &MetaTape<'a>) {
        if self.shape.decoder.head.lm_head.is_none() && self.trained[0] {
            let groups = self.groups.clone();
            tape.on_backward(move |tape| {
                let written = tape.take_weight_gradients();
                groups.borrow_mut().accumulate(0);
                drop(written);
            });
        }
    }

    fn block(&self, tape: &MetaTape<'a>, index: usize, x: MetaTensor, goes_on: bool) -> MetaTensor {
        let module = index + 1;
        let layer = &self.shape.decoder.layers[index];
        // With adapters, a layer's own weights are not trained.
        let (trained, has_adapters) = (self.trained[module], self.shape.model.lora.is_some());
        let own = trained && !has_adapters;
        tape.set_trained(own);
        if !goes_on && !self.trained[module] {
            self.groups.borrow_mut().read_in_forward(module);
            let y = tape.checkpoint(x, move |tape, x, _| layer.meta_forward(x, tape));
            self.groups.borrow_mut().leave_forward(module, false);
            return y;
        }
        let batch = tape.batch();
        let flops = batch.rows() as f64 * layer.flops_per_token(batch.seq_len as usize) / 3.0;
        let recompute = self.shape.policy.recompute;
        let again = recompute.repeats(index);
        self.on_leave(tape, module, if again { 3.0 * flops } else { 2.0 * flops });
        let y = match again {
            false => {
                self.groups.borrow_mut().read_in_forward(module);
                tape.set_selective(recompute == Recompute::Selective);
                let y = tape.block_output(self.compute(flops, || layer.meta_forward(x, tape)));
                tape.set_selective(false);
                self.groups.borrow_mut().leave_forward(module, true);
                y
            }
            true => {
                let groups = self.groups.clone();
                let ledger = self.ledger.clone();
                // The block as a whole is trained, so backward repeats it.
                tape.set_trained(trained);
                tape.checkpoint(x, move |tape, x, again| {
                    let forward = |x| {
                        tape.set_trained(own);
                        let y = layer.meta_forward(x, tape);
                        tape.set_trained(trained);
                        y
                    };
                    if again {
                        groups.borrow_mut().read_in_backward(module);
                        return forward(x);
                    }
                    groups.borrow_mut().read_in_forward(module);
                    let before = ledger.allocated();
                    let y = forward(x);
                    let mut groups = groups.borrow_mut();
                    groups.clock.compute(flops, PASSES * (ledger.allocated() - before) as f64);
                    groups.leave_forward(module, false);
                    y
                })
            }
        };
        let groups = self.groups.clone();
        tape.on_backward(move |tape| {
            tape.ledger().enter(format!("backward of layers.{index}"));
            tape.set_trained(trained);
            let mut groups = groups.borrow_mut();
            groups.enter_backward(module, goes_on);
            groups.read_in_backward(module);
            groups.allocated = tape.ledger().allocated();
        });
        y
    }
}
