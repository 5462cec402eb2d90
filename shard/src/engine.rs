//! The sharding engine of one rank: building it from modules, and the life cycle of a step.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use kiln_collectives::{Buffer, Communicator, DType, Label, Phase};

use crate::error::ShardError;
use crate::flat;
use crate::layout::{Layout, UnitLayout, parameters_of};
use crate::loss::add_loss;
use crate::mesh::Mesh;
use crate::part::{Part, PartOptions, Token};
use crate::policy::Policy;
use crate::runtime::{Runtime, lock};
use crate::unit::Unit;
use crate::update::LossSum;

/// Collects the parts of a model, in the order of its forward pass.
pub struct EngineBuilder {
    runtime: Arc<Runtime>,
    units: Vec<Arc<Unit>>,
    names: HashSet<String>,
    frozen: Box<dyn Fn(&str) -> bool>,
}

/// The sharding engine of one rank. Every method that communicates must be called by all ranks in
/// the same order.
pub struct Engine {
    runtime: Arc<Runtime>,
    units: Vec<Arc<Unit>>,
    layout: Layout,
}

impl EngineBuilder {
    /// Starts an engine on the ranks of `world`, arranged for `policy.strategy`; hybrid strategies
    /// need `shard_size`. Collective.
    pub fn new(
        world: Arc<dyn Communicator>,
        policy: Policy,
        shard_size: Option<usize>,
    ) -> Result<Self, ShardError> {
        let is_supported = |dtype| matches!(dtype, DType::F32 | DType::BF16);
        // f16 is for GPUs that keep the state, which is known only when the first part comes.
        for (what, dtype, supported) in [
            (
                "compute dtype",
                policy.compute_dtype,
                is_supported(policy.compute_dtype) || policy.compute_dtype == DType::F16,
            ),
            ("reduce dtype", policy.reduce_dtype, is_supported(policy.reduce_dtype)),
        ] {
            if !supported {
                return Err(ShardError::UnsupportedDType { what, dtype });
            }
        }
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
        let runtime = Runtime::new(policy, mesh, world, shard, replicate);
        Ok(EngineBuilder {
            runtime: Arc::new(runtime),
            units: Vec::new(),
            names: HashSet::new(),
            frozen: Box::new(|_| false),
        })
    }

    /// Freezes the parameters of later parts whose full name `frozen` accepts: they are sharded
    /// and gathered like others, but get no gradient, no reduction and no optimizer state. Those
    /// that backward reads stay gathered from forward to backward, unless blocks are recomputed:
    /// burn's tape cannot read a constant again.
    pub fn freeze(mut self, frozen: impl Fn(&str) -> bool + 'static) -> Self {
        self.frozen = Box::new(frozen);
        self
    }

