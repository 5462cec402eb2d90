//! Affine map, and its low-rank adapter.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};

use super::{Context, constant_parameter, normal_parameter};
use crate::config::LoraConfig;
use crate::meta::{MetaTape, MetaTensor};
use crate::ops;
use crate::random::Key;

/// `y = x W (+ b) (+ adapter(x))`.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[d_in, d_out]`.
    pub weight: Param<Tensor<2>>,
    /// `[d_out]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// The low-rank adapter, if the map has one.
    pub lora: Option<Lora>,
}

/// The low-rank adapter of a map (Hu et al., 2021): `alpha / rank · dropout(x) A B`.
#[derive(Module, Debug)]
pub struct Lora {
    /// `A` `[d_in, rank]`.
    pub a: Param<Tensor<2>>,
    /// `B` `[rank, d_out]`, initially zero.
    pub b: Param<Tensor<2>>,
    #[module(skip)]
    scale: f64,
    #[module(skip)]
    dropout: f64,
    /// Name of the map in its layer, which distinguishes the dropout of several maps.
    #[module(skip)]
    name: String,
}

impl Lora {
    /// Creates the adapter of the map `name` of a layer. `A` has the variance of PEFT's adapters, 1 / (3 · d_in).
    pub(super) fn new(
        lora: &LoraConfig,
        name: &str,
        [d_in, d_out]: [usize; 2],
        key: Key,
        device: &Device,
    ) -> Self {
        let std = (3.0 * d_in as f64).sqrt().recip();
        Lora {
            a: normal_parameter([d_in, lora.rank], std, key.fork("lora"), device),
            b: constant_parameter([lora.rank, d_out], 0.0, device),
            scale: lora.scale(),
            dropout: lora.dropout,
            name: name.to_owned(),
        }
    }

    /// Returns `y`, the result of the map for `x`, plus the result of the adapter.
    fn add_to<const D: usize>(&self, y: Tensor<D>, x: Tensor<D>, context: &Context) -> Tensor<D> {
        let x = context.drop_for_adapter(x, self.dropout, &self.name);
        let narrow = ops::linear(x, self.a.val(), None).mul_scalar(self.scale);
        // Under selective recomputation, burn's own sum would keep both operands.
        ops::Residual::new(y).add_result(ops::linear(narrow, self.b.val(), None))
    }
}

/// Returns whether the parameter `name` belongs to an adapter.
pub fn is_adapter(name: &str) -> bool {
    name.ends_with(".lora.a") || name.ends_with(".lora.b")
}

impl Linear {
    /// Creates a map without bias. Weights are normally distributed with standard deviation `std`.
    pub fn new(d_in: usize, d_out: usize, std: f64, key: Key, device: &Device) -> Self {
        let weight = normal_parameter([d_in, d_out], std, key.fork("weight"), device);
        Linear { weight, bias: None, lora: None }
    }

    /// Adds a bias, initially zero.
    pub fn with_bias(mut self, device: &Device) -> Self {
        let [_, d_out] = self.weight.lazy_shape().dims();
        self.bias = Some(constant_parameter([d_out], 0.0, device));
        self
    }

    /// Adds a bias, initially zero, if `biased`.
    pub fn with_bias_if(self, biased: bool, device: &Device) -> Self {
        if biased { self.with_bias(device) } else { self }
    }

    /// Maps `x` `[.., d_in]` to `[.., d_out]`. `context` is that of the layer, for the dropout of an adapter.
    pub fn forward_in<const D: usize>(&self, x: Tensor<D>, context: &Context) -> Tensor<D> {
        let [y] = Self::forward_together_in([self], x, context);
        y
    }

    /// Maps `x` `[.., d_in]` to `[.., d_out]`, without dropout.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.forward_in(x, &Context::evaluation())
    }

    /// Returns the result of each of `maps` for the same `x`, without dropout: equal to separate calls, but with less
    /// work in backward.
    pub fn forward_together<const D: usize, const N: usize>(
        maps: [&Self; N],
        x: Tensor<D>,
    ) -> [Tensor<D>; N] {
        Self::forward_together_in(maps, x, &Context::evaluation())
    }

    /// Returns the result of each of `maps` for the same `x` in the layer of `context`: equal to separate calls, but
    /// with less work in backward.
    pub fn forward_together_in<const D: usize, const N: usize>(
        maps: [&Self; N],
        x: Tensor<D>,
        context: &Context,
    ) -> [Tensor<D>; N] {
        let operands = maps.map(|map| (map.weight.val(), map.bias.as_ref().map(Param::val)));
        if maps.iter().all(|map| map.lora.is_none()) {
            return ops::linears(x, operands);
        }
        let mut adapters = maps.map(|map| map.lora.as_ref()).into_iter();
        ops::linears(x.clone(), operands).map(|y| match adapters.next().flatten() {
            Some(adapter) => adapter.add_to(y, x.clone(), context),
            None => y,
        })
    }

    /// Describes [`Linear::forward`] for [`Layer::meta_forward`](super::Layer::meta_forward).
    pub fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let [y] = Self::meta_forward_together([self], x, tape);
        y
    }

    /// Describes [`Linear::forward_together`] for [`Layer::meta_forward`](super::Layer::meta_forward).
    pub fn meta_forward_together<const N: usize>(
        maps: [&Self; N],
        x: MetaTensor,
        tape: &MetaTape<'_>,
    ) -> [MetaTensor; N] {
        let widths = maps.map(|map| map.weight.lazy_shape().dims::<2>()[1]);
        let mut adapters = maps.map(|map| map.lora.as_ref()).into_iter();
        tape.linears(x.clone(), widths).map(|y| match adapters.next().flatten() {
            Some(Lora { a, dropout, .. }) => {
                let [_, rank] = a.lazy_shape().dims();
                tape.low_rank(y, x.clone(), rank, *dropout > 0.0)
            }
            None => y,
        })
    }
}
