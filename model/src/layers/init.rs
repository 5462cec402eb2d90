//! What a layer is made from, and why it cannot be made.

use burn::tensor::Device;
use serde::de::DeserializeOwned;

use crate::config::ModelConfig;
use crate::random::Key;

/// What a layer is made from.
#[derive(Clone, Copy, Debug)]
pub struct LayerInit<'a> {
    /// The shape of the model.
    pub model: &'a ModelConfig,
    /// Index of the block that the layer is in.
    pub index: usize,
    /// Names the initial weights of the layer. Fork it for each parameter.
    pub key: Key,
    /// Where the weights will be.
    pub device: &'a Device,
}

impl<'a> LayerInit<'a> {
    /// What block `index` of a model is made from.
    pub fn of_block(model: &'a ModelConfig, index: usize, key: Key, device: &'a Device) -> Self {
        LayerInit { model, index, key: key.fork("layers").fork_index(index as u64), device }
    }

    /// The same for a layer inside, whose initial weights are named by `place`.
    pub fn fork(self, place: &str) -> Self {
        LayerInit { key: self.key.fork(place), ..self }
    }

    /// The keys of `[model.extra]`, which a layer of your own reads its settings from. With `deny_unknown_fields`
    /// on `T`, a key that no field is for is an error.
    ///
    /// # Errors
    ///
    /// [`LayerError::Extra`] if they do not fit `T`.
    pub fn extra<T: DeserializeOwned>(&self) -> Result<T, LayerError> {
        let extra = serde_json::Value::Object(self.model.extra.clone());
        serde_json::from_value(extra).map_err(|error| LayerError::Extra { reason: error.to_string() })
    }
}

/// A layer cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayerError {
    /// The configuration, or a checkpoint, names a layer that this program does not have.
    #[error(
        "model.{key} = \"{name}\": this program has no layer of that name, only {}. A layer of your own needs \
         the program that it was registered in",
        quoted(known)
    )]
    Unknown {
        /// The key in the `[model]` section.
        key: &'static str,
        /// Its value.
        name: String,
        /// The values that there are.
        known: Vec<String>,
    },
    /// A layer's own settings are not what it expects.
    #[error("model.extra: {reason}")]
    Extra {
        /// What is wrong with them.
        reason: String,
    },
    /// A layer cannot be made for a model of this shape.
    #[error("{0}")]
    Shape(String),
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}
