//! What the CPU kernels share: views of tensors as slices, dtypes, and blocks of fixed size.
//!
//! Every kernel gives the same bits for any number of threads: work is cut into blocks whose size
//! depends on the shapes only, blocks write disjoint outputs, and sums across blocks are taken in
//! the order of the blocks. Work runs in the rayon pool of the caller.

mod attention;
mod cross_entropy;
mod dropout;
mod embedding;
mod gemm;
mod linear;
mod real;
mod residual;
mod rms_norm;
mod rotary;
mod swiglu;
mod transpose;
mod unwritten;

use std::borrow::Cow;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::Flex;
use burn::tensor::{DType, FloatDType};
use burn_backend::ops::FloatTensorOps;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use self::gemm::Matrix;
use self::real::Real;
use self::unwritten::Unwritten;

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

/// The values of a float tensor as the type a kernel computes in, in row-major order: borrowed
/// where the tensor is contiguous and of that type, otherwise a temporary copy.
pub struct Values<'a, T> {
    tensor: Cow<'a, FlexTensor>,
    real: PhantomData<T>,
}

impl<'a, T: Real> Values<'a, T> {
    /// Views or copies `tensor`.
    pub fn of(tensor: &'a FlexTensor) -> Self {
        let mut tensor = in_dtype::<T>(tensor);
        if !tensor.is_contiguous() {
            tensor = Cow::Owned(tensor.to_contiguous());
        }
        Values { tensor, real: PhantomData }
    }
}

impl<T: Real> Deref for Values<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let offsets = self.tensor.layout().contiguous_offsets();
        let (start, end) = offsets.expect("`of` made the tensor contiguous");
        &T::storage(&self.tensor).expect("`of` made the tensor of this dtype")[start..end]
    }
}

/// A float tensor of two dimensions as an operand of a matrix product, which takes any strides:
/// borrowed where it has the right dtype, even if it is transposed.
pub struct MatrixValues<'a, T> {
    tensor: Cow<'a, FlexTensor>,
    real: PhantomData<T>,
}

impl<'a, T: Real> MatrixValues<'a, T> {
    /// Views or copies `tensor`, which has two dimensions.
    pub fn of(tensor: &'a FlexTensor) -> Self {
        assert_eq!(tensor.layout().num_dims(), 2, "a matrix has two dimensions");
        let mut tensor = in_dtype::<T>(tensor);
        // A stride of 0 (broadcast) or below (flipped) is rare and not worth a path of its own.
        if tensor.layout().strides().iter().any(|&stride| stride <= 0) {
            tensor = Cow::Owned(tensor.to_contiguous());
        }
        MatrixValues { tensor, real: PhantomData }
    }

    /// The matrix.
    pub fn view(&self) -> Matrix<'_, T> {
        let layout = self.tensor.layout();
        let values = T::storage(&self.tensor).expect("`of` made the tensor of this dtype");
        let (shape, strides) = (layout.shape(), layout.strides());
        Matrix::new(
            &values[layout.start_offset().min(values.len())..],
            [shape[0], shape[1]],
            // `of` has made the strides positive.
            [strides[0].unsigned_abs(), strides[1].unsigned_abs()],
        )
    }
}

fn in_dtype<T: Real>(tensor: &FlexTensor) -> Cow<'_, FlexTensor> {
    if tensor.dtype() == T::DTYPE {
        return Cow::Borrowed(tensor);
    }
    let half = matches!(tensor.dtype(), DType::BF16 | DType::F16);
    assert!(
        half && T::DTYPE == DType::F32,
        "tensors of {:?} and {:?} in one operation",
        tensor.dtype(),
        T::DTYPE
    );
    Cow::Owned(Flex::float_cast(tensor.clone(), FloatDType::F32))
}

/// `tensor` for changing in place: of the type that a kernel computes in, and all of its buffer, in row-major
/// order. Nothing is copied where it is so already.
pub fn owned<T: Real>(tensor: FlexTensor) -> FlexTensor {
    let tensor = match in_dtype::<T>(&tensor) {
        Cow::Borrowed(_) => tensor,
        Cow::Owned(converted) => converted,
    };
    let len = tensor.layout().num_elements();
    let whole = T::storage(&tensor).is_some_and(|values| values.len() == len);
    if whole && tensor.is_contiguous() {
        return tensor;
    }
    T::tensor(Values::<T>::of(&tensor).to_vec(), tensor.layout().shape().clone())
}

/// A contiguous tensor of `values` in `dtype`.
pub fn tensor_of<T: Real>(
    values: Vec<T>,
    shape: impl Into<burn::tensor::Shape>,
    dtype: DType,
) -> FlexTensor {
    in_float(T::tensor(values, shape.into()), dtype)
}

/// `tensor` in the float type `dtype`.
pub fn in_float(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    if tensor.dtype() == dtype {
        return tensor;
    }
    Flex::float_cast(tensor, FloatDType::from(dtype))
}

/// The values of an int tensor in row-major order.
pub fn int_values(tensor: &FlexTensor) -> Vec<i64> {
    let tensor = tensor.to_contiguous();
    match tensor.dtype() {
        DType::I64 => tensor.storage::<i64>().to_vec(),
        DType::I32 => tensor.storage::<i32>().iter().map(|&v| i64::from(v)).collect(),
        DType::U32 => tensor.storage::<u32>().iter().map(|&v| i64::from(v)).collect(),
        DType::U16 => tensor.storage::<u16>().iter().map(|&v| i64::from(v)).collect(),
        DType::U8 => tensor.storage::<u8>().iter().map(|&v| i64::from(v)).collect(),
        other => panic!("indices of {other:?}, expected integers of 32 or 64 bits"),
    }
}

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
pub fn room<T: Real>(wanted: bool, len: usize) -> Option<Unwritten<T>> {
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
