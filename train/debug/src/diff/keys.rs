//! The keys in which two configurations differ, and the effects of each.

use std::collections::BTreeMap;

use serde::Serialize;
use toml::{Table, Value};

use super::difference::Expected;
use crate::hash::StepPhase;
use kiln_config::{Config, ConfigError, ModelSection, Precision};

/// The effect of a key on the numbers of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Numbers differ from this phase of a step on.
    Numbers(StepPhase),
    /// At most the order of sums changes, and with it their rounding.
    Rounding,
    Neither,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KeyDifference {
    pub key: String,
    /// The two values of the key as TOML; `None` if not set.
    pub values: [Option<String>; 2],
    pub effect: Effect,
}

impl KeyDifference {
    /// Returns the difference as text: `train.seed (0 in the first, 1 in the second)`.
    pub fn describe(&self) -> String {
        let [a, b] = self.values.each_ref().map(|value| value.as_deref().unwrap_or("not set"));
        format!("{} ({a} in the first, {b} in the second)", self.key)
    }
}

/// Effects of keys or sections. The first entry that is a prefix of the key applies.
const EFFECTS: &[(&str, Effect)] = &[
    ("model.rope_theta", Effect::Numbers(StepPhase::Forward)),
    ("model.rope_scaling", Effect::Numbers(StepPhase::Forward)),
    ("model.norm_eps", Effect::Numbers(StepPhase::Forward)),
    ("model.dropout", Effect::Numbers(StepPhase::Forward)),
    ("model.window", Effect::Numbers(StepPhase::Forward)),
    ("model.logit_softcap", Effect::Numbers(StepPhase::Loss)),
    ("model.feed_forward_bias", Effect::Numbers(StepPhase::Start)),
    ("model.feed_forward", Effect::Numbers(StepPhase::Forward)),
    ("model.attention_bias", Effect::Numbers(StepPhase::Start)),
    ("model.attention", Effect::Numbers(StepPhase::Forward)),
    ("model.block", Effect::Numbers(StepPhase::Forward)),
    ("model.head_layer", Effect::Numbers(StepPhase::Loss)),
    ("model.extra", Effect::Numbers(StepPhase::Forward)),
    ("model.moe", Effect::Numbers(StepPhase::Forward)),
    // Limits the length of generated texts and is not used in training.
    ("model.context_length", Effect::Neither),
    ("model.", Effect::Numbers(StepPhase::Start)),
    ("lora.", Effect::Numbers(StepPhase::Start)),
    ("data.", Effect::Numbers(StepPhase::Data)),
    ("train.seed", Effect::Numbers(StepPhase::Start)),
    ("train.global_batch", Effect::Numbers(StepPhase::Data)),
    ("train.z_loss", Effect::Numbers(StepPhase::Loss)),
    ("train.freeze", Effect::Numbers(StepPhase::Gradient)),
    ("train.train_only", Effect::Numbers(StepPhase::Gradient)),
    ("train.steps", Effect::Numbers(StepPhase::Update)),
    ("train.micro_batch", Effect::Rounding),
    ("train.ranks", Effect::Rounding),
    ("train.nonfinite", Effect::Neither),
    ("init.", Effect::Numbers(StepPhase::Start)),
    ("loss.", Effect::Numbers(StepPhase::Loss)),
    ("optim.", Effect::Numbers(StepPhase::Update)),
    ("precision.compute", Effect::Numbers(StepPhase::Forward)),
    ("precision.reduce", Effect::Numbers(StepPhase::Gradient)),
    ("shard.", Effect::Rounding),
    ("device.backend", Effect::Rounding),
    ("device.", Effect::Neither),
    ("comm.", Effect::Neither),
    ("eval.", Effect::Neither),
    ("checkpoint.", Effect::Neither),
    ("log.", Effect::Neither),
    ("sample.", Effect::Neither),
    // A program may do anything with its own keys.
    ("experiment.", Effect::Numbers(StepPhase::Start)),
];

fn effect_of(key: &str) -> Effect {
    let found = EFFECTS.iter().find(|(prefix, _)| key.starts_with(prefix));
    found.map_or(Effect::Numbers(StepPhase::Start), |(_, effect)| *effect)
}

/// Returns the differences to expect between runs with the configurations `a` and `b`, which differ in `keys`.
pub fn expected(a: &Config, b: &Config, keys: &[KeyDifference]) -> Expected {
    let is_half = |config: &Config| {
        [config.precision.compute(), config.precision.reduce]
            .iter()
            .any(|precision| *precision != Precision::F32)
    };
    Expected {
        is_strict: keys.iter().all(|key| key.effect != Effect::Rounding),
        is_half: is_half(a) && is_half(b),
    }
}

