//! A decoder whose modules are sharded over the ranks.

use std::cell::Cell;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use kiln_model::decoder::{Decoder, Modules, WithLoss};
use kiln_model::layers::{AnyLayer, Embed, Head, LayerError, Layers};
use kiln_model::{Key, ModelConfig, ops};
use kiln_shard::layout::parameters_of;
use kiln_shard::{
    Engine, EngineBuilder, LearningRates, Outcome, ParamGroupLayout, ShardError, ShardOptions, ShardedModule,
};

const OUTER_PREFIX: &str = "";

const EMBED: &str = "embed";
const HEAD: &str = "head";

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

/// Returns the sharding options of the embedding. A `tied` embedding stays in memory for the head.
fn embed_options(tied: bool) -> ShardOptions {
    ShardOptions { reshard_after_forward: !tied, unshard_in_backward: false, block: 0 }
}

fn block_options(index: usize) -> ShardOptions {
    ShardOptions { block: index, ..ShardOptions::default() }
}

const HEAD_OPTIONS: ShardOptions =
    ShardOptions { reshard_after_forward: false, unshard_in_backward: true, block: 0 };

impl ShardedDecoder {
    /// Shards `decoder`, module by module, so that no rank holds more than one whole parameter. Collective.
    pub fn new(decoder: Decoder, builder: EngineBuilder) -> Result<Self, ShardError> {
        Self::with_progress(decoder, builder, |_, _| {})
    }

    /// Shards `decoder` like [`ShardedDecoder::new`]. `progress` receives the numbers of finished and of all modules.
    pub fn with_progress(
        decoder: Decoder,
        mut builder: EngineBuilder,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Self, ShardError> {
        builder = builder.mark_frozen(ops::without_gradient);
        let all = decoder.layers.len() + 2;
        let tied = decoder.head.lm_head.is_none();
        let embed = builder.fully_shard(EMBED, OUTER_PREFIX, decoder.embed, embed_options(tied))?;
        progress(1, all);
        let mut layers = Vec::new();
        for (index, block) in decoder.layers.into_iter().enumerate() {
            let name = layer_name(index);
            layers.push(builder.fully_shard(&name, &format!("{name}."), block, block_options(index))?);
            progress(index + 2, all);
        }
        let head = builder.fully_shard(HEAD, OUTER_PREFIX, decoder.head, HEAD_OPTIONS)?;
        progress(all, all);
        Ok(ShardedDecoder { engine: Arc::new(builder.finish()?), embed, layers, head, tied })
    }

    /// Returns the engine.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Returns the modules for one pass on `device`, with autodiff if the device supports it.
    pub fn pass<'a>(&'a self, device: &'a Device) -> Pass<'a> {
        Pass { decoder: self, device, runs: Cell::new(0) }
    }

    /// Takes one optimizer step on one micro-batch of each rank, and waits for its outcome. `loss` computes the loss
    /// `[1]` over the modules of a pass on `device`, which must support autodiff; the losses of all ranks are summed
    /// (see [`decoder::loss`](kiln_model::decoder::loss)). `max_norm` is the norm to which the gradient is clipped, or
    /// 0. Collective.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use kiln_checkpoint::sharded::{Pass, ShardedDecoder};
    /// use kiln_model::{Context, Decoder, Key, Layers, ModelConfig, decoder};
    /// use kiln_shard::{AdamW, EngineBuilder, Policy, ShardError, ranks::run_ranks};
    ///
    /// let preset = ModelConfig::preset("10m").expect("a preset");
    /// let shape = ModelConfig { vocab_size: 16, layers: 1, d_model: 32, d_ff: 32, ..preset };
    /// let losses = run_ranks(2, 1, |world| {
    ///     let device = Device::flex();
    ///     let decoder = Decoder::new(&Layers::default(), &shape, Key::new(0), &device);
    ///     let builder = EngineBuilder::new(world, Policy::default(), None)?.optimizer(AdamW::default());
    ///     let model = ShardedDecoder::new(decoder.expect("layers"), builder)?;
    ///     let training = device.autodiff();
    ///     let context = Context::training(Key::new(1), 0, 0.0);
    ///     let loss = |pass: &Pass<'_>| {
    ///         let tokens = Tensor::<2, Int>::ones([1, 4], &training);
    ///         decoder::loss(pass, tokens.clone(), tokens, 1.0 / 8.0, &context)
    ///     };
    ///     Ok::<_, ShardError>(model.step(1e-3, 1.0, &training, loss)?.loss)
    /// });
    /// let losses = losses.expect("two ranks");
    /// assert_eq!(losses[0], losses[1]);
    /// ```
    ///
    /// # Errors
    ///
    /// If the ranks lose contact, or the device fails.
    pub fn step(
        &self,
        learning_rates: impl Into<LearningRates>,
        max_norm: f64,
        device: &Device,
        loss: impl FnOnce(&Pass<'_>) -> Tensor<1>,
    ) -> Result<Outcome, ShardError> {
        let engine = &self.engine;
        engine.begin_step();
        let loss = loss(&self.pass(device));
        engine.check()?;
        engine.backward(loss, true)?;
        engine.outcome(engine.update(learning_rates, max_norm)?)
    }
}

/// Provides the modules of a sharded decoder for one forward pass.
pub struct Pass<'a> {
    decoder: &'a ShardedDecoder,
    device: &'a Device,
    runs: Cell<usize>,
}

impl Pass<'_> {
    /// Returns how often the model has run in this pass.
    pub fn runs(&self) -> usize {
        self.runs.get()
    }
}