    /// Shards `module`. Each parameter is initialised, cut to this rank's shard and freed before
    /// the next one. `unit` names the part in logs; parameters are called `prefix` plus their path
    /// in the module, as in `layers.3.` plus `attention.q_proj.weight`. Parameters of other kinds
    /// than float stay as they are.
    pub fn part<M: Module + Sync + 'static>(
        &mut self,
        unit: &str,
        prefix: &str,
        module: M,
        options: PartOptions,
    ) -> Result<Part<M>, ShardError> {
        let mut slots = Vec::new();
        let mut kinds = [(true, Vec::new()), (false, Vec::new())];
        for (name, shape) in parameters_of(&module, prefix) {
            let trainable = !(self.frozen)(&name);
            if !self.names.insert(name.clone()) {
                return Err(ShardError::DuplicateParameter { name });
            }
            let (_, parameters) = &mut kinds[usize::from(!trainable)];
            slots.push((trainable, parameters.len()));
            parameters.push((name, shape));
        }
        let world_size = self.runtime.mesh.world_size();
        let mut layouts: Vec<UnitLayout> = Vec::new();
        for (trainable, parameters) in kinds.into_iter().filter(|(_, list)| !list.is_empty()) {
            let name = if trainable { unit.to_owned() } else { format!("{unit}.frozen") };
            layouts.push(UnitLayout::new(name, trainable, parameters, world_size));
        }
        let slots: Vec<_> = slots
            .into_iter()
            .map(|(trainable, slot)| {
                let index = layouts.iter().position(|layout| layout.trainable == trainable);
                (index.unwrap_or_default(), slot)
            })
            .collect();
        let (template, masters) = self.shard(module, &layouts, &slots)?;
        if self.runtime.policy.compute_dtype == DType::F16
            && self.runtime.state_placement().is_host()
        {
            let (what, dtype) = ("compute dtype", DType::F16);
            return Err(ShardError::UnsupportedDType { what, dtype });
        }
        let first = self.units.len();
        let part = first..first + layouts.len();
        for (layout, master) in layouts.into_iter().zip(masters) {
            self.units.push(Arc::new(Unit::new(
                layout,
                self.units.len(),
                part.clone(),
                options.keep,
                options.weights_in_backward,
                master,
                self.runtime.clone(),
            )));
        }
        let units = self.units[first..].to_vec();
        Ok(Part::new(template, slots, units, self.runtime.clone()))
    }

    /// Moves the values of `module` into this rank's shards and leaves placeholders behind.
    fn shard<M: Module>(
        &self,
        module: M,
        layouts: &[UnitLayout],
        slots: &[(usize, usize)],
    ) -> Result<(M, Vec<Buffer>), ShardError> {
        let Runtime { mesh, rank, .. } = &*self.runtime;
        let masters = layouts
            .iter()
            .map(|layout| Buffer::zeros(DType::F32, layout.shard_range(mesh, *rank).len()))
            .collect();
        let mut values =
            Values { runtime: &self.runtime, layouts, slots: slots.iter(), masters, error: None };
        let template = module.map(&mut values);
        match values.error {
            Some(error) => Err(error),
            None => {
                let place = |master| self.runtime.state_placement().place(master);
                Ok((template, values.masters.into_iter().map(place).collect()))
            }
        }
    }

    /// Completes the engine: checks that all ranks have built the same model under the same
    /// policy, and copies the first replica's values to the others. Collective.
    pub fn finish(self) -> Result<Engine, ShardError> {
        let EngineBuilder { runtime, units, .. } = self;
        runtime.set_units(&units);
        let layout = Layout {
            mesh: runtime.mesh,
            units: units.iter().map(|unit| unit.layout.clone()).collect(),
        };
        let engine = Engine { runtime, units, layout };
        engine.compare_plans()?;
        engine.broadcast_replicas()?;
        Ok(engine)
    }
}

impl Engine {
    /// Which parameter lies where.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How ranks are arranged.
    pub fn mesh(&self) -> Mesh {
        self.runtime.mesh
    }

    /// The policy this engine was built with.
    pub fn policy(&self) -> &Policy {
        &self.runtime.policy
    }

