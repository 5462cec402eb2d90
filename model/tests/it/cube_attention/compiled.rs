//! The compiled code of the kernels for NVIDIA GPUs, tested without a GPU.

use std::sync::Arc;

use cubecl::ir::features::MmaConfig;
use cubecl::ir::nvidia::SmArch;
use cubecl::ir::{
    DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties,
    VectorSize,
};
use cubecl::profile::TimingMethod;
use cubecl::{Compiler, CubeKernel};
use cubecl_cuda::CudaRuntime;
use cubecl_cuda::compiler::{CudaBackend, CudaCompilationOptions, CudaCompiler};
use cubecl_runtime::runtime::Runtime;
use kiln_model::ops::cube::attention::{Instructions, Pass, Tile, kernels, shares_of};

/// Returns the properties of a GPU of compute capability 8.0 or 9.0.
fn properties(version: u32) -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: if version >= 90 { 227 } else { 163 } * 1024,
        max_cube_count: (i32::MAX as u32, u16::MAX as u32, u16::MAX as u32),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(if version >= 90 { 132 } else { 108 }),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity {
        name: format!("sm_{version}"),
        fingerprint: format!("ptx_sm{version}"),
        physical: None,
    };
    let memory = MemoryDeviceProperties::new(u64::MAX, 512);
    let mut properties =
        DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::Device, identity);
    let features = &mut properties.features;
    features.copy_async = true;
    for kind in [FloatKind::F16, FloatKind::BF16] {
        let elem = ElemType::Float(kind);
        features.matmul.ldmatrix.insert(elem);
        features.matmul.mma.insert(MmaConfig {
            a_type: elem,
            b_type: elem,
            cd_type: ElemType::Float(FloatKind::F32),
            m: 16,
            n: 8,
            k: 16,
        });
    }
    Arc::new(properties)
}

/// Returns the CUDA C++ source of a kernel, and its shared memory in bytes.
fn source(kernel: &dyn CubeKernel, version: u32) -> (String, usize) {
    let mut options =
        CudaCompilationOptions { arch: Some(SmArch::new(version, version >= 90)), ..Default::default() };
    options.cpp.warp_size = 32;
    options.cpp.supports_features.fast_math = true;
    options.cpp.supports_features.grid_constants = true;
    let mut compiler = CudaCompiler::new(CudaBackend::Cpp);
    let compiled = compiler.compile(kernel.define(), &options).expect("a kernel that compiles");
    (compiled.to_string(), compiled.shared_memory_size())
}

/// Returns the sources of all kernels. If `KILN_KERNELS` names a folder, also writes them there, for `nvcc`, `ptxas`
/// and inspection.
fn sources(
    version: u32,
    dtype: FloatKind,
    head_dim: usize,
    window: Option<usize>,
) -> Vec<(&'static str, String)> {
    let properties = properties(version);
    let target = Arc::new(CudaRuntime::target_properties());
    let limit = properties.hardware.max_shared_memory_size;
    let kernels = kernels(&properties, &target, dtype, head_dim, window);
    assert!(!kernels.is_empty());
    let compiled = kernels.into_iter().map(|(name, kernel)| {
        let (source, shared) = source(kernel.as_ref(), version);
        assert!(shared <= limit, "{name} takes {shared} bytes of shared memory");
        if let Some(folder) = std::env::var_os("KILN_KERNELS") {
            let window = window.map_or_else(String::new, |window| format!("_window{window}"));
            let file = format!("{name}_{dtype:?}_{head_dim}{window}_sm{version}_{shared}.cu");
            std::fs::write(std::path::Path::new(&folder).join(file), &source).expect("written");
        }
        (name, source)
    });
    compiled.collect()
}

#[test]
fn half_attention_compiles_to_tensor_cores() {
    for (version, dtype, name) in
        [(80, FloatKind::BF16, "bf16"), (90, FloatKind::BF16, "bf16"), (90, FloatKind::F16, "f16")]
    {
        for (head_dim, window) in [(64, None), (128, None), (64, Some(100)), (128, Some(4096))] {
            for (kernel, source) in sources(version, dtype, head_dim, window) {
                let wgmma = source.contains("wgmma.mma_async.sync.aligned.m64n")
                    && source.contains(&format!("k16.f32.{name}.{name}"))
                    && source.contains("fence.proxy.async");
                let mma = source.contains(&format!("mma.sync.aligned.m16n8k16.row.col.f32.{name}"))
                    && source.contains("ldmatrix.sync.aligned.m8n8.x4");
                let copies = source.contains("cp.async.cg.shared");
                let expected = kernel != "sum_shares";
                assert_eq!(
                    [wgmma, mma, copies],
                    [expected && version == 90, expected && version == 80, expected],
                    "{kernel} for sm_{version} in {dtype:?}, heads of {head_dim}:\n{source}"
                );
            }
        }
    }
}

#[test]
fn other_attention_compiles_without_tensor_cores() {
    for (dtype, head_dim) in
        [(FloatKind::F32, 64), (FloatKind::F32, 128), (FloatKind::BF16, 72), (FloatKind::F16, 256)]
    {
        for (kernel, source) in sources(90, dtype, head_dim, None) {
            assert!(!source.contains("mma"), "{kernel} in {dtype:?}, heads of {head_dim}");
            assert!(source.contains("__global__"), "{kernel} in {dtype:?}, heads of {head_dim}");
        }
    }
}

#[test]
fn attention_tiles_fit_the_device() {
    let mut small = DeviceProperties::clone(&properties(90));
    let tile = |properties: &DeviceProperties, dtype, head_dim| {
        Tile::select(Pass::Keys, properties, dtype, head_dim)
    };
    let large = tile(&small, FloatKind::BF16, 128).expect("a tile");
    assert_eq!(large.instructions, Instructions::Wgmma);
    // The guaranteed minimum of WebGPU.
    small.hardware.max_shared_memory_size = 16 * 1024;
    assert_eq!(tile(&small, FloatKind::BF16, 128).expect("a tile").instructions, Instructions::Fma);
    assert!(tile(&small, FloatKind::F32, 128).is_some());
    small.hardware.max_shared_memory_size = 1024;
    assert_eq!(tile(&small, FloatKind::F32, 128), None);
}

/// For sequences of 2048 rows, with heads of 64 values, on 132 multiprocessors.
#[test]
fn attention_divides_query_heads_if_keys_are_few() {
    let properties = properties(90);
    let tile = Tile::select(Pass::Keys, &properties, FloatKind::BF16, 64).expect("a tile");
    let multiprocessors = properties.hardware.num_streaming_multiprocessors;
    let shares = |batch, heads| shares_of(batch, 2048, heads, tile.rows, multiprocessors);
    // The preset 1b: the shares take the same memory for all batches that have shares.
    assert_eq!([1, 2, 4, 8, 16].map(|batch| shares(batch, [32, 4])), [4, 2, 1, 1, 1]);
    // Each query head has its own key head.
    assert_eq!(shares(1, [32, 32]), 1);
    // Shares consist of whole heads: 3 at most, and 4 does not divide 6.
    assert_eq!([shares(1, [12, 4]), shares(2, [24, 4]), shares(1, [24, 4])], [3, 2, 6]);
}
