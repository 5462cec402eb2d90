//! The assignment of rules to parameters.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use super::adamw::AdamW;
use super::rule::{Rule, Settings};
use crate::layout::OwnedSlot;

/// Function that returns the rule and options of the parameter with this name and shape.
type Choose = Arc<dyn Fn(&str, &[usize]) -> Choice + Send + Sync>;

/// An optimizer: one rule for all parameters, or several rules and their assignment.
///
/// ```
/// # use std::sync::Arc;
/// # use kiln_shard::{AdamW, Choice, Muon, Optimizer};
/// // Muon for the matrices of blocks, AdamW for the rest.
/// let muon = Optimizer::new("muon", vec![Arc::new(AdamW::default()), Arc::new(Muon::default())], |name, shape| {
///     let is_matrix = name.starts_with("layers.") && shape.len() >= 2;
///     Choice { rule: usize::from(is_matrix), ..Choice::default() }
/// });
/// assert_eq!(muon.slots(), ["exp_avg", "exp_avg_sq", "momentum_buffer"]);
/// ```
#[derive(Clone)]
pub struct Optimizer {
    name: Arc<str>,
    rules: Vec<Arc<dyn Rule>>,
    choose: Choose,
}

/// The rule of a parameter, and its options.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Index of its rule.
    pub rule: usize,
    /// Factor for the learning rate of a step, instead of the rule's own factor.
    pub learning_rate: Option<f64>,
    /// Decoupled weight decay, instead of the rule's own.
    pub weight_decay: Option<f64>,
    /// Index of the parameter's learning rate in [`LearningRates`](super::LearningRates), instead of the first.
    pub schedule: Option<usize>,
}

impl Default for Choice {
    /// Selects the first rule, without options.
    fn default() -> Self {
        Choice { rule: 0, learning_rate: None, weight_decay: None, schedule: None }
    }
}

/// The rule and settings of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Assignment {
    /// Index of its rule.
    pub(crate) rule: usize,
    pub(crate) settings: Settings,
}

/// The rule that the parameters of one group share, and their settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GroupRule {
    /// Index of the rule.
    pub(crate) rule: usize,
    /// Settings of each parameter.
    pub(crate) settings: Vec<Settings>,
}

impl Optimizer {
    /// Creates an optimizer that checkpoints call `name`. `choose(name, shape)` selects one of `rules` for a
    /// parameter; an index beyond the last rule selects the last one.
    ///
    /// # Panics
    ///
    /// If there is no rule, two rules have the same name, or the name of the optimizer is empty.
    pub fn new(
        name: &str,
        rules: Vec<Arc<dyn Rule>>,
        choose: impl Fn(&str, &[usize]) -> Choice + Send + Sync + 'static,
    ) -> Self {
        assert!(!rules.is_empty(), "optimizer `{name}` has no rule");
        assert!(!name.is_empty(), "an optimizer needs a name");
        let mut names = BTreeSet::new();
        for rule in &rules {
            assert!(names.insert(rule.name()), "optimizer `{name}` has two rules `{}`", rule.name());
        }
        Optimizer { name: name.into(), rules, choose: Arc::new(choose) }
    }

