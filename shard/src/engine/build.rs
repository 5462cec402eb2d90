//! Builds an engine from modules. When the engine is complete, all ranks check that they have the same model and
//! policy, and replicas get the same initial values.

use std::borrow::Cow;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use kiln_collectives::{Buffer, Communicator, DType, Label, Phase};

use super::core::Engine;
use super::groups::ModuleGroups;
use crate::buffers::host::copy_values;
use crate::comm::{CommContext, Reducer};
use crate::error::ShardError;
use crate::layout::{ParamGroupLayout, parameters_of};
use crate::memory::{self, MemoryOwner, owned_by};
use crate::optim::{GroupRule, Optimizer};
use crate::param_group::{GroupOptions, Neighbours, ParamGroup, ParamGroups};
use crate::policy::Policy;
use crate::sharded_module::{ParameterPlace, ShardOptions, ShardedModule};

/// Collects the modules of a model, in the order of its forward pass.
pub struct EngineBuilder {
    context: Arc<CommContext>,
    reducer: Arc<Reducer>,
    groups: ParamGroups,
    optimizer: Optimizer,
    /// The rule of each group.
    rules: Vec<GroupRule>,
    names: HashSet<String>,
    frozen: Box<dyn Fn(&str) -> bool>,
    loaded: Box<dyn Fn(&str) -> bool>,
}

impl EngineBuilder {
    /// Starts an engine on the ranks of `world`, arranged for `policy.strategy`; hybrid strategies need
    /// `shard_size`. Collective.
    pub fn new(
        world: Arc<dyn Communicator>,
        policy: Policy,
        shard_size: Option<usize>,
    ) -> Result<Self, ShardError> {
        let is_supported = |dtype| matches!(dtype, DType::F32 | DType::BF16);
        // f16 requires a GPU that holds the state, which is known only when the first module is added.
        if !is_supported(policy.compute_dtype) && policy.compute_dtype != DType::F16 {
            return Err(ShardError::UnsupportedDType { what: "compute dtype", dtype: policy.compute_dtype });
        }
        if !is_supported(policy.reduce_dtype) {
            return Err(ShardError::UnsupportedDType { what: "reduce dtype", dtype: policy.reduce_dtype });
        }
        let context = Arc::new(CommContext::new(world, policy, shard_size)?);
        Ok(EngineBuilder {
            reducer: Arc::new(Reducer::new(context.clone())),
            context,
            groups: Vec::new(),
            optimizer: Optimizer::default(),
            rules: Vec::new(),
            names: HashSet::new(),
            frozen: Box::new(|_| false),
            loaded: Box::new(|_| false),
        })
    }

    /// Freezes the parameters of later modules whose full name `frozen` accepts: they are sharded, gathered and freed
    /// like others, but have no gradient, reduction or optimizer state.
    pub fn freeze(mut self, frozen: impl Fn(&str) -> bool + 'static) -> Self {
        self.frozen = Box::new(frozen);
        self
    }

    /// Calls `mark` with each frozen weight that a forward pass puts on burn's tape, where it must be so that
    /// backward can gather it again. An operation that knows the mark saves the time of the weight's gradient, which
    /// is discarded.
    pub fn mark_frozen(self, mark: fn(NodeId)) -> Self {
        self.context.mark_frozen_with(mark);
        self
    }

    /// Makes [`Engine::update`] update the parameters of later modules with `optimizer`, instead of AdamW
    /// with its defaults.
    ///
    /// # Panics
    ///
    /// If a module was added already: its parameters are grouped by the rules of the previous optimizer.
    pub fn optimizer(mut self, optimizer: impl Into<Optimizer>) -> Self {
        assert!(
            self.groups.is_empty(),
            "EngineBuilder::optimizer: name the optimizer before the first module"
        );
        self.optimizer = optimizer.into();
        self
    }

    /// Skips the initialisation of the parameters of later modules whose full name `loaded` accepts: they are
    /// zero until they are loaded ([`Engine::load_parameter`], [`Engine::fill_parameter`]). Otherwise,
    /// loading a model would draw random weights only to replace them.
    pub fn load_later(mut self, loaded: impl Fn(&str) -> bool + 'static) -> Self {
        self.loaded = Box::new(loaded);
        self
    }