    /// The communicator of all ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.runtime.world
    }

    /// Says what this rank does from now on besides communicating, such as `"data loading"`. When
    /// other ranks wait for it, they say so.
    pub fn set_activity(&self, name: &'static str) {
        self.runtime.world.recorder().set_activity(name);
    }

    pub(crate) fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    pub(crate) fn units(&self) -> &[Arc<Unit>] {
        &self.units
    }

    /// Opens a step: gradients of the last one are gone, nothing is under way.
    pub fn begin_step(&self) {
        *lock(&self.runtime.progress.loss) = LossSum::default();
        #[cfg(feature = "cube")]
        self.device_step();
        for unit in &self.units {
            unit.begin_step();
        }
    }

    /// Starts a forward pass on `device` and returns the token for its first part.
    pub fn begin_forward(&self, device: &Device) -> Token {
        self.runtime.forward_position.store(0, Ordering::Relaxed);
        self.runtime.pool.open();
        Token::root(device)
    }

    /// Runs backward from `loss` `[1]`, and adds it to that of the step. Gradients add up over the
    /// micro-batches of a step and are reduced over the ranks during the backward of the last one.
    /// Collective.
    pub fn backward(&self, loss: Tensor<1>, last_micro_batch: bool) -> Result<(), ShardError> {
        self.runtime.check()?;
        self.runtime.last_micro_batch.store(last_micro_batch, Ordering::Relaxed);
        drop(add_loss(loss, &self.runtime).backward());
        if last_micro_batch {
            // Parts that backward has not left, such as those that the loss does not depend on:
            // their gradients count as zero, in the same order on every rank.
            for unit in self.units.iter().rev() {
                unit.post_backward();
            }
            self.runtime.reducer.finish(&self.runtime);
            self.reshard_all();
        }
        self.runtime.reshard_frozen();
        self.runtime.pool.close();
        self.runtime.check()
    }

    /// Ends a pass that has no backward, such as an evaluation: frees every gathered weight.
    pub fn finish_evaluation(&self) -> Result<(), ShardError> {
        self.reshard_all();
        self.runtime.check()
    }

    fn reshard_all(&self) {
        for unit in &self.units {
            unit.reshard();
        }
        self.runtime.pool.close();
    }

    /// The first failure, if any. Operations on the tape cannot return errors; call this after a
    /// forward pass.
    pub fn check(&self) -> Result<(), ShardError> {
        self.runtime.check()
    }

    /// Sums `values` over all ranks, in rank order and f64. What replicas hold alike, such as shards
    /// of weights under `NO_SHARD` and the hybrid strategies, counts once per replica: for sums over
    /// shards there is [`Engine::sum_over_shards`]. Collective.
    pub fn sum_over_ranks(&self, label: &str, values: &[f64]) -> Result<Vec<f64>, ShardError> {
        self.sum_in(Phase::Loss, label, values)
    }

    /// Sums `values` over the ranks that hold different shards, in f64: what each has found in its own
    /// shard becomes that of the whole model, once, under every strategy. Collective.
    pub fn sum_over_shards(&self, label: &str, values: &[f64]) -> Result<Vec<f64>, ShardError> {
        let Some(group) = &self.runtime.shard else { return Ok(values.to_vec()) };
        self.sum_within(&**group, Label::new(label, Phase::Loss), values)
    }

    /// [`Engine::sum_over_ranks`] in a phase of the caller's choice. Collective.
    pub fn sum_in(
        &self,
        phase: Phase,
        label: &str,
        values: &[f64],
    ) -> Result<Vec<f64>, ShardError> {
        self.sum_within(&*self.runtime.world, Label::new(label, phase), values)
    }

    fn sum_within(
        &self,
        group: &dyn Communicator,
        label: Label,
        values: &[f64],
    ) -> Result<Vec<f64>, ShardError> {
        let work = group.all_reduce(label, Buffer::from_slice(values));
        let sum = self.runtime.wait(work);
        self.runtime.check()?;
        Ok(sum.map_or(Ok(Vec::new()), |sum| sum.as_slice::<f64>().map(<[f64]>::to_vec))?)
    }

    /// The messages of all ranks, in rank order; they may differ in length. Collective.
    pub fn exchange(
        &self,
        phase: Phase,
        label: &str,
        message: &[u8],
    ) -> Result<Vec<Vec<u8>>, ShardError> {
        let ranks = self.runtime.world.world_size();
        let mut lengths = vec![0.0; ranks];
        lengths[self.runtime.rank] = message.len() as f64;
        // Exact: no message is anywhere near 2^53 bytes long.
        let lengths = self.sum_in(phase, label, &lengths)?;
        let longest = lengths.iter().fold(0.0, |a: f64, b| a.max(*b)) as usize;
        if longest == 0 {
            return Ok(vec![Vec::new(); ranks]);
        }
        let mut mine = message.to_vec();
        mine.resize(longest, 0);
        let all = Buffer::zeros(DType::U8, longest * ranks);
        let mine = Arc::new(Buffer::from_slice(&mine));
        let work = self.runtime.world.all_gather(Label::new(label, phase), mine, all);
        let all = self.runtime.wait(work);
        self.runtime.check()?;
        let all = all.as_ref().map_or(&[][..], Buffer::as_bytes);
        let messages = all.chunks(longest).zip(lengths);
        Ok(messages.map(|(bytes, length)| bytes[..length as usize].to_vec()).collect())
    }

    /// Names of units whose gathered weights were kept alive by a view after they should have been
    /// freed.
    pub fn pinned_units(&self) -> Vec<String> {
        self.runtime.pinned()
    }

    /// The most streamed units (kept outer parts aside) that were unsharded at one time since the
    /// last call.
    pub fn take_peak_unsharded(&self) -> usize {
        self.runtime.live.take_peak()
    }

    /// Time this rank has waited for communication since the last call.
    pub fn take_waited(&self) -> Duration {
        self.runtime.take_waited()
    }

    fn compare_plans(&self) -> Result<(), ShardError> {
        let mut hasher = DefaultHasher::new();
        format!("{:?} {:?}", self.runtime.policy, self.layout).hash(&mut hasher);
        let plan = Buffer::from_slice(&hasher.finish().to_le_bytes());
        let world = &self.runtime.world;
        let all = Buffer::zeros(DType::U8, plan.len() * world.world_size());
        let work = world.all_gather(Label::new("plan", Phase::Init), Arc::new(plan), all);
        let Some(all) = self.runtime.wait(work) else { return self.runtime.check() };
        let plans: Vec<_> = all.as_bytes().chunks(size_of::<u64>()).collect();
        let ranks: Vec<_> = (0..plans.len()).filter(|rank| plans[*rank] != plans[0]).collect();
        if ranks.is_empty() { Ok(()) } else { Err(ShardError::PlanMismatch { ranks }) }
    }

    fn broadcast_replicas(&self) -> Result<(), ShardError> {
        let Some(group) = &self.runtime.replicate else { return Ok(()) };
        for unit in &self.units {
            // Moved out, so that no second copy is needed.
            let empty = Arc::new(Buffer::zeros(DType::F32, 0));
            let master = std::mem::replace(&mut unit.state().master, empty);
            let master = Arc::try_unwrap(master)
                .map_err(|_| ShardError::Pinned { unit: unit.layout.name.clone() })?;
            let work = group.broadcast(unit.label(Phase::Init), master, 0);
            if let Some(master) = self.runtime.wait(work) {
                unit.state().master = Arc::new(master);
            }
        }
        self.runtime.check()
    }
}

