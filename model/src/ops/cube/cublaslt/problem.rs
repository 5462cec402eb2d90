//! A matrix product, described by everything that determines how cuBLASLt computes it.

use std::fmt;

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use serde::{Deserialize, Serialize};

/// Alignments of both operands and the output of a product, in bytes.
pub(super) type Alignments = [u32; 3];

/// Element types that cuBLASLt multiplies with sums in `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Float {
    F32,
    Bf16,
    F16,
}

impl Float {
    pub(super) fn bytes(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::Bf16 | Float::F16 => 2,
        }
    }

    fn of(dtype: DType) -> Option<Float> {
        match dtype {
            DType::F32 => Some(Float::F32),
            DType::BF16 => Some(Float::Bf16),
            DType::F16 => Some(Float::F16),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Operand {
    /// True if the columns are contiguous, as in a transposed view.
    pub(super) transposed: bool,
    /// Elements between adjacent rows (or columns, if transposed).
    pub(super) leading: usize,
}

impl Operand {
    /// Returns the layout, or `None` if neither rows nor columns are contiguous.
    fn of([rows, columns]: [usize; 2], [down, right]: [usize; 2]) -> Option<Operand> {
        // The stride of a dimension of length one has no meaning.
        let leading = |lines: usize, len: usize, stride: usize| {
            if lines == 1 { len } else { stride }
        };
        let by_rows = leading(rows, columns, down);
        if (columns == 1 || right == 1) && by_rows >= columns {
            return Some(Operand { transposed: false, leading: by_rows });
        }
        let by_columns = leading(columns, rows, right);
        ((rows == 1 || down == 1) && by_columns >= rows)
            .then_some(Operand { transposed: true, leading: by_columns })
    }
}

/// `[m, n] = [m, k] · [k, n]`, optionally plus `[n]` in each row, with a contiguous result. Excludes factors, which do
/// not affect the choice of the algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Problem {
    pub(super) m: usize,
    pub(super) k: usize,
    pub(super) n: usize,
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) input: Float,
    pub(super) output: Float,
    pub(super) bias: bool,
    pub(super) tf32: bool,
}

impl Problem {
    /// Describes `a · b (+ bias)` in `output`, or returns `None` if cuBLASLt does not support the product.
    ///
    /// Operands have one dtype, the output that dtype or `f32`, and a bias the dtype of the output (cuBLAS
    /// documentation, `cublasLtMatmul`).
    pub(super) fn new(
        a: &CubeTensor,
        b: &CubeTensor,
        bias: Option<&CubeTensor>,
        output: &CubeTensor,
        tf32: bool,
    ) -> Option<Problem> {
        let ([m, k], [_, n]) = (a.meta.shape().dims(), b.meta.shape().dims());
        let (input, written) = (Float::of(a.dtype)?, Float::of(output.dtype)?);
        let dtypes = b.dtype == a.dtype && (written == input || written == Float::F32);
        let fits =
            bias.is_none_or(|bias| bias.dtype == output.dtype && bias.is_contiguous() && aligned(bias, BIAS));
        if !dtypes || !fits || m * k * n == 0 {
            return None;
        }
        let tf32 = tf32 && input == Float::F32;
        let (a, b) = (operand(a)?, operand(b)?);
        Some(Problem { m, k, n, a, b, input, output: written, bias: bias.is_some(), tf32 })
    }

    /// Returns the alignments of all matrices of this problem: the sizes of their elements.
    pub(super) fn least_alignments(&self) -> Alignments {
        [self.input, self.input, self.output].map(|float| float.bytes() as u32)
    }

    /// Returns whether burn's kernels, which round `f32` to TF32, may compute this product.
    pub(super) fn allows_burn(&self) -> bool {
        self.input != Float::F32 || self.tf32
    }

    pub(super) fn output_bytes(&self) -> usize {
        self.m * self.n * self.output.bytes()
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problem { m, k, n, a, b, input, output, .. } = *self;
        let of = |operand: Operand| if operand.transposed { ", transposed" } else { "" };
        write!(f, "[{m}, {k}{}] · [{k}, {n}{}] of {input:?} in {output:?}", of(a), of(b))?;
        if self.bias { write!(f, ", and a bias") } else { Ok(()) }
    }
}

/// Largest alignment in bytes that cuBLASLt takes advantage of.
pub(super) const ALIGNMENT: u32 = 256;

/// Returns the alignment of an address, or of an offset: CubeCL's memory begins at multiples of 512 bytes.
pub(super) fn alignment_of(address: u64) -> u32 {
    1 << address.trailing_zeros().min(ALIGNMENT.trailing_zeros())
}

const BIAS: u64 = 16;

fn aligned(tensor: &CubeTensor, bytes: u64) -> bool {
    tensor.handle.offset_start.unwrap_or(0).is_multiple_of(bytes)
}

fn operand(matrix: &CubeTensor) -> Option<Operand> {
    let &[down, right] = &matrix.meta.strides()[..] else { return None };
    Operand::of(matrix.meta.shape().dims(), [down, right])
}