    /// Shards `module`. Each parameter is initialised, cut to this rank's shard and freed before the next one. `name`
    /// is the module's name in logs. A parameter's name is `prefix` plus its path in the module, such as `layers.3.`
    /// plus `attention.q_proj.weight`. Parameters that are not floats are left unchanged.
    pub fn fully_shard<M: Module + Sync + 'static>(
        &mut self,
        name: &str,
        prefix: &str,
        module: M,
        options: ShardOptions,
    ) -> Result<ShardedModule<M>, ShardError> {
        let parameters = parameters_of(&module, prefix);
        for (name, _) in &parameters {
            if !self.names.insert(name.clone()) {
                return Err(ShardError::DuplicateParameter { name: name.clone() });
            }
        }
        let world_size = self.context.mesh.world_size();
        let groups = ModuleGroups::new(name, parameters, &self.optimizer, &self.frozen, world_size);
        let ModuleGroups { layouts, rules, places } = groups;
        let (template, masters) = self.cut(module, &layouts, &places)?;
        if self.context.policy.compute_dtype == DType::F16 && self.context.state_placement().is_host() {
            let (what, dtype) = ("compute dtype", DType::F16);
            return Err(ShardError::UnsupportedDType { what, dtype });
        }
        self.rules.extend(rules);
        let first = self.groups.len();
        for (layout, master) in layouts.iter().zip(masters) {
            let of_group = GroupOptions {
                position: self.groups.len(),
                module: first..first + layouts.len(),
                reshard_after_forward: options.reshard_after_forward,
                unshard_in_backward: options.unshard_in_backward,
                is_initialised: layout.parameters.iter().any(|p| !(self.loaded)(&p.name)),
            };
            let (context, reducer) = (self.context.clone(), self.reducer.clone());
            let group = ParamGroup::new(layout.clone(), of_group, master, context, reducer);
            self.groups.push(Arc::new(group));
        }
        let groups = self.groups[first..].to_vec();
        Ok(ShardedModule::new(template, places, groups, self.context.clone(), options.block))
    }

    /// Moves the values of `module` into this rank's shards, one per layout, and replaces the parameters by
    /// placeholders.
    fn cut<M: Module>(
        &self,
        module: M,
        layouts: &[ParamGroupLayout],
        places: &[ParameterPlace],
    ) -> Result<(M, Vec<Buffer>), ShardError> {
        let CommContext { mesh, rank, .. } = &*self.context;
        let masters = layouts
            .iter()
            .map(|layout| {
                let len = layout.shard_range(mesh, *rank).len();
                owned_by(MemoryOwner::Weights, || Buffer::zeros(DType::F32, len))
            })
            .collect();
        let mut values = Values {
            context: &self.context,
            loaded: &self.loaded,
            layouts,
            places: places.iter(),
            masters,
            error: None,
        };
        let template = module.map(&mut values);
        let place = |master| self.context.state_placement().place(Cow::Owned(master));
        let masters = values.masters;
        values.error.map_or_else(|| Ok((template, masters.into_iter().map(place).collect())), Err)
    }

    /// Completes the engine: checks that all ranks have built the same model with the same policy, and copies
    /// the first replica's values to the others. Collective.
    pub fn finish(self) -> Result<Engine, ShardError> {
        let EngineBuilder { context, reducer, groups, optimizer, rules, .. } = self;
        connect(&groups);
        if context.placement().is_host() {
            context.world.recorder().count_bytes(memory::bytes_here);
        }
        memory::name_modules(groups.iter().map(|group| group.layout.name.clone()));
        let engine = Engine::new(context, reducer, groups, optimizer, rules);
        engine.check_rules()?;
        engine.compare_plans()?;
        engine.broadcast_replicas()?;
        Ok(engine)
    }
}

impl Engine {
    /// Checks that all ranks have built the same model with the same policy. Collective.
    fn compare_plans(&self) -> Result<(), ShardError> {
        let context = &self.context;
        let mut hasher = DefaultHasher::new();
        format!("{:?} {:?} {:?} {:?}", context.policy, self.layout, self.optimizer, self.rules)
            .hash(&mut hasher);
        // These flags determine the broadcasts.
        self.groups.iter().for_each(|group| group.options.is_initialised.hash(&mut hasher));
        let plan = Buffer::from_slice(&hasher.finish().to_le_bytes());
        let all = Buffer::zeros(DType::U8, plan.len() * context.world.world_size());
        let label = Label::new("plan", Phase::Init);
        let work = context.world.all_gather(label, Arc::new(plan), all);
        let Some(all) = context.wait(work) else { return context.check() };
        let plans: Vec<_> = all.as_bytes().chunks(size_of::<u64>()).collect();
        let ranks: Vec<_> = (0..plans.len()).filter(|rank| plans[*rank] != plans[0]).collect();
        if ranks.is_empty() { Ok(()) } else { Err(ShardError::PlanMismatch { ranks }) }
    }

