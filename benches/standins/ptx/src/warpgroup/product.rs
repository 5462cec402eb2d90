//! Executes a warp's part of a `wgmma` product: 16 of its 64 rows.
//!
//! Registers of A and of D are those of a warp's product (`mma.sync.m16n8k16`), with one such D for every
//! eight columns: lane l has the rows l / 4 and l / 4 + 8 of the warp's 16, and d4j to d4j+3 are the columns
//! 8j + 2 (l % 4) and the next one, of the first and then of the second row. Sums are those of `mma.sync`
//! too. The whole product is computed when it is issued, while a GPU may take until it is waited for.

use crate::access::{Lane, Local, Memory};
use crate::error::Fault;
use crate::float;
use crate::lanes::{ALL, LANES, Registers};
use crate::matrix::{self, COLUMNS, ROWS};
use crate::program::Kind;
use crate::warpgroup::pipeline::Pipeline;
use crate::wgmma::alike::{Step, WARPS};
use crate::wgmma::descriptor::Descriptor;
use crate::wgmma::form::{ProductUse, WarpgroupOp, WarpgroupProduct};

/// Number of elements along the sum.
const K: usize = 16;

/// Number of elements of a chunk.
const EIGHT: usize = 8;

/// A warp's rows of A, and eight columns of B.
type Left = [[f32; K]; ROWS];
type Right = [[f32; COLUMNS]; K];

/// Facts about an instruction besides its operands.
pub struct Issue<'a> {
    /// Its index in the code.
    pub at: usize,
    /// The registers of its product.
    pub uses: Option<&'a ProductUse>,
    /// Number of the block's threads in its warpgroup.
    pub threads: u32,
}

/// Returns the number of threads in a warp's warpgroup, for a block of `threads` threads.
pub fn threads_of_group(warp: usize, threads: u32) -> u32 {
    let size = (WARPS * LANES) as u32;
    (threads - warp as u32 / WARPS as u32 * size).min(size)
}

/// Executes an instruction of the warpgroup. Registers of a product are those of D, those of A or its
/// descriptor, the descriptor of B, and whether D is added.
pub fn execute(
    memory: &mut Memory<'_>,
    local: &Local<'_>,
    r: &mut Registers,
    pipeline: &mut Pipeline,
    (op, issue): (WarpgroupOp, Issue<'_>),
    o: &[u16],
) -> Lane<()> {
    if issue.threads as usize != WARPS * LANES {
        return fail(Fault::Warpgroup { threads: issue.threads });
    }
    let (warp, line) = (local.warp, local.line);
    let mut step = Step { at: issue.at as u32, line, matrices: [0; 2], adds: false };
    let operands = match op {
        WarpgroupOp::Product(form) => {
            let (d, operands) = o.split_at(usize::from(form.columns / 2));
            let operands = Operands::of(r, &form, operands)?;
            (step.matrices, step.adds) = ([operands.a.unwrap_or_default(), operands.b], operands.adds);
            Some((form, d, operands))
        }
        _ => None,
    };
    if let Some(alike) = &mut memory.alike {
        alike.step(warp, step).or_else(fail)?;
    }
    match op {
        WarpgroupOp::Fence => pipeline.fence(),
        WarpgroupOp::Commit => pipeline.commit(),
        WarpgroupOp::Wait(left) => {
            let done = pipeline.wait(left).or_else(fail)?;
            if let Some(books) = &mut memory.books {
                books.waited_for_products(warp, done);
            }
        }
        WarpgroupOp::Product(_) => {}
    }
    let Some((form, d, operands)) = operands else { return Ok(()) };
    if let (Some(uses), true) = (issue.uses, memory.books.is_some()) {
        pipeline.product(uses, &form, operands.adds, line).or_else(fail)?;
    }
    multiply(memory, warp, r, &form, d, &operands)?;
    if let Some(books) = &mut memory.books {
        books.issued_product(warp, pipeline.group(), line);
    }
    Ok(())
}

fn fail<T>(fault: Fault) -> Lane<T> {
    Err((0, Box::new(fault)))
}

/// The operands of a product.
struct Operands<'a> {
    /// The descriptor of A, if it has one.
    a: Option<u64>,
    registers: &'a [u16],
    b: u64,
    adds: bool,
}

