//! The plan by which cuBLASLt computes one kind of product: descriptors and algorithm.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys::{
    cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue, cublasLtHandle_t,
    cublasLtMatmulAlgo_t as Algorithm, cublasLtMatmulAlgoCheck, cublasLtMatmulAlgoGetHeuristic,
    cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute,
    cublasLtMatrixLayout_t, cublasLtReductionScheme_t as Reduction, cublasStatus_t, cudaDataType as DataType,
};
use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::error::ProductError;
use super::problem::{Alignments, Float, Operand, Problem};

/// Maximum bytes that a GPU thread reads at once, and so the alignment that fast algorithms need.
const VECTOR: u32 = 16;

/// Addresses of both operands and the output of a product.
pub(super) type Addresses = [CUdeviceptr; 3];

/// The descriptors and the algorithm of a problem.
///
/// cuBLASLt stores matrices by columns, so it computes `outputᵀ = bᵀ · aᵀ`: Kiln's second operand is its first.
pub(super) struct Plan {
    description: Description,
    /// `bᵀ`, `aᵀ` and `outputᵀ`.
    layouts: [Layout; 3],
    preference: Preference,
    pub(super) algorithm: Algorithm,
}

#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) handle: cublasLtHandle_t,
    pub(super) at: Addresses,
    /// Factors for the product and for the previous values of the output.
    pub(super) factors: [f32; 2],
    /// Address and size in bytes.
    pub(super) workspace: (CUdeviceptr, usize),
    pub(super) stream: CUstream,
}

impl Plan {
    /// Asks cuBLASLt for the algorithm that it expects to be the fastest, the same in every run on GPUs of one kind.
    ///
    /// Algorithms that split the inner dimension must sum the parts in `f32`. If there is no algorithm, tries
    /// algorithms without a workspace, and then with smaller alignments.
    ///
    /// # Errors
    ///
    /// [`ProductError::NoAlgorithm`] if no attempt finds an algorithm, and other variants if a call fails.
    pub(super) fn new(
        handle: cublasLtHandle_t,
        problem: &Problem,
        alignments: Alignments,
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
        let algorithm = Algorithm { data: [0; 8] };
        let mut plan = Plan { description, layouts, preference, algorithm };
        for (alignments, workspace_bytes) in [
            (alignments, workspace_bytes),
            (alignments, 0),
            (alignments.map(|bytes| bytes.min(VECTOR)), 0),
            (problem.least_alignments(), 0),
        ] {
            plan.preference
                .restrict(alignments, workspace_bytes)
                .map_err(in_call("cublasLtMatmulPreferenceSetAttribute"))?;
            let named = plan.named::<1>(handle).map_err(in_call("cublasLtMatmulAlgoGetHeuristic"))?;
            if let Some(algorithm) = named.first() {
                plan.algorithm = *algorithm;
                return Ok(plan);
            }
        }
        Err(ProductError::no_algorithm(problem))
    }

