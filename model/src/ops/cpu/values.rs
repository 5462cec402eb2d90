//! Tensors as slices and matrices, and conversions between float types.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Deref;

use burn::backend::Flex;
use burn::tensor::{DType, FloatDType, Shape, TensorData, bf16};
use burn_backend::ops::FloatTensorOps;
use burn_flex::FlexTensor;

use super::matrix::Matrix;
use super::parallel::BLOCK;
use super::scalar::Scalar;
use super::uninit::written;

/// Values of a float tensor in row-major order in `T`, borrowed if possible, otherwise a temporary copy.
pub struct Values<'a, T> {
    tensor: Cow<'a, FlexTensor>,
    stored: PhantomData<T>,
}

impl<'a, T: Scalar> Values<'a, T> {
    pub fn of(tensor: &'a FlexTensor) -> Self {
        let mut tensor = in_dtype::<T>(tensor);
        if !tensor.is_contiguous() {
            tensor = Cow::Owned(tensor.to_contiguous());
        }
        Values { tensor, stored: PhantomData }
    }
}

impl<T: Scalar> Deref for Values<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let offsets = self.tensor.layout().contiguous_offsets();
        let (start, end) = offsets.expect("`of` made the tensor contiguous");
        &self.tensor.storage::<T>()[start..end]
    }
}

/// A matrix in `T` with any strides, borrowed if the tensor has that dtype.
pub struct MatrixValues<'a, T> {
    tensor: Cow<'a, FlexTensor>,
    stored: PhantomData<T>,
}

impl<'a, T: Scalar> MatrixValues<'a, T> {
    pub fn of(tensor: &'a FlexTensor) -> Self {
        assert_eq!(tensor.layout().num_dims(), 2, "a matrix has two dimensions");
        let mut tensor = in_dtype::<T>(tensor);
        // A stride of 0 (broadcast) or below (flipped) is rare, so such a tensor is copied.
        if tensor.layout().strides().iter().any(|&stride| stride <= 0) {
            tensor = Cow::Owned(tensor.to_contiguous());
        }
        MatrixValues { tensor, stored: PhantomData }
    }

    pub fn view(&self) -> Matrix<'_, T> {
        let layout = self.tensor.layout();
        let values = self.tensor.storage::<T>();
        let (shape, strides) = (layout.shape(), layout.strides());
        Matrix::new(
            &values[layout.start_offset().min(values.len())..],
            [shape[0], shape[1]],
            // `of` has made the strides positive.
            [strides[0].unsigned_abs(), strides[1].unsigned_abs()],
        )
    }
}

fn in_dtype<T: Scalar>(tensor: &FlexTensor) -> Cow<'_, FlexTensor> {
    if tensor.dtype() == T::dtype() {
        return Cow::Borrowed(tensor);
    }
    let half = matches!(tensor.dtype(), DType::BF16 | DType::F16);
    assert!(
        half && T::dtype() == DType::F32,
        "tensors of {:?} and {:?} in one operation",
        tensor.dtype(),
        T::dtype()
    );
    Cow::Owned(in_float(tensor.clone(), DType::F32))
}

/// Makes `tensor` changeable in place: of type `T`, contiguous, and filling its buffer. Copies only if necessary.
pub fn owned<T: Scalar>(tensor: FlexTensor) -> FlexTensor {
    let tensor = match in_dtype::<T>(&tensor) {
        Cow::Borrowed(_) => tensor,
        Cow::Owned(converted) => converted,
    };
    let len = tensor.layout().num_elements();
    if tensor.storage::<T>().len() == len && tensor.is_contiguous() {
        return tensor;
    }
    new_tensor(Values::<T>::of(&tensor).to_vec(), tensor.layout().shape().clone())
}

pub fn new_tensor<T: Scalar>(values: Vec<T>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}

pub fn tensor_of<T: Scalar>(values: Vec<T>, shape: impl Into<Shape>, dtype: DType) -> FlexTensor {
    in_float(new_tensor(values, shape), dtype)
}

pub fn in_float(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    match (tensor.dtype(), dtype) {
        (from, to) if from == to => tensor,
        (DType::BF16, DType::F32) => converted::<bf16, f32>(&tensor, bf16::real),
        (DType::F32, DType::BF16) => converted::<f32, bf16>(&tensor, bf16::nearest),
        _ => Flex::float_cast(tensor, FloatDType::from(dtype)),
    }
}

fn converted<S: Scalar, T: Scalar>(
    tensor: &FlexTensor,
    convert: impl Fn(S) -> T + Sync + Send,
) -> FlexTensor {
    new_tensor(convert_values(&Values::<S>::of(tensor), convert), tensor.layout().shape().clone())
}

/// Applies `convert` to every value, in parallel.
pub fn convert_values<S: Copy + Sync, T: Copy + Send>(
    values: &[S],
    convert: impl Fn(S) -> T + Sync + Send,
) -> Vec<T> {
    // SAFETY: there is a value for every element of a block.
    unsafe {
        written(
            values.len(),
            4 * BLOCK,
            #[inline(always)]
            |start, block| {
                for (result, &value) in block.iter_mut().zip(&values[start..]) {
                    result.write(convert(value));
                }
            },
        )
    }
}

/// Returns the values of an int tensor in row-major order.
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
