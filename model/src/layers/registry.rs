//! The layers that a configuration can refer to by name: the built-in ones, and those added by a program.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::{
    AnyLayer, Attention, Block, GeGlu, Layer, LayerError, LayerInit, Moe, ParallelBlock, SquaredRelu, SwiGlu,
};
use crate::config::{FULL_ATTENTION, MOE, ModelConfig, PARALLEL_RESIDUAL, SWIGLU};

type Make = Arc<dyn Fn(LayerInit) -> Result<AnyLayer, LayerError> + Send + Sync>;

type MakeAround = Arc<dyn Fn(LayerInit, AnyLayer, AnyLayer) -> Result<AnyLayer, LayerError> + Send + Sync>;

/// The constructor of a block.
#[derive(Clone)]
enum MakeBlock {
    /// Creates a whole block, including its layers.
    Whole(Make),
    /// Creates a block from the attention and feed-forward layers that the configuration names.
    Around(MakeAround),
}

/// The constructors of the layers of one kind, by name.
#[derive(Clone)]
struct Makers<M> {
    key: &'static str,
    by_name: BTreeMap<String, M>,
}

impl<M> Makers<M> {
    fn new(key: &'static str) -> Self {
        Makers { key, by_name: BTreeMap::new() }
    }

    /// Registers `make` under `name`. Panics if the name is empty or taken: checkpoints refer to layers by name, so a
    /// name must identify one layer only.
    fn add(&mut self, name: &str, make: M) {
        let key = self.key;
        assert!(!name.is_empty(), "model.{key}: a layer needs a name");
        let earlier = self.by_name.insert(name.to_owned(), make);
        assert!(earlier.is_none(), "model.{key} = \"{name}\" is a layer already: choose another name");
    }

    fn get(&self, name: &str) -> Result<&M, LayerError> {
        match self.by_name.get(name) {
            Some(make) => Ok(make),
            None => Err(LayerError::Unknown {
                key: self.key,
                name: name.to_owned(),
                known: self.by_name.keys().cloned().collect(),
            }),
        }
    }
}

/// The layers available to a decoder. [`Layers::default`] has the built-in ones.
///
/// ```
/// # use kiln_model::layers::{LayerInit, Layers, SwiGlu};
/// let layers = Layers::default().feed_forward("my-swiglu", |init: LayerInit| Ok(SwiGlu::new(init)));
/// ```
#[derive(Clone)]
pub struct Layers {
    attention: Makers<Make>,
    feed_forward: Makers<Make>,
    block: Makers<MakeBlock>,
    head_layer: Makers<Make>,
}

/// Converts `make` to a constructor of [`AnyLayer`].
fn any<L: Layer>(make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static) -> Make {
    Arc::new(move |init| make(init).map(AnyLayer::new))
}

impl Default for Layers {
    fn default() -> Self {
        let none = Layers {
            attention: Makers::new("attention"),
            feed_forward: Makers::new("feed_forward"),
            block: Makers::new("block"),
            head_layer: Makers::new("head_layer"),
        };
        none.attention(FULL_ATTENTION, |init| Ok(Attention::new(init)))
            .feed_forward(SWIGLU, |init| Ok(SwiGlu::new(init)))
            .feed_forward(MOE, Moe::layer_of)
            .feed_forward("geglu", |init| Ok(GeGlu::new(init)))
            .feed_forward("squared_relu", |init| Ok(SquaredRelu::new(init)))
            .block_around(PARALLEL_RESIDUAL, |init, attention, ffn| {
                Ok(ParallelBlock::new(init, attention, ffn))
            })
    }
}

impl Layers {
    /// Adds a layer that mixes positions, for `model.attention = name`.
    ///
    /// # Panics
    ///
    /// If the name is empty, or taken by a layer of this kind.
    pub fn attention<L: Layer>(
        mut self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        self.attention.add(name, any(make));
        self
    }

    /// Adds a layer that mixes channels, for `model.feed_forward = name`.
    ///
    /// # Panics
    ///
    /// If the name is empty, or taken by a layer of this kind.
    pub fn feed_forward<L: Layer>(
        mut self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        self.feed_forward.add(name, any(make));
        self
    }

    /// Adds a whole block, for `model.block = name`. The block creates its layers itself.
    ///
    /// # Panics
    ///
    /// If the name is empty, or taken by a layer of this kind.
    pub fn block<L: Layer>(
        mut self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        self.block.add(name, MakeBlock::Whole(any(make)));
        self
    }

