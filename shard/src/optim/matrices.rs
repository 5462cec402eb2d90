//! Reading and writing whole matrices in flat buffers, on the host or on a GPU.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{Device, Tensor};
use kiln_collectives::{Buffer, DType};

use super::owners::as_matrices;
use super::rule::Rule;
use crate::buffers::{FlatTensors, FlatWeights};
use crate::layout::ParameterLayout;
use crate::sync::lock;

/// Matrices in a flat buffer of f32.
#[derive(Clone)]
pub(crate) struct Source {
    flat: FlatWeights,
    /// `[matrices, rows, columns]`.
    shape: [usize; 3],
    /// Offset of the first element.
    offset: usize,
}

/// A flat f32 buffer that receives updates, and the first error.
#[derive(Clone)]
pub(crate) struct Target(Arc<Mutex<(Buffer, Result<(), String>)>>);

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Source({:?})", self.shape)
    }
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Target")
    }
}

impl Target {
    /// Creates a target that writes to `buffer`.
    pub(crate) fn new(buffer: Buffer) -> Self {
        Target(Arc::new(Mutex::new((buffer, Ok(())))))
    }

    /// Returns the buffer.
    pub(crate) fn into_buffer(self) -> Buffer {
        std::mem::replace(&mut lock(&self.0).0, Buffer::zeros(DType::F32, 0))
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait MatrixOps: Backend {
    /// Returns a view of the matrices of `source`, on the device of `like`.
    fn matrices(like: FloatTensor<Self>, source: Source) -> FloatTensor<Self>;
    /// Writes `updates` to elements `range` of `target`, and returns them.
    fn put(updates: FloatTensor<Self>, target: Target, range: Range<usize>) -> FloatTensor<Self>;
}

impl<B: FlatTensors> MatrixOps for B {
    fn matrices(like: FloatTensor<B>, Source { flat, shape, offset }: Source) -> FloatTensor<B> {
        B::view(&flat, &like, &shape, offset, DType::F32)
    }

    fn put(updates: FloatTensor<B>, target: Target, range: Range<usize>) -> FloatTensor<B> {
        let (buffer, outcome) = &mut *lock(&target.0);
        let written = B::add_gradient(buffer, range, updates.clone(), true);
        *outcome = outcome.clone().and(written);
        updates
    }
}

/// Applies `rule` to the directions of `parameter` in `flat`, which contains the whole group, and writes the results
/// to `target`. Computes on `device`, which must hold both buffers. The error says what is wrong with the results.
pub(crate) fn transform(
    rule: &dyn Rule,
    parameter: &ParameterLayout,
    flat: &FlatWeights,
    target: &Target,
    device: &Device,
) -> Result<(), String> {
    let like = Tensor::<1>::zeros([1], device);
    let (shape, offset) = (as_matrices(&parameter.shape), parameter.offset);
    let source = Source { flat: flat.clone(), shape, offset };
    let matrices = Tensor::<3>::from_dispatch(Dispatch::matrices(like.into_dispatch(), source));
    let updates = rule.transform(matrices);
    let _ = Dispatch::put(updates.into_dispatch(), target.clone(), parameter.range());
    lock(&target.0).1.clone()
}
