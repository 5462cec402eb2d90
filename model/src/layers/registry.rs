//! The layers that a configuration can name: the built-in ones, and those that a program adds.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::{AnyLayer, Attention, Block, GeGlu, Layer, LayerError, LayerInit, SquaredRelu, SwiGlu};
use crate::config::{FULL_ATTENTION, ModelConfig, SWIGLU};

type Make = Arc<dyn Fn(LayerInit) -> Result<AnyLayer, LayerError> + Send + Sync>;

/// The layers of one kind, by name.
#[derive(Clone)]
struct Makers {
    key: &'static str,
    by_name: BTreeMap<String, Make>,
}

impl Makers {
    fn new(key: &'static str) -> Self {
        Makers { key, by_name: BTreeMap::new() }
    }

    /// Checkpoints name layers, so that a name stands for one layer only.
    fn add<L: Layer>(
        &mut self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) {
        let key = self.key;
        assert!(!name.is_empty(), "model.{key}: a layer needs a name");
        let make: Make = Arc::new(move |init| make(init).map(AnyLayer::new));
        let earlier = self.by_name.insert(name.to_owned(), make);
        assert!(earlier.is_none(), "model.{key} = \"{name}\" is a layer already: choose another name");
    }

    fn make(&self, name: &str, init: LayerInit) -> Result<AnyLayer, LayerError> {
        match self.by_name.get(name) {
            Some(make) => make(init),
            None => Err(LayerError::Unknown {
                key: self.key,
                name: name.to_owned(),
                known: self.by_name.keys().cloned().collect(),
            }),
        }
    }
}

/// The layers that a decoder can be made of. [`Layers::default`] has the built-in ones.
///
/// ```
/// # use kiln_model::layers::{LayerInit, Layers, SwiGlu};
/// let layers = Layers::default().feed_forward("my-swiglu", |init: LayerInit| Ok(SwiGlu::new(init)));
/// ```
#[derive(Clone)]
pub struct Layers {
    attention: Makers,
    feed_forward: Makers,
    block: Makers,
}

impl Default for Layers {
    fn default() -> Self {
        let none = Layers {
            attention: Makers::new("attention"),
            feed_forward: Makers::new("feed_forward"),
            block: Makers::new("block"),
        };
        none.attention(FULL_ATTENTION, |init| Ok(Attention::new(init)))
            .feed_forward(SWIGLU, |init| Ok(SwiGlu::new(init)))
            .feed_forward("geglu", |init| Ok(GeGlu::new(init)))
            .feed_forward("squared_relu", |init| Ok(SquaredRelu::new(init)))
    }
}

impl Layers {
    /// Adds a layer that mixes positions, for `model.attention = name`.
    ///
    /// # Panics
    ///
    /// When the name is empty, or a layer of this kind has it already.
    pub fn attention<L: Layer>(
        mut self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        self.attention.add(name, make);
        self
    }

    /// Adds a layer that mixes channels, for `model.feed_forward = name`.
    ///
    /// # Panics
    ///
    /// When the name is empty, or a layer of this kind has it already.
    pub fn feed_forward<L: Layer>(
        mut self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        self.feed_forward.add(name, make);
        self
    }

    /// Adds a whole block, for `model.block = name`.
    ///
    /// # Panics
    ///
    /// When the name is empty, or a layer of this kind has it already.
    pub fn block<L: Layer>(
        mut self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        self.block.add(name, make);
        self
    }

    /// The layers that `model` names and that are not among these: the key of `[model]`, and its value.
    pub fn missing<'a>(&self, model: &'a ModelConfig) -> Vec<(&'static str, &'a str)> {
        let named = match &model.block {
            Some(block) => vec![(&self.block, block)],
            None => vec![(&self.attention, &model.attention), (&self.feed_forward, &model.feed_forward)],
        };
        let is_missing = |(makers, name): &(&Makers, &String)| !makers.by_name.contains_key(*name);
        named.into_iter().filter(is_missing).map(|(makers, name)| (makers.key, name.as_str())).collect()
    }

    /// A block: the one that `model.block` names, or [`Block`] with the layers that the configuration names.
    pub fn make_block(&self, init: LayerInit) -> Result<AnyLayer, LayerError> {
        match &init.model.block {
            Some(name) => self.block.make(name, init),
            None => {
                let attention = self.attention.make(&init.model.attention, init.fork("attention"))?;
                let ffn = self.feed_forward.make(&init.model.feed_forward, init.fork("ffn"))?;
                Ok(AnyLayer::new(Block::new(init, attention, ffn)))
            }
        }
    }
}

impl fmt::Debug for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |makers: &Makers| makers.by_name.keys().cloned().collect::<Vec<_>>();
        f.debug_struct("Layers")
            .field("attention", &names(&self.attention))
            .field("feed_forward", &names(&self.feed_forward))
            .field("block", &names(&self.block))
            .finish()
    }
}