    /// Renames the optimizer.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        Optimizer { name: name.into(), ..self }
    }

    /// Changes the choices for parameters: `change(name, shape, choice)` returns the new choice.
    #[must_use]
    pub fn choosing(self, change: impl Fn(&str, &[usize], Choice) -> Choice + Send + Sync + 'static) -> Self {
        let before = self.choose;
        let choose = Arc::new(move |name: &str, shape: &[usize]| change(name, shape, before(name, shape)));
        Optimizer { choose, ..self }
    }

    /// Adds a rule for the parameters that `is_its(name, shape)` accepts, overriding earlier choices.
    #[must_use]
    pub fn with_rule(
        self,
        rule: impl Rule + 'static,
        is_its: impl Fn(&str, &[usize]) -> bool + Send + Sync + 'static,
    ) -> Self {
        let (before, last) = (self.choose, self.rules.len() - 1);
        let choose = Arc::new(move |name: &str, shape: &[usize]| {
            if is_its(name, shape) {
                return Choice::default();
            }
            let choice = before(name, shape);
            Choice { rule: choice.rule.min(last) + 1, ..choice }
        });
        // The new rule comes first, because it usually has few parameters. A module's groups are reduced in the order
        // of the rules, the last one while backward continues.
        let rule: Arc<dyn Rule> = Arc::new(rule);
        let rules = [rule].into_iter().chain(self.rules).collect();
        Optimizer { choose, rules, ..self }
    }

    /// Returns the optimizer's name, as in checkpoints.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the rules, in the order of [`Choice::rule`].
    pub fn rules(&self) -> impl ExactSizeIterator<Item = &dyn Rule> {
        self.rules.iter().map(|rule| &**rule)
    }

    /// Returns the names of the slots of all rules.
    pub fn slots(&self) -> Vec<&'static str> {
        let mut slots = Vec::new();
        for slot in self.rules().flat_map(Rule::slots) {
            if !slots.contains(slot) {
                slots.push(*slot);
            }
        }
        slots
    }

    /// Returns the names of the owned slots of all rules.
    pub fn owned_slots(&self) -> Vec<&'static str> {
        let mut slots = Vec::new();
        for slot in self.rules().flat_map(Rule::owned_slots) {
            if !slots.contains(slot) {
                slots.push(*slot);
            }
        }
        slots
    }

    /// Returns the choice for a parameter.
    pub fn choice(&self, name: &str, shape: &[usize]) -> Choice {
        (self.choose)(name, shape)
    }

    /// Returns the rule of a parameter.
    pub fn rule_of(&self, name: &str, shape: &[usize]) -> &dyn Rule {
        &*self.rules[self.assign(name, shape).rule]
    }

    /// Returns the owned slots of a parameter.
    pub fn owned_slots_of(&self, name: &str, shape: &[usize]) -> Vec<OwnedSlot> {
        let rule = self.rule_of(name, shape);
        let slots = rule.owned_slots().iter();
        let slots =
            slots.map(|slot| OwnedSlot { name: (*slot).to_owned(), shape: rule.owned_shape(slot, shape) });
        slots.filter(|slot| slot.numel() > 0).collect()
    }

    pub(crate) fn rule(&self, index: usize) -> &dyn Rule {
        &*self.rules[index]
    }

    /// Returns the rule of a parameter, and its settings with the parameter's options applied.
    pub(crate) fn assign(&self, name: &str, shape: &[usize]) -> Assignment {
        let Choice { rule, learning_rate, weight_decay, schedule } = self.choice(name, shape);
        let rule = rule.min(self.rules.len() - 1);
        let mut settings = self.rules[rule].settings(shape);
        settings.learning_rate = learning_rate.unwrap_or(settings.learning_rate);
        settings.weight_decay = weight_decay.unwrap_or(settings.weight_decay);
        settings.schedule = schedule.unwrap_or(settings.schedule);
        Assignment { rule, settings }
    }
}

impl<R: Rule + 'static> From<R> for Optimizer {
    /// Creates an optimizer that uses `rule` for all parameters and has the rule's name.
    fn from(rule: R) -> Self {
        let name = rule.name().to_owned();
        Optimizer::new(&name, vec![Arc::new(rule)], |_, _| Choice::default())
    }
}

impl Default for Optimizer {
    /// Returns an optimizer that uses [`AdamW`] with its defaults.
    fn default() -> Self {
        AdamW::default().into()
    }
}

impl fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Optimizer").field("name", &self.name).field("rules", &self.rules).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::{ShardRun, UpdateStep};
    use super::*;

    #[derive(Debug)]
    struct Left;

    impl Rule for Left {
        fn name(&self) -> &str {
            "left"
        }

        fn owned_slots(&self) -> &[&'static str] {
            &["square", "own"]
        }

        fn owned_shape(&self, slot: &str, shape: &[usize]) -> Vec<usize> {
            match (slot, shape) {
                ("square", [rows, _]) => vec![*rows, *rows],
                ("square", _) => vec![0, 7],
                _ => shape.to_vec(),
            }
        }

        fn update(&self, _: &UpdateStep, _: ShardRun<'_>) {}
    }

    #[test]
    fn parameters_have_the_owned_slots_of_their_rule() {
        let optimizer = Optimizer::default().with_rule(Left, |name, _| name != "norm");
        assert!(optimizer.rule_of("a", &[2, 3]).is_whole() && !optimizer.rule_of("norm", &[3]).is_whole());
        assert_eq!(
            (optimizer.owned_slots(), optimizer.slots()),
            (vec!["square", "own"], vec!["exp_avg", "exp_avg_sq"])
        );
        let slots = |name: &str, shape: &[usize]| {
            let slots = optimizer.owned_slots_of(name, shape);
            slots.into_iter().map(|slot| (slot.name, slot.shape)).collect::<Vec<_>>()
        };
        assert_eq!(slots("a", &[2, 3]), [("square".to_owned(), vec![2, 2]), ("own".to_owned(), vec![2, 3])]);
        assert_eq!(slots("b", &[3]), [("own".to_owned(), vec![3])]);
        assert_eq!(slots("norm", &[3]), []);
    }
}