    /// Returns cuBLASLt's first `MOST` candidate algorithms, in the order of expected speed.
    pub(super) fn named<const MOST: usize>(
        &self,
        handle: cublasLtHandle_t,
    ) -> Result<Vec<Algorithm>, CublasError> {
        let mut results = [NO_RESULT; MOST];
        let mut count = 0;
        let (of, [a, b, c, d]) = self.descriptors();
        let (preference, room) = (self.preference.0, results.as_mut_ptr());
        // SAFETY: the handle and all descriptors are alive, and there is room for `MOST` results.
        let status = unsafe {
            cublasLtMatmulAlgoGetHeuristic(handle, of, a, b, c, d, preference, MOST as i32, room, &mut count)
        };
        if status != cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            status.result()?;
        }
        let found = results.iter().take(usize::try_from(count).unwrap_or(0));
        let usable = found.filter(|result| result.state.result().is_ok());
        Ok(usable.map(|result| result.algo).collect())
    }

    /// Uses `algorithm` from now on, if cuBLASLt accepts it for this problem and a workspace of `room` bytes.
    pub(super) fn use_algorithm(
        &mut self,
        handle: cublasLtHandle_t,
        algorithm: [u64; 8],
        room: usize,
    ) -> bool {
        let algorithm = Algorithm { data: algorithm };
        // If the library does not set the state, only the return value counts.
        let mut result =
            cublasLtMatmulHeuristicResult_t { state: cublasStatus_t::CUBLAS_STATUS_SUCCESS, ..NO_RESULT };
        let (of, [a, b, c, d]) = self.descriptors();
        // SAFETY: the handle and all descriptors are alive; cuBLASLt checks the algorithm's bytes.
        let status = unsafe { cublasLtMatmulAlgoCheck(handle, of, a, b, c, d, &algorithm, &mut result) };
        let is_taken =
            status.result().and_then(|()| result.state.result()).is_ok() && result.workspaceSize <= room;
        if is_taken {
            self.algorithm = algorithm;
        }
        is_taken
    }

    /// Returns the operation, and the layouts of operands, addend and output, which are valid as long as the plan.
    fn descriptors(&self) -> (cublasLtMatmulDesc_t, [cublasLtMatrixLayout_t; 4]) {
        let [first, second, output] = &self.layouts;
        // The addend is the output itself.
        (self.description.0, [first.0, second.0, output.0, output.0])
    }

    pub(super) fn set_bias(&self, bias: CUdeviceptr) -> Result<(), CublasError> {
        self.description.set_bias(bias)
    }

    /// Queues one product.
    ///
    /// # Safety
    ///
    /// The plan must have been made for matrices like those of `call`, which must be device memory until the
    /// stream has run the product. No other stream may use the workspace.
    pub(super) unsafe fn queue(&self, algorithm: &Algorithm, call: &Call) -> Result<(), CublasError> {
        let (of, [first, second, added, output]) = self.descriptors();
        let [a, b, done] = call.at.map(|address| address as *mut c_void);
        let [alpha, beta] = &call.factors;
        // SAFETY: guaranteed by the caller. The output is read only if `beta` is not 0.
        unsafe {
            lt::matmul(
                call.handle,
                of,
                ptr::from_ref(alpha).cast(),
                ptr::from_ref(beta).cast(),
                b,
                first,
                a,
                second,
                done,
                added,
                done,
                output,
                algorithm,
                call.workspace.0 as *mut c_void,
                call.workspace.1,
                call.stream.cast(),
            )
        }
    }
}

const NO_RESULT: cublasLtMatmulHeuristicResult_t = cublasLtMatmulHeuristicResult_t {
    algo: Algorithm { data: [0; 8] },
    workspaceSize: 0,
    state: cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
    wavesCount: 0.0,
    reserved: [0; 4],
};

fn data_type(float: Float) -> DataType {
    match float {
        Float::F32 => DataType::CUDA_R_32F,
        Float::Bf16 => DataType::CUDA_R_16BF,
        Float::F16 => DataType::CUDA_R_16F,
    }
}

struct Descriptor<T: Copy>(T, unsafe fn(T) -> Result<(), CublasError>);

type Setter<T, A> = unsafe fn(T, A, *const c_void, usize) -> Result<(), CublasError>;

impl<T: Copy> Descriptor<T> {
    /// Sets an attribute with `setter`, which must belong to this kind of descriptor.
    fn set_by<A, V: Copy>(&self, setter: Setter<T, A>, attribute: A, value: &V) -> Result<(), CublasError> {
        // SAFETY: the descriptor is alive, and cuBLASLt copies as many bytes as the value has.
        unsafe { setter(self.0, attribute, ptr::from_ref(value).cast(), size_of::<V>()) }
    }
}

impl<T: Copy> Drop for Descriptor<T> {
    fn drop(&mut self) {
        // SAFETY: the function matches the call that created the descriptor, and this is its last use:
        // cuBLASLt reads it only while it queues. An error cannot be handled here.
        let _ = unsafe { self.1(self.0) };
    }
}

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

    /// Sets the address of the bias, `[n]`, which is added to each of our rows, that is, to each of cuBLASLt's columns.
    fn set_bias(&self, bias: CUdeviceptr) -> Result<(), CublasError> {
        self.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)
    }

    fn set<V: Copy>(&self, attribute: DescAttribute, value: &V) -> Result<(), CublasError> {
        self.set_by(lt::set_matmul_desc_attribute, attribute, value)
    }
}

type Layout = Descriptor<cublasLtMatrixLayout_t>;

impl Layout {
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

type Preference = Descriptor<cublasLtMatmulPreference_t>;

impl Preference {
    /// Restricts algorithms to this workspace, these alignments, and sums in `f32` of a split inner dimension.
    fn restrict(&self, [a, b, output]: Alignments, workspace_bytes: usize) -> Result<(), CublasError> {
        use PreferenceAttribute::*;
        let sums = Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        self.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(workspace_bytes as u64))?;
        self.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums)?;
        // cuBLASLt's first operand is our second.
        self.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &b)?;
        self.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a)?;
        self.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &output)?;
        self.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &output)
    }

    fn set<V: Copy>(&self, attribute: PreferenceAttribute, value: &V) -> Result<(), CublasError> {
        self.set_by(lt::set_matmul_pref_attribute, attribute, value)
    }
}
