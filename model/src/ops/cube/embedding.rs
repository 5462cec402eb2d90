//! Lookup of rows of a table. The gradient is summed in a fixed order, without atomic additions or sorting.
//!
//! Each position finds the next position with its id. The first position of an id follows these links and sums the
//! gradients. The search costs up to one cheap comparison per pair of positions, far less than the head's products.

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::sums::zeros;
use super::{allocate, contiguous, cubes_for, elem, empty, len_of, vector_size};
use crate::ops::embedding::EmbeddingKernels;

impl EmbeddingKernels for CubeBackend {
    fn embedding_forward(weight: &CubeTensor, ids: &CubeTensor) -> CubeTensor {
        let [vocab, d_model] = weight.meta.shape().dims();
        let [batch, seq] = ids.meta.shape().dims();
        let (weight, ids) = (contiguous(weight), into_contiguous(ids.clone()));
        let y = empty(&weight, [batch, seq, d_model], weight.dtype);
        let vector = vector_size(&[&weight], d_model);
        // SAFETY: no unit goes beyond the end of `y`, which has a row per id; rows outside the table are not read.
        unsafe {
            launch! {
                forward_kernel, cubes_for(&y.client, len_of(&y) / vector), [weight, y], vector;
                weight / vector, ids / 1, y / vector;
                d_model / vector, vocab as i32, f32::NAN, [elem(&weight), elem(&ids)]
            }
        }
        y
    }

    fn embedding_weight_gradient(
        ids: &CubeTensor,
        dy: &CubeTensor,
        shape: Shape,
        dtype: DType,
    ) -> CubeTensor {
        let [vocab, d_model] = shape.dims();
        let (ids, dy) = (into_contiguous(ids.clone()), contiguous(dy));
        let dw = zeros(&dy, shape, dtype);
        let places = len_of(&ids);
        let links = allocate(&dy, [2 * places], DType::U32);
        // SAFETY: no unit goes beyond the number of places, and `links` has two words for each.
        unsafe {
            launch! {
                links_kernel, cubes_for(&dy.client, places), [links];
                ids / 1, links / 1; vocab as i32, elem(&ids)
            }
        }
        let vector = vector_size(&[&dy, &dw], d_model);
        // SAFETY: no unit goes beyond the last place, links lead to places, and first places have ids in the table.
        unsafe {
            launch! {
                gradient_kernel, cubes_for(&dy.client, places * d_model / vector), [dy, dw], vector;
                ids / 1, links / 1, dy / vector, dw / vector;
                d_model / vector, [elem(&ids), elem(&dy), elem(&dw)]
            }
        }
        dw
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<F: Float, I: Int, N: Size>(
    weight: &[Vector<F, N>],
    ids: &[I],
    y: &mut [Vector<F, N>],
    width: usize,
    vocab: i32,
    outside: f32,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS >= y.len() {
        terminate!();
    }
    let id = i32::cast_from(ids[ABSOLUTE_POS / width]);
    if id >= 0 && id < vocab {
        y[ABSOLUTE_POS] = weight[usize::cast_from(id) * width + ABSOLUTE_POS % width];
    } else {
        y[ABSOLUTE_POS] = Vector::new(F::cast_from(outside));
    }
}

/// Writes two words per position: the next position with the same id (or the number of positions), and 1 if the
/// position is the first one of an id in the vocabulary.
#[cube(launch_unchecked, address_type = "dynamic")]
fn links_kernel<I: Int>(ids: &[I], links: &mut [u32], vocab: i32, #[define(I)] _dtype: ElemType) {
    let place = ABSOLUTE_POS;
    if place >= ids.len() {
        terminate!();
    }
    let id = i32::cast_from(ids[place]);
    let mut next = place + 1;
    while next < ids.len() && i32::cast_from(ids[next]) != id {
        next += 1;
    }
    // One more than the last earlier position with this id, or 0.
    let mut before = place;
    while before > 0 && i32::cast_from(ids[before - 1]) != id {
        before -= 1;
    }
    links[2 * place] = u32::cast_from(next);
    let first = before == 0 && id >= 0 && id < vocab;
    links[2 * place + 1] = select(first, 1u32, 0u32);
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gradient_kernel<I: Int, D: Float, F: Float, N: Size>(
    ids: &[I],
    links: &[u32],
    dy: &[Vector<D, N>],
    dw: &mut [Vector<F, N>],
    width: usize,
    #[define(I, D, F)] _dtypes: [ElemType; 3],
) {
    let mut place = ABSOLUTE_POS / width;
    let column = ABSOLUTE_POS % width;
    if place >= ids.len() {
        terminate!();
    }
    if links[2 * place + 1] == 0 {
        terminate!();
    }
    let row = usize::cast_from(i32::cast_from(ids[place]));
    let mut sum = Vector::<f32, N>::new(0.0f32);
    while place < ids.len() {
        sum += Vector::cast_from(dy[place * width + column]);
        place = usize::cast_from(links[2 * place]);
    }
    dw[row * width + column] = Vector::cast_from(sum);
}
