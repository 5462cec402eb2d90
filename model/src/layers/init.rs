//! The inputs of a layer's constructor, and its errors.

use burn::tensor::Device;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{Linear, Lora};
use crate::config::ModelConfig;
use crate::random::Key;
use crate::settings::{ReadKeys, UnreadKey};

/// The place of the layer of the head.
const HEAD_LAYER: &str = "head_layer";

/// The beginning of the names of the parameters of the layer of the head.
pub const HEAD_LAYER_PREFIX: &str = "head_layer.";

/// The inputs of a layer's constructor.
#[derive(Clone, Copy, Debug)]
pub struct LayerInit<'a> {
    /// The shape of the model.
    pub model: &'a ModelConfig,
    /// Index of the block that contains the layer.
    pub index: usize,
    /// Place of the layer in its block: `attention` or `ffn`; empty for the block.
    pub place: &'static str,
    /// Name by which the configuration selects the layer or block; empty for the default block.
    pub name: &'a str,
    /// Key of the layer's initial weights. Fork it for each parameter.
    pub key: Key,
    /// Device of the weights.
    pub device: &'a Device,
    /// Record of the settings that layers read, kept by [`Decoder::new`](crate::Decoder::new).
    pub read: Option<&'a ReadKeys>,
}

/// The section of the settings of custom layers and blocks.
const EXTRA: &str = "model.extra";

impl<'a> LayerInit<'a> {
    /// Returns the inputs for block `index` of a model.
    pub fn for_block(model: &'a ModelConfig, index: usize, key: Key, device: &'a Device) -> Self {
        let key = key.fork("layers").fork_index(index as u64);
        let name = model.block.as_deref().unwrap_or_default();
        LayerInit { model, index, place: "", name, key, device, read: None }
    }

    /// Returns the inputs for the layer of the head, whose index is the number of blocks.
    pub fn for_head_layer(model: &'a ModelConfig, key: Key, device: &'a Device) -> Self {
        let name = model.head_layer.as_deref().unwrap_or_default();
        let key = key.fork("head_layer");
        LayerInit { model, index: model.layers, place: HEAD_LAYER, name, key, device, read: None }
    }

    /// Returns the same inputs, which note the keys that the layer reads in `read`.
    pub(crate) fn noting(self, read: &'a ReadKeys) -> Self {
        LayerInit { read: Some(read), ..self }
    }

    /// Returns the inputs for the layer `name` at `place` in the block.
    pub(super) fn for_layer(self, place: &'static str, name: &'a str) -> Self {
        LayerInit { place, name, ..self.fork(place) }
    }

    /// Returns the inputs for a nested layer, with the key forked by `place`.
    pub fn fork(self, place: &str) -> Self {
        LayerInit { key: self.key.fork(place), ..self }
    }

    /// Creates a map without bias, called `name` in this layer, with normally distributed weights of standard deviation
    /// `std`. It has an adapter if the model's [`LoraConfig`](crate::LoraConfig) selects it.
    pub fn linear(&self, name: &str, d_in: usize, d_out: usize, std: f64) -> Linear {
        let (key, device) = (self.key.fork(name), self.device);
        let full_name = || match self.place {
            "" => format!("layers.{}.{name}", self.index),
            place => format!("layers.{}.{place}.{name}", self.index),
        };
        let lora = self.model.lora.as_ref().filter(|_| self.place != HEAD_LAYER);
        let lora = lora.filter(|lora| lora.adapts(&full_name()));
        let lora = lora.map(|lora| Lora::new(lora, name, [d_in, d_out], key, device));
        Linear { lora, ..Linear::new(d_in, d_out, std, key, device) }
    }

