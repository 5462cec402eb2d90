//! The architecture and the optimizer that a checkpoint belongs to.
//!
//! Weights do not identify the code that uses them: a custom block may have the parameters of the built-in block but
//! compute something else. A checkpoint therefore names its architecture and optimizer.

use std::sync::Arc;

use std::collections::BTreeSet;

use kiln_model::{Layers, ModelConfig};
use kiln_shard::{Optimizer, StateKind};
use serde::{Deserialize, Serialize};

/// The architecture of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Architecture {
    /// Name of the whole model; `decoder` is [`kiln_model::decoder::Decoder`].
    pub name: String,
    /// Custom parts of the model.
    pub parts: Vec<CustomPart>,
}

/// A part of a model that is not built in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CustomPart {
    /// Kind of built-in part that it replaces, such as `block`.
    pub kind: String,
    /// Name given by its author.
    pub name: String,
}

impl Architecture {
    /// Returns the built-in decoder, without custom parts.
    pub fn decoder() -> Self {
        Architecture { name: "decoder".to_owned(), parts: Vec::new() }
    }

    /// Returns the architecture of `model`.
    pub fn from_model(model: &ModelConfig) -> Self {
        Architecture::without(&Layers::default(), model)
    }

    fn without(layers: &Layers, model: &ModelConfig) -> Self {
        let part = |(kind, name): (&str, &str)| CustomPart { kind: kind.to_owned(), name: name.to_owned() };
        Architecture {
            parts: layers.missing(model).into_iter().map(part).collect(),
            ..Architecture::decoder()
        }
    }

    /// Returns the reason why a program with `layers` cannot use the weights of `model`, if any.
    pub(crate) fn objection_with(layers: &Layers, model: &ModelConfig) -> Option<String> {
        Architecture::without(layers, model).objection(&Architecture::decoder())
    }

    /// Returns the reason why a program that builds `here` cannot use these weights, if any.
    pub(crate) fn objection(&self, here: &Architecture) -> Option<String> {
        if self == here {
            return None;
        }
        let lacking = here.lacks_of(self);
        if !lacking.is_empty() {
            let it = if lacking.len() == 1 { "it" } else { "them" };
            return Some(format!(
                "was trained with {}, which this program does not have: use the program that has {it}",
                lacking.join(" and ")
            ));
        }
        let additional = self.lacks_of(here);
        if additional.is_empty() {
            return Some("has its parts in another order: use the program that trained it".into());
        }
        Some(format!(
            "was trained without {}, which this program adds to the model: use a program without \
             it, such as `kiln`",
            additional.join(" and ")
        ))
    }

    fn lacks_of(&self, other: &Architecture) -> Vec<String> {
        let name = (self.name != other.name).then(|| format!("architecture `{}`", other.name));
        let parts = other.parts.iter().filter(|part| !self.parts.contains(part));
        name.into_iter().chain(parts.map(ToString::to_string)).collect()
    }
}

impl std::fmt::Display for CustomPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} `{}`", self.kind, self.name)
    }
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<_> = self.parts.iter().map(ToString::to_string).collect();
        match parts.as_slice() {
            [] => write!(f, "{}, all parts built in", self.name),
            parts => write!(f, "{} with {}, not built in", self.name, parts.join(" and ")),
        }
    }
}

/// An optimizer and the names of its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedOptimizer {
    /// Name of the optimizer, such as `adamw`.
    pub name: String,
    /// Names of the values kept for every element of a weight, such as `exp_avg`; empty for an optimizer without state.
    pub state: Vec<String>,
    /// Names of the values kept for whole weights, whose shape may differ from the weight's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub owned: Vec<String>,
}

impl SavedOptimizer {
    /// Returns the built-in AdamW.
    pub fn adamw() -> Self {
        SavedOptimizer::of(&Optimizer::default())
    }

    /// Returns the optimizer of a run.
    pub fn of(optimizer: &Optimizer) -> Self {
        let names = |slots: Vec<&str>| slots.into_iter().map(str::to_owned).collect();
        let (state, owned) = (names(optimizer.slots()), names(optimizer.owned_slots()));
        SavedOptimizer { name: optimizer.name().to_owned(), state, owned }
    }

