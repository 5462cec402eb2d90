//! The largest values of each row, by burn's reduction, which neither sorts nor waits for the device.

use burn_backend::get_or_init_device_settings;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::contiguous;
use crate::ops::top_k::TopKOp;

impl TopKOp for CubeBackend {
    /// Returns valid and distinct indices of each row, even if the row contains NaN.
    fn fused_top_k(scores: CubeTensor, k: usize) -> CubeTensor {
        let settings = get_or_init_device_settings::<CubeBackend>(&scores.device);
        let scores = contiguous(&scores);
        // The reduction starts with invalid indices at the lowest finite value, and prefers valid indices on ties. So
        // no value may be lower, or NaN.
        let lowest = scores.dtype.finfo().expect("invariant: `contiguous` takes floats alone").min;
        let is_nan = Self::float_is_nan(scores.clone(), settings.bool_dtype);
        let scores = Self::float_mask_fill(scores, is_nan, lowest.into());
        let scores = contiguous(&Self::float_clamp_min(scores, lowest.into()));
        Self::float_argtopk(scores, 1, k, settings.int_dtype)
    }
}
