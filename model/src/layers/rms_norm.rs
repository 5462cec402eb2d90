//! Root-mean-square normalisation (Zhang and Sennrich, 2019).

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};

use super::constant_parameter;
use crate::ops;

/// `x / sqrt(mean(x²) + eps) * weight` over the last dimension.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// `[width]`, initially one.
    pub weight: Param<Tensor<1>>,
    #[module(skip)]
    eps: f64,
}

impl RmsNorm {
    /// Creates a norm for vectors of `width` elements.
    pub fn new(width: usize, eps: f64, device: &Device) -> Self {
        RmsNorm { weight: constant_parameter([width], 1.0, device), eps }
    }

    /// Returns the normalised residual stream `[.., width]`, as input of a layer that adds to the stream.
    pub fn forward_of<const D: usize>(&self, stream: &ops::Residual<D>) -> Tensor<D> {
        stream.rms_norm(self.weight.val(), self.eps)
    }

    /// Returns the residual stream after a layer with result `y`, and the [`RmsNorm::forward_of`] of that stream for
    /// the next layer.
    pub fn forward_after<const D: usize>(
        &self,
        stream: ops::Residual<D>,
        y: Tensor<D>,
    ) -> (ops::Residual<D>, Tensor<D>) {
        stream.add_result_and_norm(y, self.weight.val(), self.eps)
    }

    /// Normalises `x` `[.., width]` and returns the same shape.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        ops::rms_norm(x, self.weight.val(), self.eps)
    }
}
