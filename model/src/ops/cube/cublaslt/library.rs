//! cuBLASLt on one GPU: its handle, its workspaces, and the algorithm for each product.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;

use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys::{
    cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cublasLtMatrixLayout_t,
    cudaDataType as DataType, is_culib_present,
};
use cudarc::driver::result::{ctx, device, malloc_sync, primary_ctx};
use cudarc::driver::sys::{CUcontext, CUdevice_attribute, CUdeviceptr, CUstream};

use super::error::ProductError;
use super::problem::{Float, Operand, Problem};

/// Bytes of the workspace of a stream: from compute capability 9.0 on the size that NVIDIA recommends, and
/// before that twice the recommended size. (cuBLAS documentation, `cublasSetWorkspace`.)
const WORKSPACE: [usize; 2] = [32 << 20, 8 << 20];

/// The largest alignment of a matrix that cuBLASLt makes use of, in bytes.
const ALIGNMENT: u64 = 256;

/// The largest number of plans in memory. A run has a few dozen; generation has some for every length of a
/// prompt.
const PLANS: usize = 4096;

/// Whether the library can be loaded. Logs one warning if it cannot.
pub(super) fn present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    *PRESENT.get_or_init(|| {
        // SAFETY: the call loads a library by its names, and NVIDIA's library does nothing when it is loaded.
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

/// Device addresses of both operands and the output of a product.
type Addresses = [CUdeviceptr; 3];

/// The alignments of these addresses, in bytes.
type Alignments = [u32; 3];

/// cuBLASLt on one GPU, for the one thread that CubeCL runs this GPU on.
///
/// Lives as long as the process: neither CubeCL's streams nor their thread end before.
pub(super) struct CublasLt {
    handle: cublasLtHandle_t,
    context: CUcontext,
    workspace_bytes: usize,
    /// By stream: products of two streams may run at the same time.
    workspaces: HashMap<CUstream, CUdeviceptr>,
    plans: HashMap<(Problem, Alignments), Plan>,
}

impl CublasLt {
    /// Opens cuBLASLt on the GPU with this number, which the driver has. The library must be [`present`].
    pub(super) fn open(index: u16) -> Result<CublasLt, ProductError> {
        let what = || format!("GPU {index}");
        let device = device::get(i32::from(index)).map_err(ProductError::driver("cuDeviceGet", what()))?;
        // SAFETY: the device is one the driver has just named. The context is never given back.
        let context = unsafe { primary_ctx::retain(device) };
        let context = context.map_err(ProductError::driver("cuDevicePrimaryCtxRetain", what()))?;
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        // SAFETY: as above.
        let major = unsafe { device::get_attribute(device, attribute) };
        let major = major.map_err(ProductError::driver("cuDeviceGetAttribute", what()))?;
        enter(context)?;
        let handle = lt::create_handle().map_err(ProductError::library("cublasLtCreate", what()))?;
        Ok(CublasLt {
            handle,
            context,
            workspace_bytes: WORKSPACE[usize::from(major < 9)],
            workspaces: HashMap::new(),
            plans: HashMap::new(),
        })
    }

    /// Queues `output = alpha · a · b (+ bias) + beta · output`, as `problem` has it.
    ///
    /// # Safety
    ///
    /// The addresses are those of device memory that holds the matrices of `problem` until the stream has run
    /// the product. The stream belongs to this GPU.
    pub(super) unsafe fn multiply(
        &mut self,
        problem: &Problem,
        at: Addresses,
        bias: Option<CUdeviceptr>,
        [alpha, beta]: [f32; 2],
        stream: CUstream,
    ) -> Result<(), ProductError> {
        enter(self.context)?;
        let workspace = self.workspace(stream)?;
        let (handle, bytes) = (self.handle, self.workspace_bytes);
        let plan = self.plan(problem, at, bias)?;
        let refused = |call| ProductError::library(call, problem);
        if let Some(bias) = bias {
            plan.description.set_bias(bias).map_err(refused("cublasLtMatmulDescSetAttribute"))?;
        }
        let [first, second, output] = &plan.layouts;
        let [a, b, done] = at.map(|address| address as *mut c_void);
        // SAFETY: the plan was made for this problem and addresses so aligned; the caller promises memory and
        // stream. The product is added to the output itself, which is read only if `beta` is not 0. The
        // workspace belongs to this stream alone.
        let queued = unsafe {
            lt::matmul(
                handle,
                plan.description.0,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                b,
                first.0,
                a,
                second.0,
                done,
                output.0,
                done,
                output.0,
                &plan.algorithm,
                workspace as *mut c_void,
                bytes,
                stream.cast(),
            )
        };
        queued.map_err(refused("cublasLtMatmul"))
    }

    /// The workspace of `stream`, which the first product on it allocates.
    fn workspace(&mut self, stream: CUstream) -> Result<CUdeviceptr, ProductError> {
        match self.workspaces.entry(stream) {
            Entry::Occupied(entry) => Ok(*entry.get()),
            Entry::Vacant(entry) => {
                let bytes = self.workspace_bytes;
                let what = || format!("{} MiB to multiply matrices in", bytes >> 20);
                // SAFETY: only cuBLASLt reads the memory, and it expects no contents.
                let memory = unsafe { malloc_sync(bytes) };
                Ok(*entry.insert(memory.map_err(ProductError::driver("cuMemAlloc", what()))?))
            }
        }
    }

    /// The plan of `problem`. For a new problem, cuBLASLt is asked.
    fn plan(
        &mut self,
        problem: &Problem,
        at: Addresses,
        bias: Option<CUdeviceptr>,
    ) -> Result<&Plan, ProductError> {
        let alignments = at.map(|address| ALIGNMENT.min(1 << address.trailing_zeros().min(31)) as u32);
        let key = (*problem, alignments);
        if self.plans.len() >= PLANS && !self.plans.contains_key(&key) {
            self.plans.clear();
        }
        match self.plans.entry(key) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                Ok(entry.insert(Plan::new(self.handle, problem, alignments, bias, self.workspace_bytes)?))
            }
        }
    }
}

