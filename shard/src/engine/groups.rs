//! Grouping of a module's parameters.

use std::collections::BTreeMap;

use crate::layout::ParamGroupLayout;
use crate::optim::{GroupRule, Optimizer};
use crate::sharded_module::ParameterPlace;

/// The parameter groups of one module: one per rule for the trainable parameters, and one for the frozen parameters,
/// if there are any.
pub(super) struct ModuleGroups {
    pub(super) layouts: Vec<ParamGroupLayout>,
    /// The rule of each group.
    pub(super) rules: Vec<GroupRule>,
    /// The group and index of each parameter.
    pub(super) places: Vec<ParameterPlace>,
}

impl ModuleGroups {
    pub(super) fn new(
        module: &str,
        parameters: Vec<(String, Vec<usize>)>,
        optimizer: &Optimizer,
        is_frozen: &dyn Fn(&str) -> bool,
        world_size: usize,
    ) -> Self {
        /// A pair: true for a frozen parameter, and the rule of a trainable one. Groups are sorted by this pair.
        type Kind = (bool, usize);
        type Group = (Vec<(String, Vec<usize>)>, GroupRule);
        let mut groups: BTreeMap<Kind, Group> = BTreeMap::new();
        let mut places = Vec::new();
        for (name, shape) in parameters {
            let assignment = optimizer.assign(&name, &shape);
            let kind = if is_frozen(&name) { (true, 0) } else { (false, assignment.rule) };
            let (parameters, rule) = groups.entry(kind).or_default();
            rule.rule = kind.1;
            rule.settings.push(assignment.settings);
            places.push((kind, parameters.len()));
            parameters.push((name, shape));
        }
        let kinds: Vec<_> = groups.keys().copied().collect();
        let group = |kind: Kind| kinds.iter().position(|other| *other == kind).unwrap_or(0);
        let place = |(kind, parameter)| ParameterPlace { group: group(kind), parameter };
        let places = places.into_iter().map(place).collect();
        let of_group = |(index, ((is_frozen, rule), (parameters, group_rule)))| {
            let name = match (is_frozen, index) {
                (true, _) => format!("{module}.frozen"),
                (false, 0) => module.to_owned(),
                (false, _) => format!("{module}.{}", optimizer.rule(rule).name()),
            };
            let mut layout = ParamGroupLayout::new(name, !is_frozen, parameters, world_size);
            if !is_frozen {
                for parameter in &mut layout.parameters {
                    parameter.owned_slots = optimizer.owned_slots_of(&parameter.name, &parameter.shape);
                }
            }
            (layout, group_rule)
        };
        let (layouts, rules) = groups.into_iter().enumerate().map(of_group).unzip();
        ModuleGroups { layouts, rules, places }
    }
}

/// A parameter group that an engine would have, for plans of memory and communication.
#[derive(Clone, Debug)]
pub struct PlannedGroup {
    /// The layout of its parameters.
    pub layout: ParamGroupLayout,
    /// Number of values that the optimizer keeps per element.
    pub slots: usize,
    /// True if the optimizer needs whole parameters, which the ranks exchange for the update.
    pub is_whole: bool,
}

impl PlannedGroup {
    /// Returns the groups of the module `module`, whose parameters have these names and shapes, as
    /// [`EngineBuilder::fully_shard`](crate::EngineBuilder::fully_shard) creates them.
    pub fn from_module(
        module: &str,
        parameters: Vec<(String, Vec<usize>)>,
        optimizer: &Optimizer,
        is_frozen: &dyn Fn(&str) -> bool,
        world_size: usize,
    ) -> Vec<Self> {
        let ModuleGroups { layouts, rules, .. } =
            ModuleGroups::new(module, parameters, optimizer, is_frozen, world_size);
        let planned = |(layout, rule): (ParamGroupLayout, GroupRule)| {
            let rule = optimizer.rule(rule.rule);
            let (slots, is_whole) = match layout.trainable {
                true => (rule.slots().len(), rule.is_whole()),
                false => (0, false),
            };
            PlannedGroup { layout, slots, is_whole }
        };
        layouts.into_iter().zip(rules).map(planned).collect()
    }
}