/// Returns the differing keys in section order. Presets are expanded, with the vocabulary size of either configuration.
pub fn differences(a: &Config, b: &Config) -> Vec<KeyDifference> {
    let vocab_size = a.model.vocab_size.or(b.model.vocab_size);
    let [of_a, of_b] = [a, b].map(|config| values_of(config, vocab_size));
    let keys: std::collections::BTreeSet<_> = of_a.keys().chain(of_b.keys()).collect();
    let differs = |key: &&String| of_a.get(*key) != of_b.get(*key);
    let shown = |values: &BTreeMap<String, Value>, key: &String| values.get(key).map(Value::to_string);
    // The balance of experts is a mean over a micro-batch, not a sum.
    let is_of_batch =
        |key: &str| key == "train.micro_batch" && [a, b].iter().any(|config| config.model.moe.is_some());
    let of_key = |key: &String| KeyDifference {
        key: key.clone(),
        values: [shown(&of_a, key), shown(&of_b, key)],
        effect: if is_of_batch(key) { Effect::Numbers(StepPhase::Loss) } else { effect_of(key) },
    };
    keys.into_iter().filter(differs).map(of_key).collect()
}

fn values_of(config: &Config, vocab_size: Option<usize>) -> BTreeMap<String, Value> {
    let mut config = config.clone();
    // Without a vocabulary size, any value serves to expand the shape.
    if let Ok(model) = config.resolve_model(None, vocab_size.or(Some(config.data.vocab_size))) {
        let context_length = config.model.context_length;
        config.model = ModelSection { vocab_size, context_length, ..ModelSection::from_model(&model) };
    }
    let mut values = BTreeMap::new();
    flatten("", &Table::try_from(&config).unwrap_or_default(), &mut values);
    values
}

fn flatten(prefix: &str, table: &Table, values: &mut BTreeMap<String, Value>) {
    for (key, value) in table {
        let key = format!("{prefix}{key}");
        match value {
            // An inner table with a `kind` key is one value, because its other keys depend on the kind.
            Value::Table(inner) if !inner.contains_key("kind") || prefix.is_empty() => {
                flatten(&format!("{key}."), inner, values);
            }
            value => _ = values.insert(key, value.clone()),
        }
    }
}

/// Returns `a` with the values of `keys` taken from `b`.
pub fn with_keys(a: &Config, b: &Config, keys: &[&KeyDifference]) -> Result<Config, ConfigError> {
    let vocab_size = a.model.vocab_size.or(b.model.vocab_size);
    let (mut values, others) = (values_of(a, vocab_size), values_of(b, vocab_size));
    for KeyDifference { key, .. } in keys {
        match others.get(key) {
            Some(value) => _ = values.insert(key.clone(), value.clone()),
            None => _ = values.remove(key),
        }
    }
    let mut table = Table::new();
    for (key, value) in values {
        let mut inner = &mut table;
        let (sections, key) = key.rsplit_once('.').unwrap_or(("", &key));
        for name in sections.split('.').filter(|name| !name.is_empty()) {
            let entry = inner.entry(name).or_insert_with(|| Value::Table(Table::new()));
            let problem =
                || ConfigError::invalid(format!("{sections} is a table in one, and not in the other"));
            inner = entry.as_table_mut().ok_or_else(problem)?;
        }
        inner.insert(key.to_owned(), value);
    }
    Value::Table(table).try_into().map_err(|error: toml::de::Error| ConfigError::invalid(error.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        toml::from_str(text).expect("a configuration")
    }

    #[test]
    fn sections_have_an_effect() {
        let table = Table::try_from(Config::default()).expect("TOML");
        for section in table.keys() {
            let known = EFFECTS.iter().any(|(prefix, _)| prefix.starts_with(&format!("{section}.")));
            assert!(known, "[{section}] has no effect listed");
        }
    }

    #[test]
    fn keys_are_found_and_copied() {
        let a = config("[model]\npreset = \"10m\"\n[train]\nseed = 1\n[optim]\nlr = 1e-3");
        let b = config(
            "[model]\npreset = \"10m\"\nrope_theta = 5.0\n[train]\nranks = 2\n[log]\nevery = 3\n\
             [optim]\nlr = 1e-3\n[[optim.groups]]\nparameters = [\"*norm*\"]\nweight_decay = 0.1",
        );
        let found = differences(&a, &b);
        let names: Vec<_> = found.iter().map(|difference| difference.key.as_str()).collect();
        assert_eq!(names, ["log.every", "model.rope_theta", "optim.groups", "train.ranks", "train.seed"]);
        let effects: Vec<_> = found.iter().map(|difference| difference.effect).collect();
        assert_eq!(effects[..2], [Effect::Neither, Effect::Numbers(StepPhase::Forward)]);
        assert_eq!(found[4].describe(), "train.seed (1 in the first, 0 in the second)");
        let all: Vec<_> = found.iter().collect();
        let mixed = with_keys(&a, &b, &all[1..3]).expect("a configuration");
        let left: Vec<_> = differences(&mixed, &b).into_iter().map(|difference| difference.key).collect();
        assert_eq!(left, ["log.every", "train.ranks", "train.seed"]);
        assert!(differences(&with_keys(&a, &b, &all).expect("a configuration"), &b).is_empty());
        assert!(differences(&a, &a).is_empty());
    }
}
