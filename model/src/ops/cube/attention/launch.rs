//! Launches the kernels.

use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use super::super::allocate;
use super::backward_pass::{keys_kernel, queries_kernel};
use super::forward_pass::{SizesLaunch, forward_kernel};
use super::shares::{allocate_shares, shares_of, sum_shares};
use super::tile::{Pass, Tile};
use crate::ops::attention::AttentionShape;

/// Returns the shape of a call whose queries are the last of `filled` rows. Panics if the kernels do not support it.
fn shape_of([q, k, v]: [&CubeTensor; 3], filled: usize, window: Option<usize>) -> AttentionShape {
    let shape = AttentionShape::of(q, k, v, Some(filled), window);
    assert!(
        q.dtype == k.dtype && q.dtype == v.dtype,
        "attention: q in {:?}, k in {:?}, v in {:?}",
        q.dtype,
        k.dtype,
        v.dtype
    );
    let head_dim = shape.head_dim;
    assert!(
        is_supported(head_dim),
        "attention: heads of {head_dim} values; a GPU needs a multiple of 8 up to 256"
    );
    shape
}

fn sizes(shape: AttentionShape) -> SizesLaunch {
    SizesLaunch::new(
        shape.seq as u32,
        shape.keys as u32,
        shape.capacity as u32,
        shape.heads as u32,
        shape.kv_heads as u32,
        1.0 / (shape.head_dim as f32).sqrt(),
    )
}

fn window_of(shape: AttentionShape) -> Option<u32> {
    shape.window.map(|window| window as u32)
}

/// Returns a grid with one cube per tile of `rows` rows, head and sequence.
///
/// Devices start cubes with x fastest and tiles slowest: the tiles with the most work start first.
fn grid(shape: AttentionShape, rows: usize, heads: usize, tile: &Tile) -> (CubeCount, CubeDim) {
    let tiles = rows.div_ceil(tile.rows);
    let count = CubeCount::new_3d(heads as u32, shape.batch as u32, tiles as u32);
    (count, CubeDim::new_1d(tile.units() as u32))
}

pub(super) fn fits([q, k, v]: [&CubeTensor; 3]) -> bool {
    let [.., head_dim] = dims(q);
    let properties = q.client.properties();
    let tile = |pass| Tile::select(pass, properties, kind_of(q.dtype), head_dim);
    q.dtype == k.dtype
        && q.dtype == v.dtype
        && is_supported(head_dim)
        && [Pass::Forward, Pass::Queries, Pass::Keys].into_iter().all(|pass| tile(pass).is_some())
}

fn is_supported(head_dim: usize) -> bool {
    head_dim.is_multiple_of(8) && (8..=256).contains(&head_dim)
}

/// Computes [`forward`](super::forward) or [`cached_forward`](super::cached_forward) into existing tensors.
///
/// # Panics
///
/// As `forward`, or if `out` and `lse` are not contiguous tensors of the right shape and dtype.
pub fn forward_into(
    q: &CubeTensor,
    k: &CubeTensor,
    v: &CubeTensor,
    filled: usize,
    window: Option<usize>,
    out: &CubeTensor,
    lse: &CubeTensor,
) {
    let shape = shape_of([q, k, v], filled, window);
    check(out, q.dtype, &dims(q));
    check(lse, DType::F32, &dims(q)[..3]);
    let elem = elem_of(q);
    let (tile, [n, o]) = tile_of(Pass::Forward, q, shape.head_dim);
    let [q, k, v] = [q, k, v].map(|tensor| into_contiguous(tensor.clone()));
    // SAFETY: the kernel reads rows of queries below `seq` and of keys below `keys`, and writes rows below
    // `seq`. The checks above and `Tile` guarantee that these rows exist. Its loops end.
    unsafe {
        launch! {
            forward_kernel, grid(shape, shape.seq, shape.heads, &tile);
            q / n, k / n, v / n, out / o, lse / 1; sizes(shape), tile, window_of(shape), elem, [n, o]
        }
    }
}

