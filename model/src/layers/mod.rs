//! The layers of the decoder, one file each.
//!
//! A layer is an ordinary burn [`Module`] for one device, independent of ranks. To add a layer, write a file here,
//! implement [`Layer`], and register it under a name in [`Layers`]. A program can add custom layers in the same way.

mod any;
mod attention;
mod block;
mod cache;
mod embed;
mod geglu;
mod head;
pub(crate) mod init;
mod linear;
mod moe;
mod parallel_block;
mod registry;
mod rms_norm;
mod side_channel;
mod squared_relu;
mod swiglu;
mod wrapper;

pub use any::AnyLayer;
pub use attention::Attention;
pub use block::Block;
pub use cache::{CacheFull, KeyValueCache, LayerCache};
pub use embed::Embed;
pub use geglu::GeGlu;
pub use head::{Head, TokenLoss};
pub use init::{HEAD_LAYER_PREFIX, LayerError, LayerInit};
pub use linear::{Linear, Lora, is_adapter};
pub use moe::{Experts, Moe};
pub use parallel_block::ParallelBlock;
pub use registry::Layers;
pub use rms_norm::RmsNorm;
pub use side_channel::{Record, RecordKind, Records};
pub use squared_relu::SquaredRelu;
pub use swiglu::SwiGlu;
pub use wrapper::Wrapper;

pub(crate) use registry::label;
pub(crate) use side_channel::FirstRun;

use burn::module::{Module, ModuleDisplay, Param, ParamId};
use burn::tensor::{Device, Shape, Tensor, TensorData};

use crate::meta::{MetaTape, MetaTensor};
use crate::ops::{Probe, RouterSums};
use crate::random::Key;
use side_channel::{SideChannel, inner_place};

/// A layer that maps the residual stream to the residual stream.
///
/// A layer that processes each position separately ignores [`Context::cache`]. A layer that mixes positions must not:
/// if the context has a cache, `x` contains only the newest positions, the first of which is
/// [`LayerCache::position`]. Rows of earlier positions, such as keys and values, come from [`LayerCache::append`], or
/// from [`LayerCache::append_in_window`] in a layer with windowed attention. A recurrent layer keeps its state with
/// [`LayerCache::state`] and [`LayerCache::set_state`].
pub trait Layer: Module + ModuleDisplay + Sync + 'static {
    /// Maps `x` `[batch, seq, d_model]` to the same shape.
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3>;

    /// Returns the number of parameters that a token is multiplied with, which determines the FLOPs of a step and
    /// thus `mfu`. By default, all parameters count. Override this in a layer that sends a token to some of its
    /// experts, or that looks up rows. No weight is initialised.
    fn active_parameters(&self) -> usize {
        Module::num_params(self)
    }

    /// Returns the floating-point operations of a training step per token of a sequence of `seq_len` tokens: by
    /// default 6 for each active parameter. A layer that multiplies activations with each other, such as attention,
    /// adds those operations.
    fn flops_per_token(&self, _seq_len: usize) -> f64 {
        6.0 * self.active_parameters() as f64
    }

    /// Mirrors the memory of a pass: repeats [`Layer::forward`] on tensors without values, operation by operation,
    /// with the methods of [`MetaTape`]. Only memory plans depend on it. By default, each matrix of the layer counts
    /// as a map whose input and output are saved for backward.
    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        tape.unknown(self, x)
    }
}

/// The settings of a forward pass: dropout, the cache, and the values that layers pass to the training loop.
#[derive(Clone, Debug, Default)]
pub struct Context {
    dropout: Option<DropoutContext>,
    cache: Option<LayerCache>,
    /// Values that layers pass to the training loop; only in training.
    side: Option<SideChannel>,
    z_loss: Option<f64>,
    token_loss: Option<TokenLoss>,
    /// Factors of the losses of each position, `[batch, seq]`.
    target_weights: Option<Tensor<2>>,
    /// The pass's share of the step's tokens, if it does not follow from the scale of its loss.
    share: Option<f64>,
    probe: Option<PlacedProbe>,
}

/// The probe of the pass, and the current place in the model.
#[derive(Clone, Debug)]
struct PlacedProbe {
    probe: Probe,
    place: String,
}

/// The dropout of one forward pass. A mask belongs to a sample of the global batch, so it does not depend on how the
/// batch is split over ranks and micro-batches.
#[derive(Clone, Copy, Debug)]
struct DropoutContext {
    key: Key,
    first_sample: u64,
    probability: f64,
}

impl DropoutContext {
    /// Drops elements of `x` `[batch, ..]`.
    fn apply<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let per_sample: usize = x.dims()[1..].iter().product();
        crate::ops::dropout(x, self.probability, self.key.bits(), self.first_sample * per_sample as u64)
    }
}

impl Context {
    /// Creates a pass without dropout over whole sequences.
    pub fn evaluation() -> Self {
        Context::default()
    }

    /// Creates a pass without dropout over tokens that follow the tokens in `cache`; the pass adds them to the cache.
    /// For devices without autodiff; see [`decoder::next_logits`](crate::decoder::next_logits).
    pub(crate) fn decoding(cache: KeyValueCache) -> Self {
        Context { dropout: None, cache: Some(LayerCache::new(cache)), ..Context::default() }
    }

