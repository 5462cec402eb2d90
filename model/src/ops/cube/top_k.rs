//! The largest values of each row, by burn's reduction, which neither sorts nor waits for the device.

use burn_backend::get_or_init_device_settings;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::contiguous;
use crate::ops::top_k::TopKOp;

impl TopKOp for CubeBackend {
    /// Where there is a NaN, every index is still one of the row, and none is there twice.
    fn fused_top_k(scores: CubeTensor, k: usize) -> CubeTensor {
        let settings = get_or_init_device_settings::<CubeBackend>(&scores.device);
        let scores = contiguous(&scores);
        // The reduction begins with places that hold the lowest finite value and no index, which is no index of
        // the row. Of equal values it prefers those with an index: so none may be lower, and none NaN.
        let lowest = scores.dtype.finfo().expect("invariant: `contiguous` takes floats alone").min;
        let is_nan = Self::float_is_nan(scores.clone(), settings.bool_dtype);
        let scores = Self::float_mask_fill(scores, is_nan, lowest.into());
        let scores = contiguous(&Self::float_clamp_min(scores, lowest.into()));
        Self::float_argtopk(scores, 1, k, settings.int_dtype)
    }
}