impl<'a> Operands<'a> {
    /// Reads the operands that must be the same in all lanes.
    fn of(r: &Registers, form: &WarpgroupProduct, operands: &'a [u16]) -> Lane<Operands<'a>> {
        let same = |register: u16, what| {
            let values = r.wide(register);
            match values.iter().position(|value| *value != values[0]) {
                Some(lane) => Err((lane, Box::new(Fault::Unlike { what, other: None }))),
                None => Ok(values[0]),
            }
        };
        let (registers, rest) = operands.split_at(operands.len() - 2);
        let a = match registers {
            [descriptor] if !form.a_in_registers => Some(same(*descriptor, "descriptor of A")?),
            _ => None,
        };
        let lanes = r.predicate(rest[1]);
        if lanes != 0 && lanes != ALL {
            let unlike = if lanes & 1 == 1 { !lanes } else { lanes }.trailing_zeros();
            return Err((unlike as usize, Box::new(Fault::Unlike { what: "predicate", other: None })));
        }
        Ok(Operands { a, registers, b: same(rest[0], "descriptor of B")?, adds: lanes == ALL })
    }
}

/// Multiplies 16 rows.
fn multiply(
    memory: &mut Memory<'_>,
    warp: usize,
    r: &mut Registers,
    form: &WarpgroupProduct,
    d: &[u16],
    operands: &Operands<'_>,
) -> Lane<()> {
    let left = match operands.a {
        Some(descriptor) => {
            let mut rows = [[0.0; K]; ROWS];
            let first = warp % WARPS * ROWS;
            Matrix::of(descriptor, form.transposed_a)?.read(
                memory,
                form.kind,
                first..first + ROWS,
                |row, k, value| rows[row - first][k] = value,
            )?;
            rows
        }
        None => matrix::left(r, form.kind, operands.registers),
    };
    let mut right = [[[0.0; COLUMNS]; K]; 256 / COLUMNS];
    Matrix::of(operands.b, form.transposed_b)?.read(
        memory,
        form.kind,
        0..usize::from(form.columns),
        |column, k, value| right[column / COLUMNS][k][column % COLUMNS] = value,
    )?;
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: this processor supports the instructions.
        unsafe { sums_with_vectors(r, d, operands.adds, &left, &right) };
        return Ok(());
    }
    sums(r, d, operands.adds, &left, &right);
    Ok(())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,avx2,fma")]
fn sums_with_vectors(r: &mut Registers, d: &[u16], adds: bool, left: &Left, right: &[Right]) {
    sums(r, d, adds, left, right);
}

#[inline(always)]
fn sums(r: &mut Registers, d: &[u16], adds: bool, left: &Left, right: &[Right]) {
    for (d, right) in d.chunks(4).zip(right) {
        matrix::add_product(r, K, [d, if adds { d } else { &[] }], left, right);
    }
}

/// A matrix in shared memory.
struct Matrix {
    descriptor: Descriptor,
    mn_major: bool,
}

impl Matrix {
    fn of(descriptor: u64, mn_major: bool) -> Lane<Matrix> {
        let descriptor = Descriptor::read(descriptor).map_err(|fault| (0, Box::new(fault)))?;
        Ok(Matrix { descriptor, mn_major })
    }

    /// Reads the elements of rows of A, or columns of B.
    fn read(
        &self,
        memory: &mut Memory<'_>,
        kind: Kind,
        lines: std::ops::Range<usize>,
        mut put: impl FnMut(usize, usize, f32),
    ) -> Lane<()> {
        let mut chunk = |line: usize, k: usize| {
            let address = self.descriptor.chunk(self.mn_major, line as u32, k as u32);
            let bits = memory.read_for_product(address).map_err(|fault| (0, Box::new(fault)))?;
            for n in 0..EIGHT {
                let half = (bits >> (16 * n)) as u32 & 0xffff;
                let value = if kind == Kind::F16 { float::from_f16(half) } else { float::from_bf16(half) };
                if self.mn_major { put(line + n, k, value) } else { put(line, k + n, value) }
            }
            Ok(())
        };
        for first in lines.step_by(if self.mn_major { EIGHT } else { 1 }) {
            (0..K).step_by(if self.mn_major { 1 } else { EIGHT }).try_for_each(|k| chunk(first, k))?;
        }
        Ok(())
    }
}