    /// Adds a block made from the attention and feed-forward layers that the configuration names, for `model.block =
    /// name`. To keep the names of the default block's parameters, and so load its checkpoints, return a [`Block`]
    /// with [wrapped](AnyLayer::wrapped) layers.
    ///
    /// ```
    /// # use kiln_model::layers::{Layers, ParallelBlock};
    /// let layers = Layers::default()
    ///     .block_around("mine", |init, attention, ffn| Ok(ParallelBlock::new(init, attention, ffn)));
    /// ```
    ///
    /// # Panics
    ///
    /// If the name is empty, or taken by a block.
    pub fn block_around<L: Layer>(
        mut self,
        name: &str,
        make: impl Fn(LayerInit, AnyLayer, AnyLayer) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        let make = move |init: LayerInit<'_>, attention, ffn| make(init, attention, ffn).map(AnyLayer::new);
        self.block.add(name, MakeBlock::Around(Arc::new(make)));
        self
    }

    /// Adds a layer of the head, for `model.head_layer = name`: an extra head, say, which only an objective runs
    /// ([`decoder::head_layer`](crate::decoder::head_layer)). Its parameters belong to the head's module.
    ///
    /// # Panics
    ///
    /// If the name is empty, or taken by a layer of this kind.
    pub fn head_layer<L: Layer>(
        mut self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        self.head_layer.add(name, any(make));
        self
    }

    /// Returns the layers that `model` names but that are not registered here, as pairs of a key in `[model]` and the
    /// name. A block that is not registered counts as made from the layers that `model` names.
    pub fn missing<'a>(&self, model: &'a ModelConfig) -> Vec<(&'static str, &'a str)> {
        let head_layer =
            model.head_layer.as_ref().filter(|name| !self.head_layer.by_name.contains_key(*name));
        let head_layer = head_layer.map(|name| (self.head_layer.key, name.as_str()));
        let block = model.block.as_ref().map(|name| (name, self.block.by_name.get(name)));
        if let Some((_, Some(MakeBlock::Whole(_)))) = block {
            return head_layer.into_iter().collect();
        }
        let block = block.filter(|(_, make)| make.is_none());
        let block = block.map(|(name, _)| (self.block.key, name.as_str())).into_iter().chain(head_layer);
        let layers = [(&self.attention, &model.attention), (&self.feed_forward, &model.feed_forward)];
        let missing = layers.into_iter().filter(|(makers, name)| !makers.by_name.contains_key(*name));
        block.chain(missing.map(|(makers, name)| (makers.key, name.as_str()))).collect()
    }

    /// Creates the layer of the head that `model.head_layer` names, if any.
    ///
    /// # Errors
    ///
    /// If the layer does not exist, or cannot be created.
    pub fn make_head_layer(&self, init: LayerInit) -> Result<Option<AnyLayer>, LayerError> {
        let Some(name) = &init.model.head_layer else { return Ok(None) };
        let layer = self.head_layer.get(name)?(init)?;
        Ok(Some(layer.labelled(label(init.model, "head_layer"))))
    }

    /// Creates the block that `model.block` names, or [`Block`] if it is not set. Every block except for those of
    /// [`Layers::block`] is made from the attention and feed-forward layers that the configuration names.
    ///
    /// # Errors
    ///
    /// If a named layer does not exist, or cannot be created.
    pub fn make_block(&self, init: LayerInit) -> Result<AnyLayer, LayerError> {
        let place = format!("layers.{}", init.index);
        let label = |layer: AnyLayer, place: &str| layer.labelled(label(init.model, place));
        let block = init.model.block.as_ref().map(|name| self.block.get(name)).transpose()?;
        if let Some(MakeBlock::Whole(make)) = block {
            return Ok(label(make(init)?, &place));
        }
        let ModelConfig { attention, feed_forward, .. } = init.model;
        let attention = self.attention.get(attention)?(init.for_layer("attention", attention))?;
        let attention = label(attention, &format!("{place}.attention"));
        let ffn = self.feed_forward.get(feed_forward)?(init.for_layer("ffn", feed_forward))?;
        let ffn = label(ffn, &format!("{place}.ffn"));
        let block = match block {
            Some(MakeBlock::Around(make)) => make(init, attention, ffn)?,
            _ => AnyLayer::new(Block::new(init, attention, ffn)),
        };
        Ok(label(block, &place))
    }
}

/// Returns `place` with the name of its layer in the configuration, such as `layers.3.ffn ("swiglu")`.
pub(crate) fn label(model: &ModelConfig, place: &str) -> String {
    let name = match place.rsplit('.').next() {
        Some("attention") => Some(&model.attention),
        Some("ffn") => Some(&model.feed_forward),
        Some("head_layer") => model.head_layer.as_ref(),
        _ => model.block.as_ref(),
    };
    name.map_or_else(|| place.to_owned(), |name| format!("{place} (\"{name}\")"))
}

impl fmt::Debug for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layers")
            .field("attention", &self.attention.by_name.keys())
            .field("feed_forward", &self.feed_forward.by_name.keys())
            .field("block", &self.block.by_name.keys())
            .field("head_layer", &self.head_layer.by_name.keys())
            .finish()
    }
}
