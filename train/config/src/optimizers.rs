//! The optimizers that a configuration can name: the built-in ones, and those that a program adds.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use globset::{Glob, GlobSet, GlobSetBuilder};
use kiln_model::layers::Moe;
use kiln_model::settings::ReadKeys;
use kiln_shard::{Choice, Optimizer, Rule, Sign};
use serde::de::DeserializeOwned;

use crate::{ADAMW, ConfigError, LrSchedule, MUON, OptimGroup, OptimSection, typed};

/// The input of a function that makes an optimizer.
#[derive(Clone, Copy, Debug)]
pub struct OptimizerInit<'a> {
    /// The section `[optim]`.
    pub section: &'a OptimSection,
    read: &'a ReadKeys,
}

/// The section of the settings of custom optimizers.
const EXTRA: &str = "optim.extra";

impl OptimizerInit<'_> {
    /// Reads the section `[optim.extra]`.
    ///
    /// # Errors
    ///
    /// If the section has keys unknown to `T`, or values of other types.
    pub fn extra<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        self.read.note::<T>(EXTRA);
        typed(EXTRA, &self.section.extra)
    }
}

type Make = Arc<dyn Fn(OptimizerInit) -> Result<Optimizer, ConfigError> + Send + Sync>;

/// The available optimizers, by name. [`Optimizers::default`] has the built-in ones.
#[derive(Clone)]
pub struct Optimizers(BTreeMap<String, Make>);

impl Default for Optimizers {
    fn default() -> Self {
        Optimizers(BTreeMap::new())
            .with(ADAMW, |init| {
                no_extra(init.section)?;
                Ok(init.section.adamw())
            })
            .with(MUON, |init| {
                no_extra(init.section)?;
                Ok(muon(init.section))
            })
    }
}

fn muon(section: &OptimSection) -> Optimizer {
    // The rule with few elements comes first: groups are reduced in this order, the last one while backward continues.
    let rules: Vec<Arc<dyn Rule>> = vec![Arc::new(section.adamw()), Arc::new(section.muon())];
    Optimizer::new(MUON, rules, |name, shape| {
        let is_matrix = name.starts_with("layers.") && shape.len() >= 2;
        Choice { rule: usize::from(is_matrix), ..Choice::default() }
    })
}

fn no_extra(section: &OptimSection) -> Result<(), ConfigError> {
    match section.extra.keys().next() {
        None => Ok(()),
        Some(key) => Err(ConfigError::invalid(format!(
            "optim.extra.{key}: the built-in optimizer `{}` has no such setting; [optim.extra] is for custom optimizers",
            section.kind
        ))),
    }
}

impl Optimizers {
    /// Adds an optimizer, for `optim.kind = name`. A single [`Rule`] is an optimizer for all parameters.
    ///
    /// # Panics
    ///
    /// If the name is empty, or another optimizer has it.
    #[must_use]
    pub fn with<O: Into<Optimizer>>(
        mut self,
        name: &str,
        make: impl Fn(OptimizerInit) -> Result<O, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        assert!(!name.is_empty(), "optim.kind: an optimizer needs a name");
        let (own, named) = (name.to_owned(), name.to_owned());
        let make: Make = Arc::new(move |init| Ok(make(init)?.into().named(&named)));
        let earlier = self.0.insert(own, make);
        assert!(earlier.is_none(), "optim.kind = \"{name}\" is an optimizer already: choose another name");
        self
    }

