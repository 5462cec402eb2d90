//! The inputs of a layer's constructor, and its errors.

use burn::tensor::Device;
use serde::de::DeserializeOwned;

use crate::config::ModelConfig;
use crate::random::Key;

/// The inputs of a layer's constructor.
#[derive(Clone, Copy, Debug)]
pub struct LayerInit<'a> {
    /// The shape of the model.
    pub model: &'a ModelConfig,
    /// Index of the block that contains the layer.
    pub index: usize,
    /// Key of the layer's initial weights. Fork it for each parameter.
    pub key: Key,
    /// Device of the weights.
    pub device: &'a Device,
}

impl<'a> LayerInit<'a> {
    /// Returns the inputs for block `index` of a model.
    pub fn for_block(model: &'a ModelConfig, index: usize, key: Key, device: &'a Device) -> Self {
        LayerInit { model, index, key: key.fork("layers").fork_index(index as u64), device }
    }

    /// Returns the inputs for a nested layer, with the key forked by `place`.
    pub fn fork(self, place: &str) -> Self {
        LayerInit { key: self.key.fork(place), ..self }
    }

    /// Deserializes the keys of `[model.extra]`, the settings of custom layers. If `T` has `deny_unknown_fields`, a
    /// key without a field is an error.
    ///
    /// # Errors
    ///
    /// [`LayerError::Extra`] if the keys do not match `T`.
    pub fn extra<T: DeserializeOwned>(&self) -> Result<T, LayerError> {
        let extra = serde_json::Value::Object(self.model.extra.clone());
        serde_json::from_value(extra).map_err(|error| LayerError::Extra { reason: error.to_string() })
    }
}

/// The reason why a layer cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayerError {
    /// The configuration, or a checkpoint, names a layer that this program does not have.
    #[error(
        "model.{key} = \"{name}\": this program has no layer with this name, only {}. Run a custom \
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
    #[error("model.extra: {reason}")]
    Extra {
        /// The fault in the settings.
        reason: String,
    },
    /// The layer does not support a model of this shape.
    #[error("{0}")]
    Shape(String),
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}
