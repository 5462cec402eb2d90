//! Layers around other layers, such as adapters.

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::{Device, Tensor};

use super::{AnyLayer, Context, Layer};
use crate::meta::{MetaTape, MetaTensor};

/// A module that changes the result of the layer that it [wraps](AnyLayer::wrapped), such as a low-rank adapter.
pub trait Wrapper: Module + Sync + 'static {
    /// Maps `x` `[batch, seq, d_model]` to the same shape. `layer` is the forward pass of the wrapped layer.
    fn forward(&self, layer: impl Fn(Tensor<3>) -> Tensor<3>, x: Tensor<3>, context: &Context) -> Tensor<3>;

    /// Mirrors the memory of a pass, as [`Layer::meta_forward`] does. By default, the wrapper counts as a layer with
    /// the same input, whose result is added.
    fn meta_forward(
        &self,
        layer: impl FnOnce(MetaTensor) -> MetaTensor,
        x: MetaTensor,
        tape: &MetaTape<'_>,
    ) -> MetaTensor {
        let [x, of_layer] = tape.fork(x);
        tape.residual(layer(of_layer), tape.unknown(self, x))
    }
}

impl AnyLayer {
    /// Puts `wrapper` around this layer. The parameters of the layer keep their names, so it loads the same
    /// checkpoints as before; those of `wrapper` are next to them, such as `layers.0.ffn.lora_a.weight` next to
    /// `layers.0.ffn.up_proj.weight`.
    ///
    /// ```
    /// use burn::module::{Module, Param};
    /// use burn::tensor::Tensor;
    /// use kiln_model::layers::{Block, Context, Layers, Wrapper, constant_parameter};
    ///
    /// /// Multiplies the result by a gain.
    /// #[derive(Module, Debug)]
    /// struct Gain {
    ///     gain: Param<Tensor<1>>,
    /// }
    ///
    /// impl Wrapper for Gain {
    ///     fn forward(
    ///         &self,
    ///         layer: impl Fn(Tensor<3>) -> Tensor<3>,
    ///         x: Tensor<3>,
    ///         _: &Context,
    ///     ) -> Tensor<3> {
    ///         layer(x) * self.gain.val().unsqueeze()
    ///     }
    /// }
    ///
    /// let layers = Layers::default().block_around("gained", |init, attention, ffn| {
    ///     let gain = constant_parameter([init.model.d_model], 1.0, init.device);
    ///     Ok(Block::new(init, attention, ffn.wrapped(Gain { gain })))
    /// });
    /// ```
    pub fn wrapped(self, wrapper: impl Wrapper) -> AnyLayer {
        AnyLayer::new(Wrapped { layer: self, wrapper })
    }
}

/// A layer and its wrapper, whose parameters have the names that each has alone.
#[derive(Clone, Debug)]
struct Wrapped<W> {
    layer: AnyLayer,
    wrapper: W,
}

impl<W: Wrapper> Layer for Wrapped<W> {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        // The wrapped layer is at the same place, where the probe has already seen the input.
        self.wrapper.forward(|x| self.layer.forward_unobserved(x, context), x, context)
    }

    fn active_parameters(&self) -> usize {
        self.layer.active_parameters() + self.wrapper.num_params()
    }

    fn flops_per_token(&self, seq_len: usize) -> f64 {
        self.layer.flops_per_token(seq_len) + 6.0 * self.wrapper.num_params() as f64
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        self.wrapper.meta_forward(|x| self.layer.meta_forward(x, tape), x, tape)
    }
}

impl<W: Wrapper> Module for Wrapped<W> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.wrapper.collect_devices(self.layer.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        Wrapped { layer: self.layer.fork(device), wrapper: self.wrapper.fork(device) }
    }

    fn to_device(self, device: &Device) -> Self {
        Wrapped { layer: self.layer.to_device(device), wrapper: self.wrapper.to_device(device) }
    }

    fn train(self) -> Self {
        Wrapped { layer: self.layer.train(), wrapper: self.wrapper.train() }
    }

    fn valid(&self) -> Self {
        Wrapped { layer: self.layer.valid(), wrapper: self.wrapper.valid() }
    }

    fn materialize(self) -> Self {
        Wrapped { layer: self.layer.materialize(), wrapper: self.wrapper.materialize() }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.layer.visit(visitor);
        self.wrapper.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        Wrapped { layer: self.layer.map(mapper), wrapper: self.wrapper.map(mapper) }
    }
}

impl<W: Wrapper> ModuleDisplayDefault for Wrapped<W> {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&format!("{self:?}")).optional()
    }
}

impl<W: Wrapper> ModuleDisplay for Wrapped<W> {}