    /// Returns the optimizer that `section` describes.
    ///
    /// # Errors
    ///
    /// If there is no optimizer of that name, its settings are invalid, or a group names an unknown rule.
    pub fn make(&self, section: &OptimSection) -> Result<Optimizer, ConfigError> {
        let Some(make) = self.0.get(&section.kind) else {
            let known: Vec<_> = self.0.keys().map(|name| format!("\"{name}\"")).collect();
            return Err(ConfigError::invalid(format!(
                "optim.kind = \"{}\": this program has no such optimizer, only {}. Run a custom optimizer with the \
                 program that registers it",
                section.kind,
                known.join(", ")
            )));
        };
        let read = ReadKeys::default();
        let optimizer = make(OptimizerInit { section, read: &read })?;
        read.check(EXTRA, &section.extra).map_err(|unread| ConfigError::invalid(unread.to_string()))?;
        let groups = section.groups.iter().map(|group| OwnOptions::new(group, section, &optimizer));
        let groups = groups.collect::<Result<Vec<_>, _>>()?;
        let optimizer = optimizer.choosing(move |name, shape, choice| {
            let mine = groups.iter().filter(|group| group.names(name, shape));
            mine.fold(choice, |choice, group| Choice {
                rule: group.rule.unwrap_or(choice.rule),
                learning_rate: group.learning_rate.or(choice.learning_rate),
                weight_decay: group.weight_decay.or(choice.weight_decay),
                schedule: group.schedule.or(choice.schedule),
            })
        });
        // These biases follow the load of the experts instead of a gradient, so no optimizer or group replaces this
        // rule.
        let sign = Sign { rate: section.expert_bias_lr };
        Ok(optimizer.with_rule(sign, |name, _| name.rsplit('.').next() == Some(Moe::BIAS)))
    }
}

impl fmt::Debug for Optimizers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

struct OwnOptions {
    parameters: GlobSet,
    dims: Option<usize>,
    rule: Option<usize>,
    learning_rate: Option<f64>,
    weight_decay: Option<f64>,
    /// Index of the group's rate in [`learning_rates`](crate::schedule::learning_rates).
    schedule: Option<usize>,
}

impl OwnOptions {
    fn new(group: &OptimGroup, section: &OptimSection, optimizer: &Optimizer) -> Result<Self, ConfigError> {
        let rules: Vec<_> = optimizer.rules().map(Rule::name).collect();
        let rule = |name: &String| {
            rules.iter().position(|rule| rule == name).ok_or_else(|| {
                ConfigError::invalid(format!(
                    "optim.groups: `{}` has no rule `{name}`, only {}",
                    section.kind,
                    rules.join(", ")
                ))
            })
        };
        let mut parameters = GlobSetBuilder::new();
        for pattern in &group.parameters {
            parameters.add(glob(pattern)?);
        }
        let unusable = |error: globset::Error| ConfigError::invalid(format!("optim.groups: {error}"));
        let parameters = parameters.build().map_err(unusable)?;
        let schedules = section.lr_schedules();
        let index = |own: LrSchedule| schedules.iter().position(|schedule| *schedule == own);
        Ok(OwnOptions {
            parameters,
            dims: group.dims,
            rule: group.rule.as_ref().map(rule).transpose()?,
            learning_rate: group.lr.map(|lr| section.relative(lr)),
            weight_decay: group.weight_decay,
            schedule: group.lr_schedule(section.lr_schedule()).and_then(index),
        })
    }

    fn names(&self, name: &str, shape: &[usize]) -> bool {
        self.dims.is_none_or(|dims| dims == shape.len()) && self.parameters.is_match(name)
    }
}

fn glob(pattern: &str) -> Result<Glob, ConfigError> {
    Glob::new(pattern)
        .map_err(|error| ConfigError::invalid(format!("optim.groups: \"{pattern}\": {}", error.kind())))
}

