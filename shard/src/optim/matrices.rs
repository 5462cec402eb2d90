//! Whole matrices: the ranks that transform them, and reading and writing them in flat buffers, on the host or on a
//! GPU.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{Device, Tensor, TensorData};
use kiln_collectives::{Buffer, DType};

use super::rule::{OwnedRun, Rule, UpdateStep};
use crate::buffers::{FlatTensors, FlatWeights};
use crate::layout::{ParamGroupLayout, ParameterLayout};
use crate::sync::lock;

/// The owner of every parameter whose rule works on whole matrices, by position of its group and its index
/// there: the rank that writes the chunk of this index ([`ParamGroupLayout::own_chunk`]). Depends only on the groups, so
/// it is the same on all ranks and under every strategy.
#[derive(Clone, Debug)]
pub struct Owners(Vec<Vec<usize>>);

impl Owners {
    /// Spreads the parameters of the groups that are `whole` over all ranks. Groups are processed separately,
    /// because they are transformed one after the other; in each, the parameter with the most work is
    /// assigned first, to the rank with the least work so far.
    pub fn new<'a>(
        groups: impl IntoIterator<Item = &'a ParamGroupLayout>,
        whole: impl Fn(usize) -> bool,
    ) -> Self {
        let mut load = Vec::new();
        let mut of_group = |group: &ParamGroupLayout| {
            load.resize(group.chunks, 0u128);
            let costs: Vec<_> = group.parameters.iter().map(|parameter| cost(&parameter.shape)).collect();
            let mut order: Vec<_> = (0..costs.len()).collect();
            // Stable: equal costs stay in the order of the layout.
            order.sort_by_key(|index| std::cmp::Reverse(costs[*index]));
            let mut owners = vec![0; costs.len()];
            for index in order {
                let ranks = load.iter().enumerate();
                let least = ranks.min_by_key(|(_, load)| **load).map_or(0, |(rank, _)| rank);
                load[least] += costs[index];
                owners[index] = least;
            }
            owners
        };
        let groups = groups.into_iter().enumerate();
        Owners(groups.map(|(at, group)| if whole(at) { of_group(group) } else { Vec::new() }).collect())
    }

    /// Returns the chunk of the owner of the parameter at `index` in the group at `position`; `None` if its rule does not
    /// work on whole matrices.
    pub fn owner(&self, position: usize, index: usize) -> Option<usize> {
        self.0.get(position)?.get(index).copied()
    }

    /// Returns the indices, within the group at `position`, of the parameters whose owner writes the chunk `chunk`.
    pub fn owned_by(&self, chunk: usize, position: usize) -> impl Iterator<Item = usize> {
        let owners = self.0[position].iter().enumerate();
        owners.filter(move |(_, owner)| **owner == chunk).map(|(index, _)| index)
    }
}

/// Returns the approximate cost of the products of a matrix with its transpose, in multiplications.
fn cost(shape: &[usize]) -> u128 {
    let [matrices, rows, columns] = as_matrices(shape);
    let (least, most) = (rows.min(columns) as u128, rows.max(columns) as u128);
    matrices as u128 * least * least * (2 * most + least)
}

/// Returns a shape as that of matrices: `[matrices, rows, columns]`. A vector is one row.
fn as_matrices(shape: &[usize]) -> [usize; 3] {
    match *shape {
        [] => [1, 1, 1],
        [columns] => [1, 1, columns],
        [ref matrices @ .., rows, columns] => [matrices.iter().product(), rows, columns],
    }
}

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
/// to `target`. Computes on `device`, which must hold both buffers; `step` and the owned slots are known on the host
/// alone. The error says what is wrong with the results.
pub(crate) fn transform(
    rule: &dyn Rule,
    parameter: &ParameterLayout,
    flat: &FlatWeights,
    target: &Target,
    device: &Device,
    step: Option<UpdateStep>,
    slots: Vec<&mut [f32]>,
) -> Result<(), String> {
    let like = Tensor::<1>::zeros([1], device);
    let (shape, offset) = (as_matrices(&parameter.shape), parameter.offset);
    let source = Source { flat: flat.clone(), shape, offset };
    let matrices = Tensor::<3>::from_dispatch(Dispatch::matrices(like.into_dispatch(), source));
    let updates = match step {
        Some(step) => transform_owned(rule, &step, parameter, matrices, slots)?,
        None => rule.transform(matrices),
    };
    if updates.dims() != shape {
        return Err(format!("it has the shape {:?}, and its matrices {shape:?}", updates.dims()));
    }
    let _ = Dispatch::put(updates.into_dispatch(), target.clone(), parameter.range());
    lock(&target.0).1.clone()
}

/// Applies `rule` to `matrices` and to the owned slots of `parameter`, which are updated in place.
fn transform_owned(
    rule: &dyn Rule,
    step: &UpdateStep,
    parameter: &ParameterLayout,
    matrices: Tensor<3>,
    slots: Vec<&mut [f32]>,
) -> Result<Tensor<3>, String> {
    let device = matrices.device();
    let shapes = rule.owned_slots().iter().map(|name| parameter.owned_slot(name));
    let shapes: Vec<_> = shapes.map(|slot| slot.map_or([1, 1, 0], |slot| as_matrices(&slot.shape))).collect();
    let tensor = |(values, shape): (&&mut [f32], &[usize; 3])| {
        Tensor::from_data(TensorData::new(values.to_vec(), *shape), &device)
    };
    let mut tensors: Vec<Tensor<3>> = slots.iter().zip(&shapes).map(tensor).collect();
    let run = OwnedRun { name: &parameter.name, matrices, slots: &mut tensors };
    let updates = rule.transform_owned(step, run);
    for (((values, shape), tensor), name) in
        slots.into_iter().zip(shapes).zip(tensors).zip(rule.owned_slots())
    {
        if tensor.dims() != shape {
            return Err(format!("its slot `{name}` has the shape {:?} instead of {shape:?}", tensor.dims()));
        }
        let data = tensor.into_data();
        values.copy_from_slice(data.as_slice().map_err(|error| format!("its slot `{name}`: {error:?}"))?);
    }
    Ok(updates)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The owner is the same whatever mesh the ranks form, and each parameter has exactly one.
    #[test]
    fn owners_share_the_work() {
        let parameters = |sides: &[usize]| {
            let named = sides.iter().enumerate().map(|(index, side)| (index.to_string(), vec![*side, *side]));
            named.collect()
        };
        let group =
            |name: &str, sides: &[usize]| ParamGroupLayout::new(name.to_owned(), true, parameters(sides), 3);
        let groups = [group("a", &[4, 8, 4, 4]), group("b", &[4]), group("c", &[8, 8])];
        let owners = Owners::new(&groups, |at| at != 1);
        let of_group =
            |at: usize, count: usize| (0..count).map(|index| owners.owner(at, index)).collect::<Vec<_>>();
        // The largest first, then to the rank with the least work.
        assert_eq!(of_group(0, 4), [Some(1), Some(0), Some(2), Some(1)]);
        assert_eq!(of_group(1, 1), [None]);
        assert_eq!(of_group(2, 2), [Some(2), Some(1)]);
        assert_eq!(owners.owned_by(1, 0).collect::<Vec<_>>(), [0, 3]);
    }
}
