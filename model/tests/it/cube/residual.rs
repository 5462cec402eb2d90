//! The residual stream and its norms.

use burn::tensor::Tensor;

use super::{assert_on_wgpu, device, dtypes};
use crate::ops_residual::{
    around, around_reference, assert_equal, sizes, sizes_of_two_layers, two_layers, two_layers_apart,
    two_layers_reference,
};
use crate::ops_support::*;

#[test]
fn residual_on_wgpu() {
    for shape in [[33, 10], [17, 1_031]] {
        let op = |t: &[Tensor<1>]| around(t, shape);
        assert_on_wgpu(op, |t: &[Tensor<1>]| around_reference(t, shape), &sizes(shape));
    }
    for shape in [[33, 10], [5, 64], [17, 1_031]] {
        let (op, sizes) = (|t: &[Tensor<1>]| two_layers(t, shape), sizes_of_two_layers(shape));
        assert_on_wgpu(op, |t: &[Tensor<1>]| two_layers_reference(t, shape), &sizes);
        let (autodiff, all) = (device().autodiff(), [true; 4]);
        for (dtype, _) in dtypes() {
            let on = |op: &dyn Fn(&[Tensor<1>]) -> Tensor<1>| {
                run_tracked(&op, &inputs(&sizes), dtype, &autodiff, &all)
            };
            let apart = on(&|t| two_layers_apart(t, shape));
            assert_equal(&on(&op), &apart, "one kernel and two");
        }
    }
}
