//! cuBLASLt on one GPU: its handle, its workspaces, and the plan of each product.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::OnceLock;

use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::sys::{cublasLtGetVersion, cublasLtHandle_t, is_culib_present};
use cudarc::driver::result::{ctx, device, malloc_sync, primary_ctx};
use cudarc::driver::sys::{CUcontext, CUdevice_attribute, CUdeviceptr, CUstream};

use super::algorithms::{self, Key, Platform};
use super::error::ProductError;
use super::measure::fastest_of;
use super::plan::{Addresses, Call, Plan};
use super::problem::{ALIGNMENT, Alignments, Problem, alignment_of};

/// Bytes of a stream's workspace from compute capability 9.0 on and before: the size that NVIDIA recommends, and twice
/// that size (cuBLAS documentation, `cublasSetWorkspace`).
const WORKSPACE: [usize; 2] = [32 << 20, 8 << 20];

/// Maximum plans in memory. A run has a few dozen; text generation has several for every prompt length.
pub(super) const PLANS: usize = 4096;

/// Returns whether the library can be loaded. Logs one warning if not.
pub(super) fn present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    *PRESENT.get_or_init(|| {
        // SAFETY: the call loads a library by its names, and loading NVIDIA's library has no side effects.
        let present = unsafe { is_culib_present() };
        if !present {
            tracing::warn!(
                "cuBLASLt (libcublasLt.so) is missing: matrices are multiplied by slower kernels; install \
                 it, for example with: pip install nvidia-cublas"
            );
        }
        present
    })
}

/// cuBLASLt on one GPU, used only by CubeCL's thread for this GPU, until the process ends.
pub(super) struct CublasLt {
    handle: cublasLtHandle_t,
    context: CUcontext,
    platform: Platform,
    workspace_bytes: usize,
    /// One per stream, because products of two streams may run concurrently.
    workspaces: HashMap<CUstream, CUdeviceptr>,
    plans: HashMap<(Problem, Alignments), Plan>,
}

impl CublasLt {
    /// Opens cuBLASLt on GPU `index`, which must exist. The library must be [`present`].
    pub(super) fn open(index: u16) -> Result<CublasLt, ProductError> {
        let what = || format!("GPU {index}");
        let device = device::get(i32::from(index)).map_err(ProductError::driver("cuDeviceGet", what()))?;
        // SAFETY: the driver has just returned this device. The context is never released.
        let context = unsafe { primary_ctx::retain(device) };
        let context = context.map_err(ProductError::driver("cuDevicePrimaryCtxRetain", what()))?;
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        // SAFETY: as above.
        let major = unsafe { device::get_attribute(device, attribute) };
        let major = major.map_err(ProductError::driver("cuDeviceGetAttribute", what()))?;
        let gpu = device::get_name(device).map_err(ProductError::driver("cuDeviceGetName", what()))?;
        enter(context)?;
        let handle = lt::create_handle().map_err(ProductError::library("cublasLtCreate", what()))?;
        // SAFETY: the library is loaded, and the call takes no arguments.
        let library = unsafe { cublasLtGetVersion() };
        Ok(CublasLt {
            handle,
            context,
            platform: Platform { gpu, library },
            workspace_bytes: WORKSPACE[usize::from(major < 9)],
            workspaces: HashMap::new(),
            plans: HashMap::new(),
        })
    }

    /// Returns whether cuBLASLt has an algorithm for `problem`, or `true` if a call fails: queueing the product
    /// reports the error.
    pub(super) fn has_algorithm(&self, problem: &Problem, alignments: Alignments) -> bool {
        // cuBLASLt reads a bias only when it computes: until then, any aligned address works.
        let bias = problem.bias.then_some(CUdeviceptr::from(ALIGNMENT));
        let plan = enter(self.context)
            .and_then(|()| Plan::new(self.handle, problem, alignments, bias, self.workspace_bytes));
        !matches!(plan, Err(ProductError::NoAlgorithm { .. }))
    }

    /// Queues `output = alpha · a · b (+ bias) + beta · output`, as described by `problem`.
    ///
    /// # Safety
    ///
    /// The addresses must be those of device memory that holds the matrices of `problem` until the stream has
    /// run the product. The stream must belong to this GPU.
    pub(super) unsafe fn multiply(
        &mut self,
        problem: &Problem,
        at: Addresses,
        bias: Option<CUdeviceptr>,
        [alpha, beta]: [f32; 2],
        stream: CUstream,
    ) -> Result<(), ProductError> {
        enter(self.context)?;
        let workspace = (self.workspace(stream)?, self.workspace_bytes);
        let call = Call { handle: self.handle, at, factors: [alpha, beta], workspace, stream };
        // SAFETY: guaranteed by the caller. The workspace belongs to this stream alone.
        let plan = unsafe { self.plan(problem, &call, bias)? };
        if let Some(bias) = bias {
            plan.set_bias(bias).map_err(ProductError::library("cublasLtMatmulDescSetAttribute", problem))?;
        }
        // SAFETY: the plan was made for this problem and these alignments; the caller guarantees the rest.
        unsafe { plan.queue(&plan.algorithm, &call) }
            .map_err(ProductError::library("cublasLtMatmul", problem))
    }

    fn workspace(&mut self, stream: CUstream) -> Result<CUdeviceptr, ProductError> {
        match self.workspaces.entry(stream) {
            Entry::Occupied(entry) => Ok(*entry.get()),
            Entry::Vacant(entry) => {
                let bytes = self.workspace_bytes;
                let what = || format!("a workspace of {} MiB", bytes >> 20);
                // SAFETY: only cuBLASLt reads the memory, and it expects no contents.
                let memory = unsafe { malloc_sync(bytes) };
                Ok(*entry.insert(memory.map_err(ProductError::driver("cuMemAlloc", what()))?))
            }
        }
    }

    /// Returns the plan of `problem`, which the first product of its kind creates.
    ///
    /// # Safety
    ///
    /// As for `multiply`; `call` must be one of its calls.
    unsafe fn plan(
        &mut self,
        problem: &Problem,
        call: &Call,
        bias: Option<CUdeviceptr>,
    ) -> Result<&Plan, ProductError> {
        let alignments = call.at.map(alignment_of);
        let key = (*problem, alignments);
        if self.plans.len() >= PLANS && !self.plans.contains_key(&key) {
            self.plans.clear();
        }
        match self.plans.entry(key) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let mut plan = Plan::new(self.handle, problem, alignments, bias, self.workspace_bytes)?;
                let key = Key { platform: self.platform.clone(), problem: *problem, alignments };
                if algorithms::is_wanted(&key) {
                    // SAFETY: guaranteed by the caller.
                    let found = unsafe { fastest_of(&plan, problem, call) };
                    found.into_iter().for_each(|found| algorithms::note(key.clone(), found));
                }
                if let Some(algorithm) = algorithms::algorithm_of(&key)
                    && plan.use_algorithm(self.handle, algorithm, self.workspace_bytes)
                {
                    algorithms::count_use();
                }
                Ok(entry.insert(plan))
            }
        }
    }
}

fn enter(context: CUcontext) -> Result<(), ProductError> {
    // SAFETY: the context is retained for ever.
    let entered = unsafe { ctx::set_current(context) };
    entered.map_err(ProductError::driver("cuCtxSetCurrent", "a matrix product"))
}