/// Computes [`backward`](super::backward) into existing tensors: `dq` and, if `dkv` is given, those of `k` and `v`.
///
/// # Panics
///
/// As `backward`, or if the gradients are not contiguous tensors of the right shape and dtype.
pub fn backward_into(
    [q, k, v]: [&CubeTensor; 3],
    window: Option<usize>,
    out: &CubeTensor,
    lse: &CubeTensor,
    dout: &CubeTensor,
    dq: &CubeTensor,
    dkv: Option<(&CubeTensor, &CubeTensor)>,
) {
    let shape = shape_of([q, k, v], dims(q)[1], window);
    assert_eq!(shape.capacity, shape.seq, "attention: rows of keys for rows of queries");
    for (tensor, like) in [(dq, q)].into_iter().chain(dkv.into_iter().flat_map(|(dk, dv)| [(dk, k), (dv, v)]))
    {
        check(tensor, like.dtype, &dims(like));
    }
    let [q, k, v, out, dout, lse] = [q, k, v, out, dout, lse].map(|tensor| into_contiguous(tensor.clone()));
    check(&out, q.dtype, &dims(&q));
    check(&dout, q.dtype, &dims(&q));
    check(&lse, DType::F32, &dims(&q)[..3]);
    let elem = elem_of(&q);
    let delta = allocate(&lse, [shape.batch, shape.seq, shape.heads], DType::F32);
    let (tile, [n, o]) = tile_of(Pass::Queries, &q, shape.head_dim);
    // SAFETY: as in `forward_into`.
    unsafe {
        launch! {
            queries_kernel, grid(shape, shape.seq, shape.heads, &tile);
            q / n, k / n, v / n, out / n, dout / n, lse / 1, delta / 1, dq / o;
            sizes(shape), tile, window_of(shape), elem, [n, o]
        }
    }
    if let Some((dk, dv)) = dkv {
        let (tile, [n, o]) = tile_of(Pass::Keys, &q, shape.head_dim);
        let heads = [shape.heads, shape.kv_heads];
        let multiprocessors = q.client.properties().hardware.num_streaming_multiprocessors;
        let shares = shares_of(shape.batch, shape.keys, heads, tile.rows, multiprocessors);
        let launch = |dk: &CubeTensor, dv: &CubeTensor| {
            let elems = [elem, ElemType::Float(kind_of(dk.dtype))];
            // SAFETY: as in `forward_into`; the kernel writes rows of keys below `keys`, and `dk` and `dv` have as
            // many heads as the grid.
            unsafe {
                launch! {
                    keys_kernel, grid(shape, shape.keys, shape.kv_heads * shares, &tile);
                    q / n, k / n, v / n, dout / n, lse / 1, delta / 1, dk / o, dv / o;
                    sizes(shape), tile, window_of(shape), elems, [n, o]
                }
            }
        };
        if shares == 1 {
            launch(dk, dv);
        } else {
            let parts = allocate_shares(dk, shape, shares);
            launch(&parts[0], &parts[1]);
            sum_shares(parts, [dk, dv], shape, shares, elem);
        }
    }
}

fn check(tensor: &CubeTensor, dtype: DType, shape: &[usize]) {
    assert!(
        tensor.is_contiguous() && tensor.dtype == dtype && tensor.meta.shape()[..] == *shape,
        "attention: {tensor:?} where a contiguous {dtype:?} tensor of {shape:?} belongs"
    );
}

/// Returns the type of a tensor's elements. Panics if the device does not support it.
fn elem_of(tensor: &CubeTensor) -> ElemType {
    let elem = ElemType::Float(kind_of(tensor.dtype));
    let usage = tensor.client.properties().features.type_usage(elem);
    assert!(
        usage.is_superset(TypeUsage::Conversion | TypeUsage::Buffer),
        "attention: this device cannot compute in {:?}",
        tensor.dtype
    );
    elem
}

fn kind_of(dtype: DType) -> FloatKind {
    match dtype {
        DType::F32 => FloatKind::F32,
        DType::F16 => FloatKind::F16,
        DType::BF16 => FloatKind::BF16,
        _ => panic!("attention on a GPU is for f32, f16 and bf16, not {dtype:?}"),
    }
}

fn tile_of(pass: Pass, tensor: &CubeTensor, head_dim: usize) -> (Tile, [usize; 2]) {
    let properties = tensor.client.properties();
    let tile = Tile::select(pass, properties, kind_of(tensor.dtype), head_dim).unwrap_or_else(|| {
        panic!("attention: heads of {head_dim} values do not fit into this device's shared memory")
    });
    (tile, [tile.vector(), tile.run()])
}

pub(super) fn dims(tensor: &CubeTensor) -> [usize; 4] {
    tensor.meta.shape().dims()
}
