//! The decoder and its forward pass, written once for plain and for sharded modules.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

use crate::config::ModelConfig;
use crate::layers::init::check_read;
use crate::layers::{
    AnyLayer, CacheFull, Context, Embed, FirstRun, Head, KeyValueCache, Layer, LayerError, LayerInit, Layers,
    Record,
};
use crate::random::Key;
use crate::settings::ReadKeys;

/// A decoder-only language model.
#[derive(Module, Debug)]
pub struct Decoder {
    /// Maps token ids to the residual stream.
    pub embed: Embed,
    /// The blocks, in order.
    pub layers: Vec<AnyLayer>,
    /// Maps the residual stream to logits.
    pub head: Head,
}

impl Decoder {
    /// Creates the decoder that `model` describes, with the layers that it names taken from `layers`. Weights are
    /// initialised when first read, and depend only on `key`.
    ///
    /// # Errors
    ///
    /// If a named layer does not exist or cannot be created, or no layer reads a key of `[model.extra]`.
    pub fn new(layers: &Layers, model: &ModelConfig, key: Key, device: &Device) -> Result<Self, LayerError> {
        let read = ReadKeys::default();
        let block = |index| layers.make_block(LayerInit::for_block(model, index, key, device).noting(&read));
        let decoder = Decoder {
            embed: Embed::new(model, key, device),
            layers: (0..model.layers).map(block).collect::<Result<_, _>>()?,
            head: Head {
                head_layer: layers
                    .make_head_layer(LayerInit::for_head_layer(model, key, device).noting(&read))?,
                ..Head::new(model, key, device)
            },
        };
        check_read(model, &read)?;
        Ok(decoder)
    }

    /// Returns the number of parameters of the decoder that `model` describes, counting tied weights once. No weight
    /// is initialised.
    ///
    /// # Errors
    ///
    /// As for [`Decoder::new`].
    pub fn count_parameters(layers: &Layers, model: &ModelConfig) -> Result<usize, LayerError> {
        Ok(Decoder::new(layers, model, Key::new(0), &Device::flex())?.num_params())
    }

    /// Returns the floating-point operations per token of one training step: 6 for each parameter that a token is
    /// multiplied with, plus those of attention, as in the appendix of PaLM (Chowdhery et al., 2022). The input
    /// embedding counts only if the head is tied to it, as in torchtitan. No weight is initialised.
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        let blocks: f64 = self.layers.iter().map(|layer| layer.flops_per_token(seq_len)).sum();
        blocks + self.head_flops_per_token()
    }

    /// Returns the part of [`Decoder::flops_per_token`] that the head accounts for.
    pub fn head_flops_per_token(&self) -> f64 {
        let tied = if self.head.lm_head.is_none() { self.embed.num_params() } else { 0 };
        6.0 * (self.head.num_params() + tied) as f64
    }
}

/// A residual stream `[batch, seq, d_model]`, and the sum of the losses added by layers, `[1]`.
pub type WithLoss = (Tensor<3>, Option<Tensor<1>>);

/// Provides the modules of a decoder to the forward pass, in the order in which it runs them and with their weights
/// in memory. A plain [`Decoder`] provides its own modules. A sharded decoder gathers the weights of a module first,
/// and may run a block again in backward.
pub trait Modules {
    /// Returns the number of blocks.
    fn num_blocks(&self) -> usize;

    /// Calls `run` with the embedding.
    fn embed(&self, run: impl FnOnce(&Embed) -> Tensor<3>) -> Tensor<3>;

    /// Calls `run` with block `index` and the residual stream `x`. Returns the residual stream after the block, and
    /// the loss that the block adds to the training loss. `run` may be called again in backward: it must depend only
    /// on its arguments and captures, and must not capture a tensor that needs a gradient.
    fn block(
        &self,
        index: usize,
        x: Tensor<3>,
        run: impl Fn(&AnyLayer, Tensor<3>) -> WithLoss + Send + Sync + 'static,
    ) -> WithLoss;