/// Makes a GPU's context the current one of this thread.
fn enter(context: CUcontext) -> Result<(), ProductError> {
    // SAFETY: the context is retained for good.
    let entered = unsafe { ctx::set_current(context) };
    entered.map_err(ProductError::driver("cuCtxSetCurrent", "a matrix product"))
}

/// The way cuBLASLt computes a problem.
///
/// cuBLASLt stores matrices by columns, and we store them by rows. A matrix of ours is therefore the
/// transpose of one of cuBLASLt's, and cuBLASLt computes `outputᵀ = bᵀ · aᵀ`: our second operand is its
/// first.
struct Plan {
    description: Description,
    /// The layouts of `bᵀ`, `aᵀ` and `outputᵀ`.
    layouts: [Layout; 3],
    algorithm: cublasLtMatmulAlgo_t,
}

impl Plan {
    /// Asks cuBLASLt for the algorithm it takes to be the fastest. The same problem gets the same one in
    /// every run on GPUs of one kind.
    fn new(
        handle: cublasLtHandle_t,
        problem: &Problem,
        [a, b, output]: Alignments,
        bias: Option<CUdeviceptr>,
        workspace_bytes: usize,
    ) -> Result<Plan, ProductError> {
        let in_call = |call| ProductError::library(call, problem);
        let Problem { m, k, n, .. } = *problem;
        let written = Operand { transposed: false, leading: n };
        let layouts = [
            Layout::new(problem.input, [k, n], problem.b),
            Layout::new(problem.input, [m, k], problem.a),
            Layout::new(problem.output, [m, n], written),
        ];
        let [first, second, third] = layouts;
        let made = |layout: Result<_, _>| layout.map_err(in_call("cublasLtMatrixLayoutCreate"));
        let layouts = [made(first)?, made(second)?, made(third)?];
        let description =
            Description::new(problem, bias).map_err(in_call("cublasLtMatmulDescSetAttribute"))?;
        let preference = lt::create_matmul_pref().map_err(in_call("cublasLtMatmulPreferenceCreate"))?;
        let preference = Descriptor(preference, lt::destroy_matmul_pref);
        use PreferenceAttribute::*;
        preference
            .set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(workspace_bytes as u64))
            .map_err(in_call("cublasLtMatmulPreferenceSetAttribute"))?;
        for (attribute, alignment) in [
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, output),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, output),
        ] {
            preference.set(attribute, &alignment).map_err(in_call("cublasLtMatmulPreferenceSetAttribute"))?;
        }
        let [first, second, third] = &layouts;
        // SAFETY: the handle and all descriptors are alive.
        let chosen = unsafe {
            lt::get_matmul_algo_heuristic(
                handle,
                description.0,
                first.0,
                second.0,
                third.0,
                third.0,
                preference.0,
            )
        };
        let algorithm = chosen.map_err(in_call("cublasLtMatmulAlgoGetHeuristic"))?.algo;
        Ok(Plan { description, layouts, algorithm })
    }
}