impl Modules for Pass<'_> {
    fn num_blocks(&self) -> usize {
        self.decoder.layers.len()
    }

    fn embed(&self, run: impl FnOnce(&Embed) -> Tensor<3>) -> Tensor<3> {
        self.runs.set(self.runs.get() + 1);
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

/// Returns the built-in decoder of this shape without initialized weights, to get names and shapes.
pub(crate) fn outline(model: &ModelConfig) -> Result<Decoder, LayerError> {
    Decoder::new(&Layers::default(), model, Key::new(0), &Device::flex())
}

/// Full names and shapes of parameters.
pub type Shapes = Vec<(String, Vec<usize>)>;

/// A module of a sharded decoder.
#[derive(Clone, Debug)]
pub struct ModuleOutline {
    /// Name of the module in logs, such as `layers.3`.
    pub name: String,
    /// Full names and shapes of the module's parameters.
    pub shapes: Shapes,
    /// Sharding options of the module.
    pub options: ShardOptions,
}

/// Returns the modules of a decoder in order: embedding, blocks, head. Initializes no weights.
pub fn modules_of(decoder: &Decoder) -> Vec<ModuleOutline> {
    let outline = |name: String, shapes, options| ModuleOutline { name, shapes, options };
    let options = embed_options(decoder.head.lm_head.is_none());
    let mut modules = vec![outline(EMBED.to_owned(), parameters_of(&decoder.embed, OUTER_PREFIX), options)];
    for (index, block) in decoder.layers.iter().enumerate() {
        let name = layer_name(index);
        let shapes = parameters_of(block, &format!("{name}."));
        modules.push(outline(name, shapes, block_options(index)));
    }
    modules.push(outline(HEAD.to_owned(), parameters_of(&decoder.head, OUTER_PREFIX), HEAD_OPTIONS));
    modules
}

/// Returns full names and shapes of all parameters, in the order of the modules. Initializes no weights.
pub fn parameter_shapes(decoder: &Decoder) -> Shapes {
    modules_of(decoder).into_iter().flat_map(|module| module.shapes).collect()
}

/// Returns the full names of all parameters, in the order of the modules. Initializes no weights.
pub fn parameter_names(decoder: &Decoder) -> Vec<String> {
    parameter_shapes(decoder).into_iter().map(|(name, _)| name).collect()
}

/// Returns the layouts of a decoder's modules over `ranks` ranks if nothing is frozen. Initializes no weights.
pub(crate) fn layout_of(decoder: &Decoder, ranks: usize) -> Vec<ParamGroupLayout> {
    let layout = |module: ModuleOutline| ParamGroupLayout::new(module.name, true, module.shapes, ranks);
    modules_of(decoder).into_iter().map(layout).collect()
}