/// Initialises one parameter after the other and keeps this rank's part of it.
struct Values<'a> {
    runtime: &'a Runtime,
    layouts: &'a [UnitLayout],
    slots: std::slice::Iter<'a, (usize, usize)>,
    masters: Vec<Buffer>,
    error: Option<ShardError>,
}

impl Values<'_> {
    fn keep(&mut self, index: usize, slot: usize, values: &[f32]) -> Result<(), ShardError> {
        let layout = &self.layouts[index];
        let shard = layout.shard_range(&self.runtime.mesh, self.runtime.rank);
        let (held, from) = layout.parameters[slot].held_by(&shard);
        flat::copy_values(&values[from], &mut self.masters[index].as_mut_slice::<f32>()?[held]);
        Ok(())
    }
}

impl ModuleMapper for Values<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&(index, slot)) = self.slots.next() else {
            unreachable!("invariant: mapping meets the parameters that visiting met");
        };
        let (id, device) = (param.id, param.lazy_device());
        self.runtime.place_on(&device);
        let data = param.into_value().into_data().convert::<f32>();
        let kept = match data.as_slice::<f32>() {
            Ok(values) => self.keep(index, slot, values),
            Err(error) => Err(ShardError::InitialValues {
                name: self.layouts[index].parameters[slot].name.clone(),
                reason: format!("{error:?}"),
            }),
        };
        if let Err(error) = kept {
            self.error.get_or_insert(error);
        }
        Param::initialized(id, Tensor::empty([0; D], &device.without_autodiff()))
    }
}