    /// Calls `run` with the head, and with the embedding if the head is tied to it.
    fn head<const D: usize>(
        &self,
        x: Tensor<3>,
        run: impl FnOnce(&Head, Option<&Embed>, Tensor<3>) -> Tensor<D>,
    ) -> Tensor<D>;
}

impl Modules for Decoder {
    fn num_blocks(&self) -> usize {
        self.layers.len()
    }

    fn embed(&self, run: impl FnOnce(&Embed) -> Tensor<3>) -> Tensor<3> {
        run(&self.embed)
    }

    fn block(
        &self,
        index: usize,
        x: Tensor<3>,
        run: impl Fn(&AnyLayer, Tensor<3>) -> WithLoss + Send + Sync + 'static,
    ) -> WithLoss {
        run(&self.layers[index], x)
    }

    fn head<const D: usize>(
        &self,
        x: Tensor<3>,
        run: impl FnOnce(&Head, Option<&Embed>, Tensor<3>) -> Tensor<D>,
    ) -> Tensor<D> {
        run(&self.head, Some(&self.embed), x)
    }
}

/// Returns the residual stream after the last block, `[batch, seq, d_model]`, for `tokens` `[batch, seq]`.
pub fn hidden<P: Modules>(modules: &P, tokens: Tensor<2, Int>, context: &Context) -> Tensor<3> {
    run_blocks(modules, tokens, context).0.0
}

/// Returns the result of [`hidden`] and the losses added by layers, and the values recorded by layers.
fn run_blocks<P: Modules>(modules: &P, tokens: Tensor<2, Int>, context: &Context) -> (WithLoss, Vec<Record>) {
    let context = context.for_one_pass();
    let outer = context.at_module("embed").for_one_run();
    let mut x = modules.embed(|embed| outer.probe("output", embed.forward(tokens, &outer)));
    outer.record_activation(&x);
    let (mut loss, mut records) = (outer.take_loss(), outer.take_records());
    for index in 0..modules.num_blocks() {
        let context = context.at_layer(index);
        let first = FirstRun::new(context.is_recording());
        let kept = first.clone();
        let (y, added) = modules.block(index, x, move |block, x| {
            let context = context.for_one_run();
            let y = block.forward(x, &context);
            kept.keep(|| {
                context.record_activation(&y);
                context.take_records()
            });
            (y, context.take_loss())
        });
        x = y;
        loss = loss.into_iter().chain(added).reduce(|a, b| a + b);
        records.extend_from_slice(first.records());
    }
    ((x, loss), records)
}

/// Returns the summed cross-entropy of `targets` given `tokens`, both `[batch, seq]`, or the context's own loss
/// ([`Context::with_token_loss`]), times `scale`, as `[1]`. The caller divides by the global number of tokens through
/// `scale`, so that the losses of ranks and micro-batches can be added. Positions with a negative target are ignored,
/// others multiplied by the context's weights ([`Context::with_target_weights`]). A loss added by a layer
/// ([`Context::add_loss`]) counts as a mean over the tokens; a z-loss ([`Context::with_z_loss`]) is part of the sum.
pub fn loss<P: Modules>(
    modules: &P,
    tokens: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    scale: f64,
    context: &Context,
) -> Tensor<1> {
    let [batch, seq] = tokens.dims();
    let share = context.share((batch * seq) as f64 * scale);
    let (x, added) = hidden_with_loss(modules, tokens, share, context);
    let loss = head_loss(modules, x, targets, scale, context);
    match added {
        Some(added) => loss + added.mul_scalar(share),
        None => loss,
    }
}

/// Returns the residual stream after the last block, `[batch, seq, d_model]`, for `tokens` `[batch, seq]`, and the sum
/// of the losses added by layers, `[1]`: a mean over the tokens of the pass, which has `share` of the step's tokens.
pub fn hidden_with_loss<P: Modules>(
    modules: &P,
    tokens: Tensor<2, Int>,
    share: f64,
    context: &Context,
) -> WithLoss {
    let (outcome, recorded) = run_blocks(modules, tokens, context);
    if let Some(records) = context.records() {
        records.extend(recorded, share);
    }
    outcome
}

