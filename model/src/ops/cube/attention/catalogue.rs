//! All kernels, created without a launch, for tests of the compiled code.

use std::sync::Arc;

use cubecl::CubeKernel;
use cubecl::ir::{AddressType, DeviceProperties, ElemType, FloatKind, TargetProperties};
use cubecl::prelude::*;

use super::super::UNITS;
use super::backward_pass::{keys_kernel, queries_kernel};
use super::forward_pass::{SizesCompilationArg, forward_kernel};
use super::shares::{VECTOR, sum_shares_kernel};
use super::tile::{Pass, Tile};

/// Returns attention's kernels for `dtype` and `window` on a device, by name; empty if no tile fits the device.
pub fn kernels(
    properties: &Arc<DeviceProperties>,
    target: &Arc<TargetProperties>,
    dtype: FloatKind,
    head_dim: usize,
    window: Option<usize>,
) -> Vec<(&'static str, Box<dyn CubeKernel>)> {
    let (elem, single) = (ElemType::Float(dtype), ElemType::Float(FloatKind::F32));
    let window = window.map(|window| window as u32);
    let tile = |pass| Tile::select(pass, properties, dtype, head_dim);
    let (Some(forward), Some(queries), Some(keys)) =
        (tile(Pass::Forward), tile(Pass::Queries), tile(Pass::Keys))
    else {
        return Vec::new();
    };
    let settings = |units: usize| {
        let dim = CubeDim::new_1d(units as u32);
        KernelSettings::new(dim.into(), ExecutionMode::Unchecked, AddressType::U32)
    };
    /// Creates a kernel from buffers and compile-time arguments: a tile, or units per cube and others.
    macro_rules! kernel {
        ($name:literal, $kernel:ty, [$($buffer:ident)+], $tile:ident, $elem:expr) => {{
            let vectors = [$tile.vector(), $tile.run()];
            kernel!($name, $kernel, [$($buffer)+], $tile.units(); sizes(), $tile, window, $elem, vectors)
        }};
        ($name:literal, $kernel:ty, [$($buffer:ident)+], $units:expr; $($argument:expr),+) => {{
            let (properties, target) = (properties.clone(), target.clone());
            $(let $buffer = BufferCompilationArg { inplace: None };)+
            let kernel = <$kernel>::new(settings($units), properties, target, $($buffer,)+ $($argument),+);
            ($name, Box::new(kernel) as Box<dyn CubeKernel>)
        }};
    }
    vec![
        kernel!("forward", forward_kernel::ForwardKernel, [q k v out lse], forward, elem),
        kernel!("queries", queries_kernel::QueriesKernel, [q k v out dout lse delta dq], queries, elem),
        kernel!("keys", keys_kernel::KeysKernel, [q k v dout lse delta dk dv], keys, [elem; 2]),
        kernel!("shares", keys_kernel::KeysKernel, [q k v dout lse delta dk dv], keys, [elem, single]),
        kernel!(
            "sum_shares", sum_shares_kernel::SumSharesKernel, [key_shares val_shares dk dv], UNITS;
            Default::default(), head_dim / VECTOR, elem, VECTOR
        ),
    ]
}

/// Returns sizes for compilation, without values: kernels read the sizes at run time.
fn sizes() -> SizesCompilationArg {
    SizesCompilationArg {
        seq: Default::default(),
        keys: Default::default(),
        capacity: Default::default(),
        heads: Default::default(),
        kv_heads: Default::default(),
        scale: Default::default(),
    }
}
