//! Affine map.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};

use super::{constant_parameter, normal_parameter};
use crate::ops;
use crate::random::Key;

/// `y = x W (+ b)`.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[d_in, d_out]`.
    pub weight: Param<Tensor<2>>,
    /// `[d_out]`.
    pub bias: Option<Param<Tensor<1>>>,
}

impl Linear {
    /// Creates a map without bias. Weights are normally distributed with standard deviation `std`.
    pub fn new(d_in: usize, d_out: usize, std: f64, key: Key, device: &Device) -> Self {
        Linear { weight: normal_parameter([d_in, d_out], std, key.fork("weight"), device), bias: None }
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

    /// Maps `x` `[.., d_in]` to `[.., d_out]`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let (weight, bias) = self.operands();
        ops::linear(x, weight, bias)
    }

    /// Returns the result of each of `maps` for the same `x`: equal to separate calls, but with less work in
    /// backward.
    pub fn forward_together<const D: usize, const N: usize>(
        maps: [&Self; N],
        x: Tensor<D>,
    ) -> [Tensor<D>; N] {
        ops::linears(x, maps.map(Self::operands))
    }

    fn operands(&self) -> (Tensor<2>, Option<Tensor<1>>) {
        (self.weight.val(), self.bias.as_ref().map(Param::val))
    }
}
