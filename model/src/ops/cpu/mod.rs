//! What the CPU kernels share: dtypes, and blocks of fixed size.
//!
//! Every kernel gives the same bits for any number of threads: work is cut into blocks whose size
//! depends on the shapes only, blocks write disjoint outputs, and sums across blocks are taken in
//! the order of the blocks. Work runs in the rayon pool of the caller.

mod attention;
mod bf16;
mod cross_entropy;
mod dropout;
mod embedding;
mod gemm;
mod linear;
mod matrix;
mod real;
mod residual;
mod rms_norm;
mod rotary;
mod swiglu;
mod transpose;
mod unwritten;
mod values;

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use self::real::Real;
use self::unwritten::Unwritten;
use self::values::{MatrixValues, Values, in_float, int_values, owned, tensor_of};

/// The name of the processor's instructions for products of bf16.
pub fn bf16_instructions() -> Option<&'static str> {
    bf16::Unit::get().map(bf16::Unit::name)
}

/// Elements that one block of an elementwise kernel covers: the operands fit in a core's L2 cache
/// and the work is worth handing to another thread.
pub const BLOCK: usize = 16 * 1024;

/// Runs `$body` with the type alias `$real` bound to the type that kernels compute `$dtype` in:
/// half precision is computed in `f32`.
macro_rules! with_real {
    ($dtype:expr, $real:ident => $body:expr) => {
        match $dtype {
            burn::tensor::DType::F64 => {
                type $real = f64;
                $body
            }
            burn::tensor::DType::F32 | burn::tensor::DType::BF16 | burn::tensor::DType::F16 => {
                type $real = f32;
                $body
            }
            other => panic!("no kernel for tensors of {other:?}"),
        }
    };
}
use with_real;

/// Runs `$body` with the type alias `$scalar` bound to the type of the values of tensors of `$dtype`.
macro_rules! with_scalar {
    ($dtype:expr, $scalar:ident => $body:expr) => {
        match $dtype {
            burn::tensor::DType::F64 => {
                type $scalar = f64;
                $body
            }
            burn::tensor::DType::F32 => {
                type $scalar = f32;
                $body
            }
            burn::tensor::DType::BF16 => {
                type $scalar = burn::tensor::bf16;
                $body
            }
            burn::tensor::DType::F16 => {
                type $scalar = burn::tensor::f16;
                $body
            }
            other => panic!("no kernel for tensors of {other:?}"),
        }
    };
}
use with_scalar;

/// Rows of `width` elements that make up a block.
pub fn rows_per_block(width: usize) -> usize {
    (BLOCK / width.max(1)).max(1)
}

/// Runs `f` compiled for the vector instructions of this machine. `f` is marked
/// `#[inline(always)]`, as is everything in its inner loops: what is not inlined keeps the baseline
/// instructions.
#[inline(always)]
pub fn simd<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Runs `f(start, block)` on every block of `size` elements of `data`, where `start` is the index
/// of the block's first element. `f` is compiled as in [`simd`].
pub fn for_each_block<T: Send>(
    data: &mut [T],
    size: usize,
    f: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    let run = |start: usize, block: &mut [T]| {
        simd(
            #[inline(always)]
            || f(start, block),
        )
    };
    if data.len() <= size {
        run(0, data);
    } else {
        data.par_chunks_mut(size).enumerate().for_each(|(i, block)| run(i * size, block));
    }
}

/// Runs `piece` with each index below `count`, at the same time where there are threads for it.
///
/// For pieces of about one size. The calling thread stays awake while it waits for the last ones: to be woken
/// would take longer than they do.
pub fn in_pieces(count: usize, piece: impl Fn(usize) + Sync) {
    struct Done<'a>(&'a AtomicUsize);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Release);
        }
    }
    let left = AtomicUsize::new(count);
    rayon::scope(|scope| {
        for index in 1..count {
            let (left, piece) = (&left, &piece);
            scope.spawn(move |_| {
                // Also if the piece panics, which the scope tells the caller.
                let _done = Done(left);
                piece(index);
            });
        }
        if count > 0 {
            let _done = Done(&left);
            piece(0);
        }
        while left.load(Ordering::Acquire) > 0 {
            // A piece that no other thread has taken, or nothing.
            if rayon::yield_now() != Some(rayon::Yield::Executed) {
                (0..16).for_each(|_| std::hint::spin_loop());
                std::thread::yield_now();
            }
        }
    });
}

/// Zeros for a gradient of `len` elements, or none where nobody wants it.
pub fn zeros<T: Real>(wanted: bool, len: usize) -> Option<Vec<T>> {
    wanted.then(|| {
        let mut values = Unwritten::new(len);
        // In parallel, where the allocator would do it on this thread.
        let fill = |_, block: &mut [MaybeUninit<T>]| block.fill(MaybeUninit::new(T::ZERO));
        for_each_block(values.slots(), 4 * BLOCK, fill);
        // SAFETY: the blocks are all elements.
        unsafe { values.written() }
    })
}

/// Room for a gradient of `len` elements, or none where nobody wants it.
pub fn room<T: Copy>(wanted: bool, len: usize) -> Option<Unwritten<T>> {
    wanted.then(|| Unwritten::new(len))
}

/// `count` consecutive blocks of `size` elements of `data`, all `None` where `data` is.
pub fn blocks<T>(data: Option<&mut [T]>, size: usize, count: usize) -> Vec<Option<&mut [T]>> {
    match data {
        None => std::iter::repeat_with(|| None).take(count).collect(),
        Some(data) => {
            let mut chunks = data.chunks_mut(size.max(1));
            (0..count).map(|_| Some(chunks.next().unwrap_or_default())).collect()
        }
    }
}
