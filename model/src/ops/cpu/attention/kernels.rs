//! The kernels of attention on tensors, forward and backward.

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::super::bf16::bf16_gemm_for;
use super::super::dispatch::with_products;
use super::super::scalar::Scalar;
use super::super::values::Values;
use super::products::{BackwardProducts, ForwardProducts};
use super::tile::Operands;
use crate::ops::attention::{AttentionKernels, AttentionShape};

/// Number of queries below which keys are read in place: transposing all keys would take longer than the product.
const FEW_ROWS: usize = 16;

impl AttentionKernels for Flex {
    fn attention_forward(
        q: &FlexTensor,
        k: &FlexTensor,
        v: &FlexTensor,
        shape: AttentionShape,
    ) -> (FlexTensor, FlexTensor) {
        let few = shape.seq < FEW_ROWS && shape.seq < shape.keys;
        let bf16_gemm = bf16_gemm_for([q, k, v]).filter(|_| !few);
        with_products!(bf16_gemm, q.dtype(), products, S => {
            let [q_values, k, v] = [q, k, v].map(Values::<S>::of);
            let operands = Operands { q: &q_values, k: &k, v: &v, shape };
            ForwardProducts::new(products, operands, few).forward(q)
        })
    }

    fn attention_backward(
        qkv: &[FlexTensor; 3],
        (out, lse): &(FlexTensor, FlexTensor),
        dout: &FlexTensor,
        shape: AttentionShape,
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let [q, k, v] = qkv;
        with_products!(bf16_gemm_for([q, k, v, out, dout]), q.dtype(), products, S => {
            let [q, k, v, out, dout] = [q, k, v, out, dout].map(Values::<S>::of);
            let lse = Values::<<S as Scalar>::Real>::of(lse);
            let products = BackwardProducts::new(products, Operands { q: &q, k: &k, v: &v, shape }, &dout);
            products.backward(&out, &lse, qkv, wanted)
        })
    }
}