/// Fails if a group matches no parameter, which is probably a typo. `shapes` lists all parameters.
pub fn check_groups(groups: &[OptimGroup], shapes: &[(String, Vec<usize>)]) -> Result<(), ConfigError> {
    let mut problems = Vec::new();
    for group in groups {
        let of_dims = |shape: &[usize]| group.dims.is_none_or(|dims| dims == shape.len());
        for pattern in &group.parameters {
            let named = glob(pattern)?.compile_matcher();
            if !shapes.iter().any(|(name, shape)| of_dims(shape) && named.is_match(name)) {
                let some: Vec<_> = shapes.iter().take(3).map(|(name, _)| name.as_str()).collect();
                let dims = group.dims.map_or_else(String::new, |dims| format!(" of {dims} dimensions"));
                problems.push(format!(
                    "optim.groups: no parameter{dims} is called \"{pattern}\"; they are called {}, …",
                    some.join(", ")
                ));
            }
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigError::Invalid { problems }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(text: &str) -> OptimSection {
        toml::from_str(text).expect("a section")
    }

    #[test]
    fn star_matches_anything() {
        for (pattern, name, expected) in [
            ("*.norm.weight", "layers.0.norm.weight", true),
            ("*norm.weight", "norm.weight", true),
            ("layers.*.ffn.*", "layers.11.ffn.up_proj.weight", true),
            ("layers.1.*", "layers.11.ffn.up_proj.weight", false),
            ("layers.*.ffn", "layers.0.ffn.up_proj", false),
            ("norm.weight", "norm.weight", true),
            ("norm", "norm.weight", false),
        ] {
            let matches = glob(pattern).expect("a pattern").compile_matcher().is_match(name);
            assert_eq!(matches, expected, "{pattern} {name}");
        }
    }

    #[test]
    fn muon_updates_matrices_of_blocks() {
        let text = "kind = 'muon'\n[[groups]]\nparameters = ['layers.0.*']\ndims = 2\nrule = 'adamw'\n";
        let optimizer = Optimizers::default().make(&section(text)).expect("an optimizer");
        let rule = |name: &str, shape: &[usize]| optimizer.rule_of(name, shape).name().to_owned();
        assert_eq!(rule("layers.1.ffn.up_proj.weight", &[4, 8]), "muon");
        assert_eq!(rule("layers.0.ffn.up_proj.weight", &[4, 8]), "adamw");
        assert_eq!(rule("layers.1.ffn.experts.weight", &[2, 4, 8]), "muon");
        assert_eq!(rule("layers.1.ffn_norm.weight", &[4]), "adamw");
        assert_eq!(rule("embed_tokens.weight", &[16, 4]), "adamw");
    }

    #[test]
    fn expert_biases_use_the_sign_rule() {
        for kind in ["adamw", "muon"] {
            let text =
                format!("kind = '{kind}'\n[[groups]]\nparameters = ['*']\nrule = 'adamw'\nlr = 1e-4\n");
            let optimizer = Optimizers::default().make(&section(&text)).expect("an optimizer");
            let rule = |name: &str| optimizer.rule_of(name, &[4]).name().to_owned();
            assert_eq!(rule("layers.0.ffn.router_bias"), "sign");
            assert_eq!(rule("layers.0.ffn.router.bias"), "adamw");
            assert_eq!(optimizer.choice("layers.0.ffn.router_bias", &[4]), Choice::default());
            assert_eq!(optimizer.name(), kind);
            assert_eq!(optimizer.slots().len(), if kind == "muon" { 3 } else { 2 });
        }
    }

    #[test]
    fn groups_refer_to_schedules_by_index() {
        let text = "[[groups]]\nparameters = ['*']\nschedule = 'constant'\n\
                    [[groups]]\nparameters = ['norm.*']\nwarmup_steps = 3\n\
                    [[groups]]\nparameters = ['*.bias', 'norm.weight']\nlr = 1e-4\n\
                    [[groups]]\nparameters = ['head.*']\nschedule = 'cosine'\n";
        let section = section(text);
        assert_eq!(section.lr_schedules().len(), 3);
        let optimizer = Optimizers::default().make(&section).expect("an optimizer");
        let schedule = |name: &str| optimizer.choice(name, &[4]).schedule;
        assert_eq!(["embed.bias", "norm.weight", "head.bias"].map(schedule), [Some(1), Some(2), Some(0)]);
    }

    #[test]
    fn unknown_names_are_refused() {
        let problem =
            |text: &str| Optimizers::default().make(&section(text)).expect_err("refused").to_string();
        let message = problem("kind = 'lion'");
        assert!(
            message.contains("optim.kind = \"lion\"") && message.contains("\"adamw\", \"muon\""),
            "{message}"
        );
        let message = problem("[extra]\nbeta = 1");
        assert!(
            message.contains("optim.extra.beta: the built-in optimizer `adamw` has no such setting"),
            "{message}"
        );
        let message = problem("[[groups]]\nparameters = ['*']\nrule = 'muon'");
        assert!(message.contains("`adamw` has no rule `muon`, only adamw"), "{message}");
        let shapes = [("norm.weight".to_owned(), vec![4])];
        let groups = section("[[groups]]\nparameters = ['norm.*', 'nrom.*']").groups;
        let message = check_groups(&groups, &shapes).expect_err("a slip").to_string();
        assert!(
            message.contains("no parameter is called \"nrom.*\"") && !message.contains("\"norm.*\""),
            "{message}"
        );
    }
}