    /// Reports whether both have the same name and the same state names, in any order.
    pub(super) fn is(&self, other: &Self) -> bool {
        let names = |slots: &[String]| BTreeSet::from_iter(slots.to_vec());
        self.name == other.name
            && names(&self.state) == names(&other.state)
            && names(&self.owned) == names(&other.owned)
    }

    /// Returns the names of all state, of elements and of whole weights.
    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.state.iter().chain(&self.owned)
    }

    pub(super) fn slots(&self) -> Vec<Saved> {
        self.names().map(|name| Saved::Slot(name.as_str().into())).collect()
    }
}

impl std::fmt::Display for SavedOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.names().cloned().collect::<Vec<_>>().as_slice() {
            [] => write!(f, "{} (without state)", self.name),
            state => write!(f, "{} (state {})", self.name, state.join(", ")),
        }
    }
}

/// A part of a parameter that a checkpoint stores. Manifests spell it `weight` or as the name of a slot.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Saved {
    /// The f32 master weight.
    Weight,
    /// A slot of the optimizer's state, by name, such as `exp_avg`.
    Slot(Arc<str>),
}

const WEIGHT: &str = "weight";

impl From<String> for Saved {
    fn from(name: String) -> Self {
        if name == WEIGHT { Saved::Weight } else { Saved::Slot(name.into()) }
    }
}

impl From<Saved> for String {
    fn from(saved: Saved) -> Self {
        saved.slot().unwrap_or(WEIGHT).to_owned()
    }
}

impl Saved {
    /// Returns the name of the slot; `None` for the weight.
    pub fn slot(&self) -> Option<&str> {
        match self {
            Saved::Weight => None,
            Saved::Slot(name) => Some(name),
        }
    }

    /// Returns the engine's corresponding state kind.
    pub fn kind(&self) -> StateKind<'_> {
        self.slot().map_or(StateKind::Weight, StateKind::Slot)
    }

    /// Returns the key of parameter `name` in a tensor file.
    pub fn key(&self, name: &str) -> String {
        self.slot().map_or_else(|| name.to_owned(), |slot| format!("{name}.{slot}"))
    }
}

#[cfg(test)]
mod tests {
    use kiln_model::layers::SwiGlu;

    use super::*;

    #[test]
    fn missing_and_additional_parts_are_named() {
        let with_block = |name: &str| {
            let block = Some(name.to_owned());
            Architecture::from_model(&ModelConfig { block, ..ModelConfig::preset("10m").unwrap() })
        };
        let (stock, mine) = (Architecture::decoder(), with_block("mine"));
        assert_eq!(stock.objection(&stock), None);
        assert_eq!(mine.objection(&mine.clone()), None);
        let objection = mine.objection(&stock).unwrap();
        assert!(objection.starts_with("was trained with block `mine`, which this program"), "{objection}");
        let objection = mine.objection(&with_block("yours")).unwrap();
        assert!(objection.contains("with block `mine`") && !objection.contains("yours"), "{objection}");
        let objection = stock.objection(&mine).unwrap();
        assert!(objection.contains("without block `mine`"), "{objection}");
        let other = Architecture { name: "encoder".to_owned(), ..Architecture::decoder() };
        let objection = other.objection(&stock).unwrap();
        assert!(objection.contains("with architecture `encoder`"), "{objection}");
        let model = ModelConfig { feed_forward: "mine".to_owned(), ..ModelConfig::preset("10m").unwrap() };
        let objection = Architecture::objection_with(&Layers::default(), &model).unwrap();
        assert!(objection.contains("with feed_forward `mine`"), "{objection}");
        let layers = Layers::default().feed_forward("mine", |init| Ok(SwiGlu::new(init)));
        assert_eq!(Architecture::objection_with(&layers, &model), None);
        // The same custom part twice makes a different model.
        let two = Architecture { parts: [mine.parts.clone(), mine.parts].concat(), ..stock };
        assert!(two.objection(&with_block("mine")).is_some());
    }
}