    /// Deserializes the settings of this layer or block.
    ///
    /// If `[model.extra]` has a table for any layer or block of the model, such as `[model.extra.lora]` for the block
    /// `lora`, it must consist of such tables, and each part reads its own; a part without a table reads an empty one.
    /// Otherwise, all parts read `[model.extra]` itself, which suits programs with one part.
    ///
    /// If `T` has `deny_unknown_fields`, a key without a field is an error here. A key that no part reads is an error of
    /// [`Decoder::new`](crate::Decoder::new).
    ///
    /// # Errors
    ///
    /// [`LayerError::Extra`] if the keys do not match `T`, or a table belongs to no part of the model.
    pub fn extra<T: DeserializeOwned>(&self) -> Result<T, LayerError> {
        let extra = &self.model.extra;
        let parts = parts(self.model);
        if !has_tables(self.model) {
            return self.deserialize(EXTRA, extra.clone());
        }
        if let Some((key, _)) = extra.iter().find(|entry| !is_table_of(&parts, *entry)) {
            let parts: Vec<_> = parts.iter().map(|name| format!("`{name}`")).collect();
            let reason = format!(
                "not a table of a part of this model, {}, although [model.extra] has such tables",
                parts.join(", ")
            );
            return Err(self.invalid(format!("{EXTRA}.{key}"), reason));
        }
        let own = extra.get(self.name).and_then(Value::as_object).cloned().unwrap_or_default();
        self.deserialize(&format!("{EXTRA}.{}", self.name), own)
    }

    fn deserialize<T: DeserializeOwned>(
        &self,
        table: &str,
        keys: Map<String, Value>,
    ) -> Result<T, LayerError> {
        if let Some(read) = self.read {
            read.note::<T>(table);
        }
        serde_path_to_error::deserialize(Value::Object(keys)).map_err(|error| {
            let key = match error.path().iter().next() {
                Some(_) => format!("{table}.{}", error.path()),
                None => table.to_owned(),
            };
            self.invalid(key, error.inner().to_string())
        })
    }

    fn invalid(&self, key: String, reason: String) -> LayerError {
        let layer = match self.place {
            "" => format!("layers.{}", self.index),
            HEAD_LAYER => HEAD_LAYER.to_owned(),
            place => format!("layers.{}.{place}", self.index),
        };
        LayerError::Extra { key, reason, layer }
    }
}

/// Returns the names of the parts that `model` consists of.
fn parts(model: &ModelConfig) -> Vec<&String> {
    let ModelConfig { block, head_layer, attention, feed_forward, .. } = model;
    block.iter().chain(head_layer).chain([attention, feed_forward]).collect()
}

fn is_table_of(parts: &[&String], (key, value): (&String, &Value)) -> bool {
    parts.contains(&key) && value.is_object()
}

/// Returns whether `[model.extra]` has a table for a part of the model.
fn has_tables(model: &ModelConfig) -> bool {
    let parts = parts(model);
    model.extra.iter().any(|entry| is_table_of(&parts, entry))
}

/// Fails if `[model.extra]` has a key that none of the model's parts has `read`.
pub(crate) fn check_read(model: &ModelConfig, read: &ReadKeys) -> Result<(), UnreadKey> {
    if !has_tables(model) {
        return read.check(EXTRA, &model.extra);
    }
    model.extra.iter().try_for_each(|(name, table)| {
        let table = table.as_object().cloned().unwrap_or_default();
        read.check(&format!("{EXTRA}.{name}"), &table)
    })
}

/// The reason why a layer cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayerError {
    /// The configuration, or a checkpoint, names a layer that this program does not have.
    #[error(
        "model.{key} = \"{name}\": this program has no layer with this name{}. Run a custom \
         layer with the program that registers it",
        quoted(known)
    )]
    Unknown {
        /// The key in the `[model]` section.
        key: &'static str,
        /// The name in the configuration.
        name: String,
        /// The available values.
        known: Vec<String>,
    },
    /// The settings of a custom layer are invalid.
    #[error("{key}: {reason} ({layer})")]
    Extra {
        /// The key or table, such as `model.extra.lora.rank`.
        key: String,
        /// The fault in the settings.
        reason: String,
        /// The layer or block that reads the settings, such as `layers.0.ffn`.
        layer: String,
    },
    /// No layer or block reads a setting of `[model.extra]`.
    #[error(transparent)]
    Unread(#[from] UnreadKey),
    /// The layer does not support a model of this shape.
    #[error("{0}")]
    Shape(String),
}

fn quoted(names: &[String]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("\"{name}\"")).collect();
    if names.is_empty() { String::new() } else { format!(", only {}", names.join(", ")) }
}
