//! The names that `cubecl-cuda` refers to, without LLVM. See the README beside this crate.

use std::convert::Infallible;
use std::fmt;

use cubecl_core::ir::nvidia::SmArch;
use cubecl_core::prelude::KernelDefinition;
use cubecl_environment::backtrace::BackTrace;
use cubecl_runtime::compiler::{CompilationError, Compiler};
use cubecl_runtime::kernel::BufferIOAttr;

/// What to compile for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    /// A CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU.
    Nvptx,
}

/// A compiler that compiles nothing.
#[derive(Clone, Debug, Default)]
pub struct PlironCompiler {
    /// What to compile for.
    pub target: LlvmTarget,
}

/// Settings that the CUDA runtime fills in for either compiler.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// A CPU or AMD architecture; always `None` here.
    pub arch: Option<Infallible>,
    /// Compute capability.
    pub sm_arch: Option<SmArch>,
    /// Newest PTX that the driver loads.
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    /// Whether launch parameters are grid constants.
    pub grid_constants: bool,
}

/// A compiled kernel.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    /// PTX, ending in a zero.
    pub ptx: Vec<core::ffi::c_char>,
    /// Name of the kernel in it.
    pub entrypoint: String,
    /// LLVM's form of it, for logs.
    pub ir: String,
    /// Bytes that a launch reserves.
    pub shared_memory_size: usize,
    /// Which buffers are read and written.
    pub io: Vec<BufferIOAttr>,
}

/// What compiling could result in. No value is ever made.
#[derive(Clone)]
pub enum PlironArtifact {
    /// For an NVIDIA GPU.
    NvptxCode(NvptxModule),
    /// For anything else.
    Other(Infallible),
}

impl fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlironArtifact::NvptxCode(module) => f.write_str(&module.ir),
            PlironArtifact::Other(never) => match *never {},
        }
    }
}

impl Compiler for PlironCompiler {
    type Representation = PlironArtifact;
    type CompilationOptions = PlironOptions;

    fn compile(
        &mut self,
        _kernel: KernelDefinition,
        _options: &PlironOptions,
    ) -> Result<PlironArtifact, CompilationError> {
        Err(CompilationError::Generic {
            reason: "this program was built without LLVM; build it with cubecl's feature `cuda-cpp`"
                .to_owned(),
            backtrace: BackTrace::capture(),
        })
    }

    fn extension(&self) -> &'static str {
        "ll"
    }

    fn lang_tag(&self) -> &'static str {
        "llvm"
    }
}

/// Of NVIDIA's targets.
pub mod nvptx {
    /// Versions of PTX.
    pub mod ptx_version {
        /// A version of PTX.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct PtxVersion(u32);

        impl PtxVersion {
            /// What LLVM would emit for a driver: nothing here, NVRTC chooses for itself.
            pub fn for_driver(_driver: i32) -> Option<Self> {
                None
            }
        }

        impl core::fmt::Display for PtxVersion {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "ptx{}", self.0)
            }
        }
    }
}

/// What the targets share.
pub mod shared {
    /// What LLVM cannot express.
    pub mod lowered_features {
        use cubecl_core::ir::DeviceProperties;

        /// A kind of GPU.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            /// NVIDIA's.
            Nvptx,
        }

        /// Takes from `properties` what LLVM cannot express. NVRTC can express all of it, and this is
        /// called for LLVM only.
        pub fn restrict_features(_properties: &mut DeviceProperties, _target: GpuTarget) {}
    }
}
