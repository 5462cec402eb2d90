//! Places in a pass where a probe observes a tensor and, in backward, the tensor's gradient.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{
    Backend, Dispatch, DispatchKindConversion, DispatchTensor, Flex, backend_extension, tensor::FloatTensor,
};
use burn::tensor::{Shape, Tensor};
use burn_backend::TensorMetadata;
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;

use super::tape::{Step, Tracked, recomputes, record, record_again};

/// An observation at one place of a pass.
#[derive(Debug)]
pub struct Seen<'a> {
    /// Place in the decoder, such as `layers.3.ffn`; `embed` and `head` for the outer modules.
    pub place: &'a str,
    /// Name of the tensor at its place: `input`, `output`, or a name given by the layer.
    pub name: &'a str,
    /// True for the tensor's gradient, in backward.
    pub is_gradient: bool,
    /// The shape of the tensor, such as `[batch, seq, d_model]`.
    pub shape: Vec<usize>,
    /// The values of the tensor in row-major order, off the tape.
    pub values: Tensor<1>,
}

/// Observes tensors of a pass while they are computed, for hashes, breakpoints and logs. The pass continues when the
/// probe returns; the tensors are not changed. A recomputed block shows the tensors inside it twice: in forward and
/// in backward. Cheap to clone.
#[derive(Clone)]
pub struct Probe(Arc<dyn Fn(Seen<'_>) + Send + Sync>);

impl Probe {
    /// Creates a probe that calls `look` on the thread that computes the pass.
    pub fn new(look: impl Fn(Seen<'_>) + Send + Sync + 'static) -> Self {
        Probe(Arc::new(look))
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Probe")
    }
}

/// A probe, and a place where it observes a tensor.
#[derive(Clone, Debug)]
pub struct ProbePoint {
    probe: Probe,
    place: Arc<str>,
    name: Arc<str>,
    is_gradient: bool,
}

impl ProbePoint {
    fn show<B: Backend>(&self, x: &FloatTensor<B>)
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        let shape = x.shape();
        let flat = B::float_reshape(x.clone(), Shape::new([shape.num_elements()]));
        (self.probe.0)(Seen {
            place: &self.place,
            name: &self.name,
            is_gradient: self.is_gradient,
            shape: shape.to_vec(),
            values: Tensor::from_primitive::<B>(flat),
        });
    }
}

/// Shows `x`, and its gradient if there is one, to `probe`, and returns `x`.
pub(crate) fn probe<const D: usize>(x: Tensor<D>, probe: &Probe, place: &str, name: &str) -> Tensor<D> {
    let at = ProbePoint { probe: probe.clone(), place: place.into(), name: name.into(), is_gradient: false };
    Tensor::from_dispatch(Dispatch::probe(x.into_dispatch(), at))
}

/// A backend on which probes can observe tensors.
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait ProbeOp: Backend {
    /// Shows `x` to the probe of `at`, and returns `x`.
    fn probe(x: FloatTensor<Self>, at: ProbePoint) -> FloatTensor<Self>;
}

impl ProbeOp for Flex {
    fn probe(x: FloatTensor<Self>, at: ProbePoint) -> FloatTensor<Self> {
        at.show::<Self>(&x);
        x
    }
}

#[cfg(feature = "cube")]
impl ProbeOp for CubeBackend {
    fn probe(x: FloatTensor<Self>, at: ProbePoint) -> FloatTensor<Self> {
        at.show::<Self>(&x);
        x
    }
}

impl<B: ProbeOp, C: CheckpointStrategy> ProbeOp for Autodiff<B, C> {
    fn probe(x: Tracked<B, C>, at: ProbePoint) -> Tracked<B, C> {
        let for_gradient = ProbePoint { is_gradient: true, ..at.clone() };
        let backward = |mut step: Step<'_, 1>, dy, at| step.register::<B>(0, B::probe(dy, at));
        if recomputes::<C>() {
            // A value that is computed again is not shown again.
            let y = B::probe(x.primitive().clone(), at);
            return record_again::<B, C, _, _>([&x], y, |[x]| x, |_| for_gradient, backward);
        }
        let (x, node) = x.into_parts();
        record::<B, C, _, _>([node], B::probe(x, at), |_| for_gradient, backward)
    }
}
