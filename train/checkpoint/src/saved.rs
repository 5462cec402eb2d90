//! The parts of a parameter that a checkpoint stores.

use std::sync::Arc;

use kiln_shard::StateKind;
use serde::{Deserialize, Serialize};

/// A part of a parameter that a checkpoint stores; in a manifest `weight`, or the name of a slot of the
/// optimizer's state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Saved {
    /// The f32 master weight.
    Weight,
    /// A slot of the optimizer's state by its name, such as `exp_avg`.
    Slot(Arc<str>),
}

/// Name of a weight in a manifest.
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
    /// Returns the name of a slot; `None` for the weight.
    pub fn slot(&self) -> Option<&str> {
        match self {
            Saved::Weight => None,
            Saved::Slot(name) => Some(name),
        }
    }

    /// Returns the engine's corresponding kind of state.
    pub fn kind(&self) -> StateKind<'_> {
        self.slot().map_or(StateKind::Weight, StateKind::Slot)
    }

    /// Returns the key in a file of tensors for parameter `name`.
    pub fn key(&self, name: &str) -> String {
        self.slot().map_or_else(|| name.to_owned(), |slot| format!("{name}.{slot}"))
    }
}
