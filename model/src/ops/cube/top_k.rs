//! The largest values of each row, by burn's reduction, which neither sorts nor waits for the device.

use burn_backend::get_or_init_device_settings;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::contiguous;
use crate::ops::top_k::TopKOp;

impl TopKOp for CubeBackend {
    fn fused_top_k(scores: CubeTensor, k: usize) -> CubeTensor {
        let settings = get_or_init_device_settings::<CubeBackend>(&scores.device);
        Self::float_argtopk(contiguous(&scores), 1, k, settings.int_dtype)
    }
}