    /// Returns the cache of this layer, if the pass has a cache.
    pub fn cache(&self) -> Option<&LayerCache> {
        self.cache.as_ref()
    }

    /// Creates a training pass over samples `first_sample ..` of the step identified by `key`.
    pub fn training(key: Key, first_sample: u64, dropout: f64) -> Self {
        Context {
            dropout: Some(DropoutContext { key, first_sample, probability: dropout }),
            side: Some(SideChannel::default()),
            ..Context::default()
        }
    }

    /// Adds a z-loss of the logits, with this weight, to the training loss: see
    /// [`LogitOptions::z_loss`](crate::ops::LogitOptions::z_loss). The z-loss is logged as `losses.z_loss`.
    pub fn with_z_loss(self, weight: Option<f64>) -> Self {
        Context { z_loss: weight, ..self }
    }

    pub(crate) fn z_loss(&self) -> Option<f64> {
        self.z_loss
    }

    /// Replaces the training loss, which is the cross-entropy by default, and disables the z-loss.
    pub fn with_token_loss(self, loss: Option<TokenLoss>) -> Self {
        Context { token_loss: loss, ..self }
    }

    pub(crate) fn token_loss(&self) -> Option<&TokenLoss> {
        self.token_loss.as_ref()
    }

    /// Multiplies the loss of each position by its weight in `weights` `[batch, seq]`, a constant in f32.
    pub fn with_target_weights(self, weights: Option<Tensor<2>>) -> Self {
        Context { target_weights: weights, ..self }
    }

    pub(crate) fn target_weights(&self) -> Option<Tensor<2>> {
        self.target_weights.clone()
    }

    /// Sets the pass's share of the step's tokens, for losses and values of layers: by default, its tokens times the
    /// scale of its loss.
    pub fn with_share(self, share: f64) -> Self {
        Context { share: Some(share), ..self }
    }

    pub(crate) fn share(&self, by_scale: f64) -> f64 {
        self.share.unwrap_or(by_scale)
    }

    /// Makes layers store their values in `records`. Otherwise, recorded values are dropped, at no cost.
    pub fn recording(self, records: &Records) -> Self {
        Context { side: Some(SideChannel::recording(records)), ..self }
    }

    /// Returns whether this is a training pass, in which layers may add losses.
    pub fn is_training(&self) -> bool {
        self.side.is_some()
    }

    /// Makes `probe` observe the pass.
    pub fn probed(self, probe: Option<Probe>) -> Self {
        Context { probe: probe.map(|probe| PlacedProbe { probe, place: String::new() }), ..self }
    }

    /// Shows `x`, and in backward its gradient, to the probe under `name` at this place, and returns `x`. Costs
    /// nothing without a probe. The `input` and `output` of layers are shown automatically.
    pub fn probe<const D: usize>(&self, name: &str, x: Tensor<D>) -> Tensor<D> {
        match &self.probe {
            Some(PlacedProbe { probe, place }) => crate::ops::probe(x, probe, place, name),
            None => x,
        }
    }

    /// Returns the context of one place in the model, so that no two places share a mask, the name of a record, or a
    /// name in the cache.
    pub fn fork(&self, place: &str) -> Self {
        Context {
            dropout: self.dropout.map(|dropout| DropoutContext { key: dropout.key.fork(place), ..dropout }),
            ..self.at_module(place)
        }
    }

    /// Returns the context of block `index`.
    pub fn at_layer(&self, index: usize) -> Self {
        Context {
            dropout: self
                .dropout
                .map(|dropout| DropoutContext { key: dropout.key.fork_index(index as u64), ..dropout }),
            ..self.at_module(&format!("layers.{index}"))
        }
    }

    /// Adds a loss of a layer, such as a loss that balances experts, to the training loss. `loss` `[1]` is a mean
    /// over the tokens of `x`, times its weight; the training loss then includes the mean over all tokens of the
    /// step. Its gradient is correct no matter how the layer is sharded, or whether it runs again in backward. A
    /// tensor that leaves a layer in any other way gets no gradient if blocks are recomputed.
    ///
    /// The log contains the sum over the layers as `losses.<name>`.
    ///
    /// Has no effect outside training.
    pub fn add_loss(&self, name: &str, loss: Tensor<1>) {
        if let Some(side) = &self.side {
            side.add_loss(name, loss);
        }
    }

    /// Logs a value of a layer as the layer's place and `name`, such as `layers.3.ffn.<name>`. `value` is a value per
    /// token `[n]`, or their mean `[1]`; the log contains the mean over all tokens of the step, no matter how they
    /// are split over ranks and micro-batches. The value gets no gradient, and counts once even if blocks run again.
    /// To log a count or a sum, multiply the logged mean by the tokens of the step.
    ///
    /// Has no effect outside training and in steps that are not logged. If the value is costly, check
    /// [`Context::is_recording`] first.
    pub fn record(&self, name: &str, value: Tensor<1>) {
        if let Some(side) = &self.side {
            side.record(name, value);
        }
    }