fn data_type(float: Float) -> DataType {
    match float {
        Float::F32 => DataType::CUDA_R_32F,
        Float::Bf16 => DataType::CUDA_R_16BF,
        Float::F16 => DataType::CUDA_R_16F,
    }
}

/// A descriptor of cuBLASLt's, with the function that destroys it.
struct Descriptor<T: Copy>(T, unsafe fn(T) -> Result<(), CublasError>);

impl<T: Copy> Drop for Descriptor<T> {
    fn drop(&mut self) {
        // SAFETY: the function belongs to the call that made the descriptor, and this is its last use:
        // cuBLASLt reads it only while it queues. An error cannot be handled here.
        let _ = unsafe { self.1(self.0) };
    }
}

/// The operation on the matrices.
type Description = Descriptor<cublasLtMatmulDesc_t>;

impl Description {
    fn new(problem: &Problem, bias: Option<CUdeviceptr>) -> Result<Self, CublasError> {
        let compute = match problem.tf32 {
            true => Compute::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => Compute::CUBLAS_COMPUTE_32F,
        };
        let made = lt::create_matmul_desc(compute, DataType::CUDA_R_32F)?;
        let made = Descriptor(made, lt::destroy_matmul_desc);
        // CUBLAS_OP_N and CUBLAS_OP_T.
        let operation = |operand: Operand| i32::from(operand.transposed);
        made.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(problem.b))?;
        made.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(problem.a))?;
        if let Some(bias) = bias {
            let epilogue = Epilogue::CUBLASLT_EPILOGUE_BIAS;
            made.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            made.set_bias(bias)?;
        }
        Ok(made)
    }

    /// Sets the address of the bias, `[n]`, which is added to each of our rows, that is, to each column of
    /// cuBLASLt's.
    fn set_bias(&self, bias: CUdeviceptr) -> Result<(), CublasError> {
        self.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)
    }

    fn set<T: Copy>(&self, attribute: DescAttribute, value: &T) -> Result<(), CublasError> {
        // SAFETY: the description is alive, and cuBLASLt copies as many bytes as the value has.
        unsafe {
            lt::set_matmul_desc_attribute(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>())
        }
    }
}

/// The memory layout of a matrix.
type Layout = Descriptor<cublasLtMatrixLayout_t>;

impl Layout {
    /// The layout of a matrix with this number of our rows and columns.
    fn new(float: Float, [rows, columns]: [usize; 2], operand: Operand) -> Result<Self, CublasError> {
        let [down, across] = match operand.transposed {
            true => [rows, columns],
            false => [columns, rows],
        };
        let leading = operand.leading as i64;
        let made = lt::create_matrix_layout(data_type(float), down as u64, across as u64, leading)?;
        Ok(Descriptor(made, lt::destroy_matrix_layout))
    }
}

/// The workspace and the alignments that an algorithm may use.
type Preference = Descriptor<cublasLtMatmulPreference_t>;

impl Preference {
    fn set<T: Copy>(&self, attribute: PreferenceAttribute, value: &T) -> Result<(), CublasError> {
        // SAFETY: the preference is alive, and cuBLASLt copies as many bytes as the value has.
        unsafe {
            lt::set_matmul_pref_attribute(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>())
        }
    }
}
