//! A layer of any type, so that a decoder can have layers that this crate does not know.
//!
//! burn's [`Module`] has generic methods, so it cannot be a trait object. Visitors and mappers of parameters
//! therefore pass each parameter as [`Any`], and restore its type on the other side.

use std::any::{Any, type_name};
use std::fmt;
use std::sync::Arc;

use burn::module::{
    Content, Devices, Flag, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
};
use burn::tensor::{Bool, Device, Int, Tensor};

use super::{Context, Layer};
use crate::meta::{MetaTape, MetaTensor};
use crate::panics::named;

/// A layer of any type, behind one pointer. Names of parameters are those of the layer inside.
pub struct AnyLayer {
    layer: Box<dyn Object>,
    /// The name of the layer in messages.
    label: Arc<str>,
}

impl AnyLayer {
    /// Wraps `layer`.
    pub fn new<L: Layer>(layer: L) -> Self {
        AnyLayer { layer: Box::new(layer), label: type_name::<L>().into() }
    }

    /// Makes messages call the layer `label`, such as `layers.3.ffn ("swiglu")`, instead of its type.
    pub(super) fn labelled(self, label: String) -> Self {
        AnyLayer { label: label.into(), ..self }
    }

    /// Returns `layer`, with the label of this layer.
    fn with(&self, layer: Box<dyn Object>) -> Self {
        AnyLayer { layer, label: self.label.clone() }
    }

    /// Replaces the layer inside, and keeps the label.
    fn change(self, change: impl FnOnce(Box<dyn Object>) -> Box<dyn Object>) -> Self {
        AnyLayer { layer: change(self.layer), label: self.label }
    }

    /// Like [`Layer::forward`], without showing input and output to the context's probe. Panics if the layer returns
    /// another shape.
    pub(super) fn forward_unobserved(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let needed = x.dims();
        named(&self.label, || {
            let y = self.layer.forward(x, context);
            let returned = y.dims();
            assert!(returned == needed, "{} returned {returned:?} where {needed:?} is needed", self.label);
            y
        })
    }
}

/// [`Layer`] as a trait object.
trait Object: Send + Sync + fmt::Debug {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3>;
    fn active_parameters(&self) -> usize;
    fn flops_per_token(&self, seq_len: usize) -> f64;
    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor;
    fn cloned(&self) -> Box<dyn Object>;
    fn collect_devices(&self, devices: Devices) -> Devices;
    fn fork(self: Box<Self>, device: &Device) -> Box<dyn Object>;
    fn to_device(self: Box<Self>, device: &Device) -> Box<dyn Object>;
    fn train(self: Box<Self>) -> Box<dyn Object>;
    fn valid(&self) -> Box<dyn Object>;
    fn materialize(self: Box<Self>) -> Box<dyn Object>;
    fn visit(&self, visitor: &mut dyn AnyVisitor);
    fn map(self: Box<Self>, mapper: &mut dyn AnyMapper) -> Box<dyn Object>;
}

impl<L: Layer> Object for L {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        Layer::forward(self, x, context)
    }

    fn active_parameters(&self) -> usize {
        Layer::active_parameters(self)
    }

    fn flops_per_token(&self, seq_len: usize) -> f64 {
        Layer::flops_per_token(self, seq_len)
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        Layer::meta_forward(self, x, tape)
    }

    fn cloned(&self) -> Box<dyn Object> {
        Box::new(self.clone())
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        Module::collect_devices(self, devices)
    }

    fn fork(self: Box<Self>, device: &Device) -> Box<dyn Object> {
        Box::new(Module::fork(*self, device))
    }

    fn to_device(self: Box<Self>, device: &Device) -> Box<dyn Object> {
        Box::new(Module::to_device(*self, device))
    }

    fn train(self: Box<Self>) -> Box<dyn Object> {
        Box::new(Module::train(*self))
    }

    fn valid(&self) -> Box<dyn Object> {
        Box::new(Module::valid(self))
    }

    fn materialize(self: Box<Self>) -> Box<dyn Object> {
        Box::new(Module::materialize(*self))
    }

    fn visit(&self, visitor: &mut dyn AnyVisitor) {
        Module::visit(self, &mut ToAny(visitor));
    }

    fn map(self: Box<Self>, mapper: &mut dyn AnyMapper) -> Box<dyn Object> {
        Box::new(Module::map(*self, &mut ToAny(mapper)))
    }
}

impl Module for AnyLayer {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.layer.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.change(|layer| layer.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.change(|layer| layer.to_device(device))
    }

    fn train(self) -> Self {
        self.change(|layer| layer.train())
    }

    fn valid(&self) -> Self {
        self.with(self.layer.valid())
    }