    /// Logs `value` `[1]`, the mean over a pass with `share` of the step's tokens, as `<place>.<name>`, from outside the
    /// layers.
    pub fn record_at(&self, place: &str, name: &str, value: Tensor<1>, share: f64) {
        if let Some(records) = self.records() {
            let at = self.at_module(place).for_one_run();
            at.record(name, value);
            records.extend(at.take_records(), share);
        }
    }

    /// Returns this context for run `index` of several runs of the model in one pass, with separate dropout masks.
    pub fn for_run(&self, index: u64) -> Self {
        let fork = |dropout: DropoutContext| match index {
            0 => dropout,
            index => DropoutContext { key: dropout.key.fork("run").fork_index(index), ..dropout },
        };
        Context { dropout: self.dropout.map(fork), ..self.clone() }
    }

    /// Returns whether this pass belongs to a step that is logged.
    pub fn is_recording(&self) -> bool {
        self.records().is_some()
    }

    /// Returns this context for one run of one module, without the values recorded so far.
    pub(crate) fn for_one_run(&self) -> Self {
        Context {
            cache: self.cache.as_ref().map(LayerCache::for_one_run),
            side: self.side.as_ref().map(SideChannel::emptied),
            ..self.clone()
        }
    }

    /// Returns this context for a pass from the first block to the last.
    pub(crate) fn for_one_pass(&self) -> Self {
        Context { side: self.side.as_ref().map(SideChannel::of_new_pass), ..self.clone() }
    }

    /// Returns the sums over the routers of this pass; `None` outside training.
    pub(crate) fn routers(&self) -> Option<&RouterSums> {
        self.side.as_ref().map(SideChannel::routers)
    }

    /// Returns this context for the module `name`, with the same dropout.
    pub(crate) fn at_module(&self, name: &str) -> Self {
        let probe = self.probe.as_ref().map(|PlacedProbe { probe, place: outer }| PlacedProbe {
            probe: probe.clone(),
            place: inner_place(outer, name),
        });
        Context {
            cache: self.cache.as_ref().map(|cache| cache.at(name)),
            side: self.side.as_ref().map(|side| side.at(name)),
            probe,
            ..self.clone()
        }
    }

    /// Takes the sum of the losses that were added in this run.
    pub(crate) fn take_loss(&self) -> Option<Tensor<1>> {
        self.side.as_ref().and_then(SideChannel::take_loss)
    }

    /// Takes the values that were recorded in this run.
    pub(crate) fn take_records(&self) -> Vec<Record> {
        self.side.as_ref().map_or_else(Vec::new, SideChannel::take_records)
    }

    /// Returns the collection in which this step's values are stored.
    pub(crate) fn records(&self) -> Option<&Records> {
        self.side.as_ref().and_then(SideChannel::records)
    }

    /// Records the root mean square of the residual stream `x` `[batch, seq, d_model]`, if requested.
    pub(crate) fn record_activation(&self, x: &Tensor<3>) {
        if let Some(side) = self.side.as_ref().filter(|side| side.records_activations()) {
            side.record_activation(x);
        }
    }

    /// Drops elements of `x` `[batch, seq, d_model]` when training with dropout.
    pub fn dropout(&self, x: Tensor<3>) -> Tensor<3> {
        match self.dropout {
            Some(dropout) => dropout.apply(x),
            None => x,
        }
    }

    /// Drops elements of `x` `[batch, ..]`, the input of the adapter of the map `name` of this layer, in training.
    pub(crate) fn drop_for_adapter<const D: usize>(
        &self,
        x: Tensor<D>,
        probability: f64,
        name: &str,
    ) -> Tensor<D> {
        match self.dropout {
            Some(dropout) if probability > 0.0 => {
                let key = dropout.key.fork("lora").fork(name);
                DropoutContext { key, probability, ..dropout }.apply(x)
            }
            _ => x,
        }
    }
}

/// Creates a lazily initialised weight with normally distributed values, which depend only on `key` and on the
/// position in the tensor.
pub fn normal_parameter<const D: usize>(
    shape: [usize; D],
    std: f64,
    key: Key,
    device: &Device,
) -> Param<Tensor<D>> {
    lazy_parameter(shape, device, move |count| key.normal_vec(count, std))
}

/// Creates a lazily initialised weight filled with `value`.
pub fn constant_parameter<const D: usize>(
    shape: [usize; D],
    value: f32,
    device: &Device,
) -> Param<Tensor<D>> {
    lazy_parameter(shape, device, move |count| vec![value; count])
}

fn lazy_parameter<const D: usize>(
    shape: [usize; D],
    device: &Device,
    values: impl FnOnce(usize) -> Vec<f32> + Send + Sync + 'static,
) -> Param<Tensor<D>> {
    Param::uninitialized(
        ParamId::new(),
        move |device, require_grad| {
            let data = TensorData::new(values(shape.iter().product()), shape);
            Tensor::from_data(data, device).set_require_grad(require_grad)
        },
        device.clone(),
        true,
        Shape::from(shape),
    )
}
