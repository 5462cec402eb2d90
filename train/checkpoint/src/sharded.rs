//! A decoder whose modules are sharded over the ranks.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use kiln_model::decoder::{Decoder, Modules, WithLoss};
use kiln_model::layers::{AnyLayer, Embed, Head, LayerError, Layers};
use kiln_model::{Key, ModelConfig};
use kiln_shard::layout::parameters_of;
use kiln_shard::{Engine, EngineBuilder, ParamGroupLayout, ShardError, ShardOptions, ShardedModule};

/// Parameters of the outer modules are called as there, as in `embed_tokens.weight`.
const OUTER_PREFIX: &str = "";

/// The outer modules in logs and checkpoints.
const EMBED: &str = "embed";
const HEAD: &str = "head";

/// As in logs and checkpoints, the module of block `index`.
fn layer_name(index: usize) -> String {
    format!("layers.{index}")
}

/// A sharded decoder and the engine that moves its weights.
pub struct ShardedDecoder {
    engine: Arc<Engine>,
    embed: ShardedModule<Embed>,
    layers: Vec<ShardedModule<AnyLayer>>,
    head: ShardedModule<Head>,
    tied: bool,
}

/// How the embedding is sharded. Its rows are looked up; backward needs their indices only. A `tied` one is
/// needed again by the head, so it stays.
fn embed_options(tied: bool) -> ShardOptions {
    ShardOptions { reshard_after_forward: !tied, unshard_in_backward: false }
}

/// How the head is sharded: backward starts there.
const HEAD_OPTIONS: ShardOptions = ShardOptions { reshard_after_forward: false, unshard_in_backward: true };

impl ShardedDecoder {
    /// Shards `decoder`, module by module. Weights are initialised as they are cut, so that no rank
    /// ever holds more than one whole parameter. Collective.
    pub fn new(decoder: Decoder, builder: EngineBuilder) -> Result<Self, ShardError> {
        Self::with_progress(decoder, builder, |_, _| {})
    }

    /// [`ShardedDecoder::new`], which calls `progress` after each module: how many are done, and how many
    /// there are.
    pub fn with_progress(
        decoder: Decoder,
        mut builder: EngineBuilder,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self, ShardError> {
        let all = decoder.layers.len() + 2;
        let tied = decoder.head.lm_head.is_none();
        let embed = builder.fully_shard(EMBED, OUTER_PREFIX, decoder.embed, embed_options(tied))?;
        progress(1, all);
        let layers = decoder
            .layers
            .into_iter()
            .enumerate()
            .map(|(index, block)| {
                let module = builder.fully_shard(
                    &layer_name(index),
                    &format!("{}.", layer_name(index)),
                    block,
                    ShardOptions::default(),
                )?;
                progress(index + 2, all);
                Ok(module)
            })
            .collect::<Result<_, ShardError>>()?;
        let head = builder.fully_shard(HEAD, OUTER_PREFIX, decoder.head, HEAD_OPTIONS)?;
        progress(all, all);
        let engine = Arc::new(builder.finish()?);
        Ok(ShardedDecoder { engine, embed, layers, head, tied })
    }

    /// The engine: gradients, optimizer step, layout, statistics.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// One pass on `device`; with autodiff if the device has it.
    pub fn pass<'a>(&'a self, device: &'a Device) -> Pass<'a> {
        Pass { decoder: self, device }
    }
}

/// Hands out the modules of a sharded decoder for one forward pass.
pub struct Pass<'a> {
    decoder: &'a ShardedDecoder,
    device: &'a Device,
}

impl Modules for Pass<'_> {
    fn num_blocks(&self) -> usize {
        self.decoder.layers.len()
    }

    fn embed(&self, run: impl FnOnce(&Embed) -> Tensor<3>) -> Tensor<3> {
        let token = self.decoder.engine.begin_forward(self.device);
        run(&self.decoder.embed.unshard(&token))
    }

    fn block(
        &self,
        index: usize,
        x: Tensor<3>,
        run: impl Fn(&AnyLayer, Tensor<3>) -> WithLoss + Send + Sync + 'static,
    ) -> WithLoss {
        self.decoder.layers[index].run(x, run)
    }

    fn head<const D: usize>(
        &self,
        x: Tensor<3>,
        run: impl FnOnce(&Head, Option<&Embed>, Tensor<3>) -> Tensor<D>,
    ) -> Tensor<D> {
        let (x, token) = self.decoder.head.enter(x);
        let head = self.decoder.head.unshard(&token);
        let embed = self.decoder.tied.then(|| self.decoder.embed.unshard(&token));
        run(&head, embed.as_deref(), x)
    }
}

/// The built-in decoder of this shape, for names and shapes alone. Initialises nothing.
pub(crate) fn outline(model: &ModelConfig) -> Result<Decoder, LayerError> {
    Decoder::new(&Layers::default(), model, Key::new(0), &Device::flex())
}

/// Full names and shapes of parameters.
pub type Shapes = Vec<(String, Vec<usize>)>;

/// Full names and shapes of all parameters, as [`ShardedDecoder::new`] will call them, in the order
/// of the modules. Initialises nothing.
pub fn parameter_shapes(decoder: &Decoder) -> Shapes {
    module_shapes(decoder).into_iter().flatten().collect()
}

/// As [`parameter_shapes`], module by module: the embedding, the blocks, the head.
pub fn module_shapes(decoder: &Decoder) -> Vec<Shapes> {
    let mut modules = vec![parameters_of(&decoder.embed, OUTER_PREFIX)];
    for (index, block) in decoder.layers.iter().enumerate() {
        modules.push(parameters_of(block, &format!("{}.", layer_name(index))));
    }
    modules.push(parameters_of(&decoder.head, OUTER_PREFIX));
    modules
}

/// A module of a sharded decoder.
#[derive(Clone, Debug)]
pub struct ModuleOutline {
    /// Its name in logs, as in `layers.3`.
    pub name: String,
    /// Full names and shapes of its parameters.
    pub shapes: Shapes,
    /// How it is sharded.
    pub options: ShardOptions,
}

/// The modules of a decoder, as [`ShardedDecoder::new`] shards them. Initialises nothing.
pub fn modules_of(decoder: &Decoder) -> Vec<ModuleOutline> {
    let shapes = module_shapes(decoder);
    let last = shapes.len() - 1;
    let of_module = |(index, shapes)| {
        let (name, options) = match index {
            0 => (EMBED.to_owned(), embed_options(decoder.head.lm_head.is_none())),
            index if index == last => (HEAD.to_owned(), HEAD_OPTIONS),
            index => (layer_name(index - 1), ShardOptions::default()),
        };
        ModuleOutline { name, shapes, options }
    };
    shapes.into_iter().enumerate().map(of_module).collect()
}

/// The modules of a decoder over `ranks` ranks, as [`ShardedDecoder::new`] lays them out where nothing
/// is frozen. Initialises nothing.
pub fn layout_of(decoder: &Decoder, ranks: usize) -> Vec<ParamGroupLayout> {
    let layout = |module: ModuleOutline| ParamGroupLayout::new(module.name, true, module.shapes, ranks);
    modules_of(decoder).into_iter().map(layout).collect()
}

/// The full names of all parameters, as [`ShardedDecoder::new`] will call them. Initialises nothing.
pub fn parameter_names(decoder: &Decoder) -> Vec<String> {
    parameter_shapes(decoder).into_iter().map(|(name, _)| name).collect()
}