    fn materialize(self) -> Self {
        self.change(|layer| layer.materialize())
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.layer.visit(&mut FromAny(visitor));
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.change(|layer| layer.map(&mut FromAny(mapper)))
    }
}

impl Layer for AnyLayer {
    /// Maps `x` `[batch, seq, d_model]` to the same shape.
    ///
    /// # Panics
    ///
    /// If the layer returns another shape.
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let x = context.probe("input", x);
        context.probe("output", self.forward_unobserved(x, context))
    }

    fn active_parameters(&self) -> usize {
        self.layer.active_parameters()
    }

    fn flops_per_token(&self, seq_len: usize) -> f64 {
        self.layer.flops_per_token(seq_len)
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        self.layer.meta_forward(x, tape)
    }
}

impl Clone for AnyLayer {
    fn clone(&self) -> Self {
        self.with(self.layer.cloned())
    }
}

impl fmt::Debug for AnyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.layer.fmt(f)
    }
}

impl ModuleDisplayDefault for AnyLayer {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&format!("{self:?}")).optional()
    }
}

impl ModuleDisplay for AnyLayer {}

/// [`ModuleVisitor`] as a trait object. `param` is a [`Param`] of a tensor of any kind and number of
/// dimensions, or of a [`Flag`].
trait AnyVisitor {
    fn visit(&mut self, param: &dyn Any);
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
}

/// [`ModuleMapper`] as a trait object. `map` returns a value of the type of `param`.
trait AnyMapper {
    fn map(&mut self, param: Box<dyn Any>) -> Box<dyn Any>;
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
}

/// Passes parameters to a visitor or mapper that accepts any type, from a module that knows their types.
struct ToAny<'a, T: ?Sized>(&'a mut T);

/// Passes parameters to a visitor or mapper that needs their types, from a module that does not know them.
struct FromAny<'a, T>(&'a mut T);

/// Expands `$body` for each number of dimensions that burn's tensors can have.
macro_rules! for_each_rank {
    ($rank:ident => $body:expr) => {
        for_each_rank!($rank => $body; 1 2 3 4 5 6 7 8)
    };
    ($rank:ident => $body:expr; $($value:literal)*) => {
        $({ const $rank: usize = $value; $body })*
    };
}

impl ModuleVisitor for ToAny<'_, dyn AnyVisitor + '_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.visit(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.0.visit(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.0.visit(param);
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.0.visit(flag);
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit(name, container_type);
    }
}

impl<V: ModuleVisitor> AnyVisitor for FromAny<'_, V> {
    fn visit(&mut self, param: &dyn Any) {
        for_each_rank!(D => {
            if let Some(param) = param.downcast_ref::<Param<Tensor<D>>>() {
                return self.0.visit_float(param);
            }
            if let Some(param) = param.downcast_ref::<Param<Tensor<D, Int>>>() {
                return self.0.visit_int(param);
            }
            if let Some(param) = param.downcast_ref::<Param<Tensor<D, Bool>>>() {
                return self.0.visit_bool(param);
            }
        });
        if let Some(flag) = param.downcast_ref() {
            self.0.visit_flag(flag);
        }
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.0.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.0.exit_module(name, container);
    }
}

/// Applies [`AnyMapper::map`] to `param`.
fn mapped<P: 'static>(mapper: &mut dyn AnyMapper, param: P) -> P {
    match mapper.map(Box::new(param)).downcast() {
        Ok(param) => *param,
        Err(_) => unreachable!("invariant: a mapper returns what it was given"),
    }
}

impl ModuleMapper for ToAny<'_, dyn AnyMapper + '_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        mapped(self.0, param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        mapped(self.0, param)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        mapped(self.0, param)
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        mapped(self.0, flag)
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit(name, container_type);
    }
}

impl<M: ModuleMapper> AnyMapper for FromAny<'_, M> {
    fn map(&mut self, param: Box<dyn Any>) -> Box<dyn Any> {
        let mut param = param;
        for_each_rank!(D => {
            param = typed(param, |param: Param<Tensor<D>>| self.0.map_float(param));
            param = typed(param, |param: Param<Tensor<D, Int>>| self.0.map_int(param));
            param = typed(param, |param: Param<Tensor<D, Bool>>| self.0.map_bool(param));
        });
        typed(param, |flag: Param<Flag>| self.0.map_flag(flag))
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.0.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.0.exit_module(name, container);
    }
}

/// Applies `map` to `param` if it is a `P`; otherwise returns `param` unchanged.
fn typed<P: 'static>(param: Box<dyn Any>, map: impl FnOnce(P) -> P) -> Box<dyn Any> {
    match param.downcast::<P>() {
        Ok(param) => Box::new(map(*param)),
        Err(param) => param,
    }
}
