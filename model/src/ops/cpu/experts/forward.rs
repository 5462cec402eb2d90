//! The forward pass, block by block.

use super::super::glu::sigmoid;
use super::super::matrix::Matrix;
use super::super::parallel::{for_each_item, simd};
use super::super::products::{Products, Threads};
use super::super::scalar::Scalar;
use super::super::uninit::UninitVec;
use super::by_expert::{expert_matrix, gather, product, right_operands, sum_by_token};
use super::groups::{Block, Groups};
use crate::ops::experts::ExpertsShape;

pub struct Forward<'a, S: Scalar> {
    pub shape: ExpertsShape,
    pub groups: &'a Groups,
    pub x: &'a [S],
    pub weights: &'a [S::Real],
    /// Gate, up and down.
    pub projections: [&'a [S]; 3],
}

impl<S: Scalar> Forward<'_, S> {
    /// Returns the result, and the products of the rows with `gate` and `up`.
    pub fn run<P: Products<S, S>>(&self, products: P) -> (Vec<S>, [Vec<S>; 2]) {
        let ExpertsShape { d_model, d_ff, .. } = self.shape;
        let [gate, up, down] = self.projections;
        let inner = |stacked| {
            right_operands(products, self.groups, move |expert| {
                expert_matrix(stacked, expert, [d_model, d_ff])
            })
        };
        let [gate, up] = [gate, up].map(inner);
        let down =
            right_operands(products, self.groups, |expert| expert_matrix(down, expert, [d_ff, d_model]));
        let rows = self.shape.rows();
        let mut hidden = [(); 2].map(|()| UninitVec::<S>::new(rows * d_ff));
        let mut results = UninitVec::<S>::new(rows * d_model);
        let blocks = self.groups.blocks();
        let [gates, ups] = &mut hidden;
        let outputs = Block::cut(&blocks, gates.slots(), d_ff)
            .into_iter()
            .zip(Block::cut(&blocks, ups.slots(), d_ff))
            .zip(Block::cut(&blocks, results.slots(), d_model));
        for_each_item(blocks.iter().zip(outputs), 1, |_, (block, ((g, u), result))| {
            let [Some(gate), Some(up), Some(down)] =
                [&gate, &up, &down].map(|operands| operands[block.expert].as_ref())
            else {
                unreachable!("invariant: an expert of a block has rows");
            };
            let count = block.rows.len();
            let x = gather(self.x, d_model, self.groups.tokens(block.rows.clone()));
            let x = products.left(Matrix::rows(&x, [count, d_model]), Threads::One);
            let g = product(products, g, [count, d_model, d_ff], &x, gate);
            let u = product(products, u, [count, d_model, d_ff], &x, up);
            let h = self.gated(block, g, u);
            let h = products.left(Matrix::rows(&h, [count, d_ff]), Threads::One);
            product(products, result, [count, d_ff, d_model], &h, down);
        });
        // SAFETY: blocks cover all rows, and products have written each block of each output.
        let (hidden, results) = unsafe { (hidden.map(|values| values.assume_init()), results.assume_init()) };
        (sum_by_token(&results, self.groups, self.shape), hidden)
    }

    /// Computes `w · silu(g) · u` for the rows of a block.
    fn gated(&self, block: &Block, g: &[S], u: &[S]) -> Vec<S> {
        let width = self.shape.d_ff;
        let mut h = UninitVec::new(g.len());
        let choices = self.groups.choices(block.rows.clone());
        simd(
            #[inline(always)]
            || {
                for (i, (h, &choice)) in h.slots().chunks_exact_mut(width).zip(choices).enumerate() {
                    let w = self.weights[choice];
                    let row = i * width..(i + 1) * width;
                    for ((h, g), u) in h.iter_mut().zip(&g[row.clone()]).zip(&u[row]) {
                        let (g, u) = (g.real(), u.real());
                        h.write(S::nearest(w * (g * sigmoid(g) * u)));
                    }
                }
            },
        );
        // SAFETY: there is a choice for each row, and a value of `g` and `u` for each element of a row.
        unsafe { h.assume_init() }
    }
}
