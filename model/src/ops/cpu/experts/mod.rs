//! The kernels of a mixture of experts: rows grouped by expert, and cut into blocks that one thread computes.

mod backward;
mod by_expert;
mod forward;
mod groups;

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::bf16::bf16_gemm_for;
use super::dispatch::with_products;
use super::scalar::Scalar;
use super::values::{Values, int_values, tensor_of};
use crate::ops::experts::{ExpertsKernels, ExpertsShape, Hidden, Operands};
use backward::{Backward, Gradients};
use forward::Forward;
use groups::Groups;

impl ExpertsKernels for Flex {
    fn experts_forward(
        [x, weights, gate, up, down]: Operands<&FlexTensor>,
        experts: &FlexTensor,
        shape: ExpertsShape,
    ) -> (FlexTensor, Hidden<Flex>) {
        let groups = Groups::new(&int_values(experts), shape);
        with_products!(bf16_gemm_for([x, gate, up, down]), x.dtype(), products, S => {
            let (x_values, weights) = (Values::<S>::of(x), Values::<<S as Scalar>::Real>::of(weights));
            let projections = [gate, up, down].map(Values::<S>::of);
            let forward = Forward {
                shape,
                groups: &groups,
                x: &x_values,
                weights: &weights,
                projections: projections.each_ref().map(|values| &values[..]),
            };
            let (y, hidden) = forward.run(products);
            let hidden = hidden.map(|values| tensor_of(values, [shape.rows(), shape.d_ff], x.dtype()));
            (tensor_of(y, [shape.tokens, shape.d_model], x.dtype()), hidden)
        })
    }

    fn experts_backward(
        [x, weights, gate, up, down]: Operands<&FlexTensor>,
        experts: &FlexTensor,
        hidden: &Hidden<Flex>,
        dy: &FlexTensor,
        shape: ExpertsShape,
        wanted: Operands<bool>,
    ) -> Operands<Option<FlexTensor>> {
        let groups = Groups::new(&int_values(experts), shape);
        let dtypes = [x, weights, gate, up, down].map(FlexTensor::dtype);
        with_products!(bf16_gemm_for([x, gate, up, down, dy]), x.dtype(), products, S => {
            let (x_values, dy) = (Values::<S>::of(x), Values::<S>::of(dy));
            let weight_values = Values::<<S as Scalar>::Real>::of(weights);
            let projections = [gate, up, down].map(Values::<S>::of);
            let hidden = hidden.each_ref().map(Values::<S>::of);
            let backward = Backward {
                shape,
                groups: &groups,
                x: &x_values,
                weights: &weight_values,
                projections: projections.each_ref().map(|values| &values[..]),
                hidden: hidden.each_ref().map(|values| &values[..]),
                dy: &dy,
            };
            let Gradients { x: dx, weights: dw, projections: [dgate, dup, ddown] } =
                backward.run(products, wanted);
            let ExpertsShape { tokens, per_token, experts, d_model, d_ff } = shape;
            [
                dx.map(|values| tensor_of(values, [tokens, d_model], dtypes[0])),
                dw.map(|values| tensor_of(values, [tokens, per_token], dtypes[1])),
                dgate.map(|values| tensor_of(values, [experts, d_model, d_ff], dtypes[2])),
                dup.map(|values| tensor_of(values, [experts, d_model, d_ff], dtypes[3])),
                ddown.map(|values| tensor_of(values, [experts, d_ff, d_model], dtypes[4])),
            ]
        })
    }
}
