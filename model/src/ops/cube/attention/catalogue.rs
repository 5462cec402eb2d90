//! All kernels without a launch, for tests of the code that they compile to.

use std::sync::Arc;

use cubecl::CubeKernel;
use cubecl::ir::{AddressType, DeviceProperties, ElemType, FloatKind, TargetProperties};
use cubecl::prelude::*;

use super::backward_pass::{DELTA_UNITS, delta_kernel, keys_kernel, queries_kernel};
use super::forward_pass::{SizesCompilationArg, forward_kernel};
use super::tile::{Pass, Tile};

/// The kernels that attention launches on a device for elements of type `dtype`, with their names.
///
/// Empty if no tile fits the device.
pub fn kernels(
    properties: &Arc<DeviceProperties>,
    target: &Arc<TargetProperties>,
    dtype: FloatKind,
    head_dim: usize,
) -> Vec<(&'static str, Box<dyn CubeKernel>)> {
    let elem = ElemType::Float(dtype);
    let settings = |units: usize| {
        let dim = CubeDim::new_1d(units as u32);
        KernelSettings::new(dim.into(), ExecutionMode::Unchecked, AddressType::U32)
    };
    let buffer = || BufferCompilationArg { inplace: None };
    let tile = |pass| Tile::select(pass, properties, dtype, head_dim);
    let (Some(forward), Some(queries), Some(keys)) =
        (tile(Pass::Forward), tile(Pass::Queries), tile(Pass::Keys))
    else {
        return Vec::new();
    };
    let vectors = |tile: &Tile| [tile.vector(), tile.run()];
    vec![
        (
            "forward",
            Box::new(forward_kernel::ForwardKernel::new(
                settings(forward.units()),
                properties.clone(),
                target.clone(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                sizes(),
                forward,
                elem,
                vectors(&forward),
            )),
        ),
        (
            "delta",
            Box::new(delta_kernel::DeltaKernel::new(
                settings(DELTA_UNITS),
                properties.clone(),
                target.clone(),
                buffer(),
                buffer(),
                buffer(),
                head_dim / 4,
                elem,
                4,
            )),
        ),
        (
            "queries",
            Box::new(queries_kernel::QueriesKernel::new(
                settings(queries.units()),
                properties.clone(),
                target.clone(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                sizes(),
                queries,
                elem,
                vectors(&queries),
            )),
        ),
        (
            "keys",
            Box::new(keys_kernel::KeysKernel::new(
                settings(keys.units()),
                properties.clone(),
                target.clone(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                sizes(),
                keys,
                elem,
                vectors(&keys),
            )),
        ),
    ]
}

/// Kernels read the sizes at run time, so none of them is part of the compiled code.
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