/// Returns the part of [`loss`] that the head computes from the residual stream `x` `[batch, seq, d_model]`.
pub fn head_loss<P: Modules>(
    modules: &P,
    x: Tensor<3>,
    targets: Tensor<2, Int>,
    scale: f64,
    context: &Context,
) -> Tensor<1> {
    let mut z_loss = None;
    let (outer, weights) = (context.at_module("head"), context.target_weights());
    let loss = modules.head(x, |head, tied, x| {
        let x = outer.probe("input", x);
        let total = match context.token_loss() {
            Some(loss) => head.token_loss(x, targets, weights, scale, loss, tied),
            None => {
                let loss = head.loss(x, targets, weights, scale, context.z_loss(), tied);
                z_loss = loss.z_loss;
                loss.total
            }
        };
        outer.probe("output", total)
    });
    if let Some(records) = context.records() {
        // The loss is a sum over the tokens, so it already has its share.
        let head = outer.for_one_run();
        z_loss.into_iter().for_each(|z_loss| head.add_loss("z_loss", z_loss));
        records.extend(head.take_records(), 1.0);
    }
    loss
}

/// Returns the log-probability of each of `targets` `[batch, seq]` given the residual stream `x` `[batch, seq,
/// d_model]`, as `[batch, seq]` in f32. Holds the logits of all positions; a negative target counts as token 0.
pub fn log_probabilities<P: Modules>(modules: &P, x: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<2> {
    modules.head(x, |head, tied, x| head.log_probabilities(x, targets, tied))
}

/// Returns the logits of every position, `[batch, seq, vocab_size]`.
pub fn logits<P: Modules>(modules: &P, tokens: Tensor<2, Int>) -> Tensor<3> {
    head_logits(modules, hidden(modules, tokens, &Context::evaluation()))
}

/// Runs the layer of the head that `model.head_layer` names on `x` `[batch, seq, d_model]`, and returns the same shape.
///
/// # Panics
///
/// If the model has no such layer.
pub fn head_layer<P: Modules>(modules: &P, x: Tensor<3>, context: &Context) -> Tensor<3> {
    let context = context.fork("head_layer").for_one_run();
    modules.head(x, |head, _, x| match &head.head_layer {
        Some(layer) => layer.forward(x, &context),
        None => panic!("the model has no layer of the head: set model.head_layer"),
    })
}

/// Returns the logits of every position, `[batch, seq, vocab_size]`, given the residual stream `x` `[batch, seq,
/// d_model]`.
pub fn head_logits<P: Modules>(modules: &P, x: Tensor<3>) -> Tensor<3> {
    modules.head(x, |head, tied, x| head.logits(x, tied))
}

/// Returns the logits of the token after the last one, `[batch, vocab_size]`.
///
/// `tokens` `[batch, seq]` follow the tokens in `cache` and are added to it. `seq` is the length of the
/// prompt in the first pass, and 1 in each pass that adds a token to the text. The head is computed for the
/// last position only. The device must not have autodiff.
///
/// # Errors
///
/// If the cache has no room for `seq` more positions. The cache is unchanged then.
///
/// # Panics
///
/// If there are no tokens, or if the number of sequences differs from that in the cache.
pub fn next_logits<P: Modules>(
    modules: &P,
    tokens: Tensor<2, Int>,
    cache: &KeyValueCache,
) -> Result<Tensor<2>, CacheFull> {
    let [batch, seq] = tokens.dims();
    assert!(seq > 0, "next_logits: no tokens");
    cache.check_room(seq)?;
    let x = hidden(modules, tokens, &Context::decoding(cache.clone()));
    cache.advance(seq);
    let last = x.narrow(1, seq - 1, 1);
    let logits = modules.head(last, |head, tied, x| head.logits(x, tied));
    let [_, _, vocab_size] = logits.dims();
    Ok(logits.reshape([batch, vocab_size]))
}