    /// Fails if a rule does not support the device of its parameters or contradicts itself, or a name stands for two kinds
    /// of slots.
    fn check_rules(&self) -> Result<(), ShardError> {
        let slots = self.optimizer.slots();
        if let Some(slot) = self.optimizer.owned_slots().into_iter().find(|slot| slots.contains(slot)) {
            return Err(ShardError::SlotName { slot });
        }
        for rule in &self.rules {
            let rule = self.optimizer.rule(rule.rule);
            if !rule.owned_slots().is_empty() && !rule.is_whole() {
                return Err(ShardError::NotWhole { rule: rule.name().to_owned() });
            }
        }
        #[cfg(feature = "cube")]
        for (rule, group) in self.rules.iter().zip(&self.groups) {
            let rule = self.optimizer.rule(rule.rule);
            let is_host = self.context.state_placement().is_host();
            let is_host_rule = rule.on_device().is_none() || !rule.owned_slots().is_empty();
            if group.layout.trainable && !is_host && is_host_rule {
                return Err(ShardError::HostRule { rule: rule.name().to_owned() });
            }
        }
        Ok(())
    }

    /// Copies the first replica's initial weights to the others. Collective.
    fn broadcast_replicas(&self) -> Result<(), ShardError> {
        let Some(replicate) = &self.context.replicate else { return Ok(()) };
        for group in self.groups.iter().filter(|group| group.options.is_initialised) {
            // Moved out, so that no second copy is needed.
            let empty = Arc::new(Buffer::zeros(DType::F32, 0));
            let master = std::mem::replace(&mut group.state().master, empty);
            let master = Arc::try_unwrap(master)
                .map_err(|_| ShardError::Pinned { group: group.layout.name.clone() })?;
            let work = replicate.broadcast(group.label(Phase::Init), master, 0);
            if let Some(master) = self.context.wait(work) {
                group.state().master = Arc::new(master);
            }
        }
        self.context.check()
    }
}

/// Stores in each group which groups forward and backward need after it.
fn connect(groups: &ParamGroups) {
    let weak = |position: usize| {
        let module = groups.get(position).map_or(0..0, |group| group.options.module.clone());
        groups[module].iter().map(Arc::downgrade).collect::<Vec<_>>()
    };
    for group in groups {
        let module = &group.options.module;
        let previous = (0..module.start).rev();
        let previous = previous.into_iter().find(|at| groups[*at].options.unshard_in_backward);
        group.set_neighbours(Neighbours {
            next: weak(module.end),
            previous: previous.map_or_else(Vec::new, weak),
        });
    }
}

/// Initialises the parameters one at a time and keeps this rank's part of each.
struct Values<'a> {
    context: &'a CommContext,
    loaded: &'a dyn Fn(&str) -> bool,
    layouts: &'a [ParamGroupLayout],
    places: std::slice::Iter<'a, ParameterPlace>,
    masters: Vec<Buffer>,
    error: Option<ShardError>,
}

impl Values<'_> {
    fn keep(&mut self, place: ParameterPlace, values: &[f32]) -> Result<(), ShardError> {
        let ParameterPlace { group, parameter } = place;
        let layout = &self.layouts[group];
        let shard = layout.shard_range(&self.context.mesh, self.context.rank);
        let (held, from) = layout.parameters[parameter].held_by(&shard);
        copy_values(&values[from], &mut self.masters[group].as_mut_slice::<f32>()?[held]);
        Ok(())
    }
}

impl ModuleMapper for Values<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&place) = self.places.next() else {
            unreachable!("invariant: mapping meets the parameters that visiting met");
        };
        let (id, device) = (param.id, param.lazy_device());
        self.context.place_on(&device);
        let placeholder = Tensor::empty([0; D], &device.clone().without_autodiff());
        let name = &self.layouts[place.group].parameters[place.parameter].name;
        if (self.loaded)(name) {
            // The parameter was dropped before it was initialised.
            return Param::initialized(id, placeholder);
        }
        let data = param.into_value().into_data().convert::<f32>();
        let kept = match data.as_slice::<f32>() {
            Ok(values) => self.keep(place, values),
            Err(error) => Err(ShardError::InitialValues { name: name.clone(), reason: format!("{error:?}") }),
        };
        if let Err(error) = kept {
            self.error.get_or_insert(error);
        }
        Param::initialized(id, placeholder)
    }
}
