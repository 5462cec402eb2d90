//! The kernels of attention on tensors: bf16 or float products, forward or backward.

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::super::bf16::bf16_gemm_for;
use super::super::dispatch::with_real;
use super::super::values::Values;
use super::bf16_products::{Bf16GradientProducts, Bf16Products};
use super::float_products::{FloatGradientProducts, FloatProducts};
use super::tile::Operands;
use crate::ops::attention::{AttentionKernels, AttentionShape};

/// Fewer queries than this read the keys in place: transposing all keys would take longer than multiplying
/// with them.
const FEW_ROWS: usize = 16;

impl AttentionKernels for Flex {
    fn attention_forward(
        q: &FlexTensor,
        k: &FlexTensor,
        v: &FlexTensor,
        shape: AttentionShape,
    ) -> (FlexTensor, FlexTensor) {
        let few = shape.seq < FEW_ROWS && shape.seq < shape.keys;
        if let Some(gemm) = bf16_gemm_for([q, k, v]).filter(|_| !few) {
            let (q_values, k, v) = (Values::of(q), Values::of(k), Values::of(v));
            let operands = Operands { q: &q_values, k: &k, v: &v, shape };
            return operands.tensors(&Bf16Products::new(gemm, operands), q);
        }
        with_real!(q.dtype(), T => {
            let (q_values, k, v) = (Values::<T>::of(q), Values::<T>::of(k), Values::<T>::of(v));
            let operands = Operands { q: &q_values, k: &k, v: &v, shape };
            operands.tensors(&FloatProducts::new(operands, few), q)
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
        if let Some(gemm) = bf16_gemm_for([q, k, v, out, dout]) {
            let (q, k, v) = (Values::of(q), Values::of(k), Values::of(v));
            let (out, lse, dout) = (Values::of(out), Values::<f32>::of(lse), Values::of(dout));
            let operands = Operands { q: &q, k: &k, v: &v, shape };
            let products = Bf16GradientProducts::new(gemm, operands, &dout);
            return operands.gradients(&products, [&out, &dout], &lse, qkv, wanted);
        }
        with_real!(q.dtype(), T => {
            let (q, k, v) = (Values::<T>::of(q), Values::<T>::of(k), Values::<T>::of(v));
            let (out, lse, dout) = (Values::<T>::of(out), Values::of(lse), Values::<T>::of(dout));
            let operands = Operands { q: &q, k: &k, v: &v, shape };
            let products = FloatGradientProducts::new(operands, &dout);
            operands.gradients(&products, [&out, &dout], &lse, qkv, wanted)
        })
    }
}
