//! The backward pass: gradients of rows block by block, and gradients of weights expert by expert.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::glu::sigmoid;
use super::super::matrix::{Matrix, MatrixMut};
use super::super::parallel::{blocks, for_each_item, simd};
use super::super::products::{Output, Products, Threads};
use super::super::scalar::{Real, Scalar, dot};
use super::super::uninit::UninitVec;
use super::by_expert::{expert_matrix, product, right_operands, sum_by_token};
use super::groups::{Block, Groups};
use crate::ops::experts::{ExpertsShape, Operands};

/// Operands in row-major order, with the rows of `hidden` grouped by expert.
pub struct Backward<'a, S: Scalar> {
    pub shape: ExpertsShape,
    pub groups: &'a Groups,
    pub x: &'a [S],
    pub weights: &'a [S::Real],
    /// Gate, up and down.
    pub projections: [&'a [S]; 3],
    pub hidden: [&'a [S]; 2],
    pub dy: &'a [S],
}

/// Requested gradients, in row-major order.
pub struct Gradients<S: Scalar> {
    pub x: Option<Vec<S>>,
    pub weights: Option<Vec<S::Real>>,
    pub projections: [Option<Vec<S>>; 3],
}

/// Operands of the gradients of the weights, with rows grouped by expert.
struct Rows<S> {
    /// `[rows, d_model]`: the input, and the gradient of the result.
    x: Vec<S>,
    dy: Vec<S>,
    /// `[rows, d_ff]`: the gradients of the products before the gate, and the weighted values after it.
    dg: Vec<S>,
    du: Vec<S>,
    h: Vec<S>,
}

impl<S: Scalar> Backward<'_, S> {
    pub fn run<P: Products<S, S>>(&self, products: P, wanted: Operands<bool>) -> Gradients<S> {
        let [wants_x, wants_weights, wanted @ ..] = wanted;
        let (rows, by_row, dx) = self.rows(products, wants_x);
        Gradients {
            x: dx.map(|dx| sum_by_token(&dx, self.groups, self.shape)),
            weights: wants_weights.then(|| {
                let of_choice = |choice| by_row[self.groups.row(choice)];
                (0..self.shape.rows()).map(of_choice).collect()
            }),
            projections: self.projection_gradients(products, &rows, wanted),
        }
    }

    /// Computes the operands for the gradients of the weights, the gradients of the choices' weights and, if requested,
    /// the gradient of the input.
    fn rows<P: Products<S, S>>(&self, products: P, wants_x: bool) -> (Rows<S>, Vec<S::Real>, Option<Vec<S>>) {
        let ExpertsShape { d_model, d_ff, .. } = self.shape;
        let operands = |stacked, shape: [usize; 2], needed: bool| match needed {
            true => {
                right_operands(products, self.groups, move |expert| expert_matrix(stacked, expert, shape).t())
            }
            false => Vec::new(),
        };
        let [gate, up, down] = self.projections;
        let [gate, up] = [gate, up].map(|stacked| operands(stacked, [d_model, d_ff], wants_x));
        let down = operands(down, [d_ff, d_model], true);

        let rows = self.shape.rows();
        let outer = || UninitVec::<S>::new(rows * d_model);
        let inner = || UninitVec::<S>::new(rows * d_ff);
        let (mut x, mut dy, mut dx) = (outer(), outer(), wants_x.then(outer));
        let (mut dg, mut du, mut h) = (inner(), inner(), inner());
        let mut by_row = vec![S::Real::ZERO; rows];
        let cut = self.groups.blocks();
        let dx_parts: Vec<_> = match &mut dx {
            Some(dx) => Block::cut(&cut, dx.slots(), d_model).into_iter().map(Some).collect(),
            None => cut.iter().map(|_| None).collect(),
        };
        let outer = Block::cut(&cut, x.slots(), d_model)
            .into_iter()
            .zip(Block::cut(&cut, dy.slots(), d_model))
            .zip(dx_parts);
        let inner = Block::cut(&cut, dg.slots(), d_ff)
            .into_iter()
            .zip(Block::cut(&cut, du.slots(), d_ff))
            .zip(Block::cut(&cut, h.slots(), d_ff));
        let outputs = outer.zip(inner).zip(Block::cut(&cut, &mut by_row, 1));
        for_each_item(cut.iter().zip(outputs), 1, |_, (block, parts)| {
            let ((((x, dy), dx), ((dg, du), h)), dw) = parts;
            let count = block.rows.len();
            self.copy_rows(block, self.x, x);
            let dy = self.copy_rows(block, self.dy, dy);
            let lhs = products.left(Matrix::rows(dy, [count, d_model]), Threads::One);
            let mut q = UninitVec::new(count * d_ff);
            let sizes = [count, d_model, d_ff];
            let q = product(products, q.slots(), sizes, &lhs, operand(&down, block));
            let [dg, du] = self.through_gate(block, q, [dg, du, h], dw);
            let Some(dx) = dx else { return };
            let sizes = [count, d_ff, d_model];
            let lhs = products.left(Matrix::rows(dg, [count, d_ff]), Threads::One);
            let dx = product(products, dx, sizes, &lhs, operand(&gate, block));
            let lhs = products.left(Matrix::rows(du, [count, d_ff]), Threads::One);
            let (target, part) = (MatrixMut::rows(dx, [count, d_model]), [0..d_ff, 0..d_model]);
            products.multiply(target, Output::Add, &lhs, operand(&up, block), part, Threads::One);
        });
        // SAFETY: blocks cover all rows, and each block has written all of its parts.
        let (rows, dx) = unsafe {
            let [x, dy, dg, du, h] = [x, dy, dg, du, h].map(|values| values.assume_init());
            (Rows { x, dy, dg, du, h }, dx.map(|values| values.assume_init()))
        };
        (rows, by_row, dx)
    }

    fn copy_rows<'a>(&self, block: &Block, values: &[S], out: &'a mut [MaybeUninit<S>]) -> &'a mut [S] {
        let width = self.shape.d_model;
        let tokens = self.groups.tokens(block.rows.clone());
        for (out, token) in out.chunks_exact_mut(width).zip(tokens) {
            out.write_copy_of_slice(&values[token * width..][..width]);
        }
        // SAFETY: there is a token for each row of the block.
        unsafe { out.assume_init_mut() }
    }

    /// Writes `dg`, `du` and `w h` of a block, and its gradients of weights, from `q = dy · downᵀ`. Returns `dg`, `du`.
    fn through_gate<'a>(
        &self,
        block: &Block,
        q: &[S],
        outputs: [&'a mut [MaybeUninit<S>]; 3],
        dw: &mut [S::Real],
    ) -> [&'a [S]; 2] {
        let width = self.shape.d_ff;
        let first = block.rows.start;
        let choices = self.groups.choices(block.rows.clone());
        let [dg, du, h] = outputs;
        let one = S::Real::ONE;
        simd(
            #[inline(always)]
            || {
                for (i, (dw, &choice)) in dw.iter_mut().zip(choices).enumerate() {
                    let w = self.weights[choice];
                    let row = i * width..(i + 1) * width;
                    let there = (first + i) * width..(first + i + 1) * width;
                    let [g, u] = self.hidden.map(|values| &values[there.clone()]);
                    let q = &q[row.clone()];
                    let (dg, du) = (&mut dg[row.clone()], &mut du[row.clone()]);
                    let h = &mut h[row];
                    for ((h, g), u) in h.iter_mut().zip(g).zip(u) {
                        let (g, u) = (g.real(), u.real());
                        h.write(S::nearest(g * sigmoid(g) * u));
                    }
                    // SAFETY: the loop has written each element of the row.
                    let h = unsafe { h.assume_init_mut() };
                    *dw = dot(q, h);
                    for h in h {
                        *h = S::nearest(w * h.real());
                    }
                    for ((((dg, du), g), u), q) in dg.iter_mut().zip(du).zip(g).zip(u).zip(q) {
                        let (g, u, dh) = (g.real(), u.real(), w * q.real());
                        let s = sigmoid(g);
                        dg.write(S::nearest(dh * u * s * (one + g * (one - s))));
                        du.write(S::nearest(dh * (g * s)));
                    }
                }
            },
        );
        // SAFETY: there is a choice for each row, and the loops write each element of a row.
        unsafe { [dg.assume_init_ref(), du.assume_init_ref()] }
    }

    fn projection_gradients<P: Products<S, S>>(
        &self,
        products: P,
        rows: &Rows<S>,
        wanted: [bool; 3],
    ) -> [Option<Vec<S>>; 3] {
        let ExpertsShape { experts, d_model, d_ff, .. } = self.shape;
        let len = d_model * d_ff;
        let mut gradients = wanted.map(|wanted| wanted.then(|| UninitVec::<S>::new(experts * len)));
        let [gate, up, down] = gradients.each_mut().map(|gradient| {
            let slots = gradient.as_mut().map(UninitVec::slots);
            blocks(slots, len, experts)
        });
        // Larger tasks first, so that the last ones to finish are short.
        let of_input = gate.into_iter().zip(up).map(|(gate, up)| Task::Input([gate, up]));
        let of_result = down.into_iter().map(Task::Result);
        let tasks: Vec<_> = of_input.enumerate().chain(of_result.enumerate()).collect();
        for_each_item(tasks, 1, |_, (expert, task)| {
            let group = self.groups.rows_of(expert);
            match task {
                Task::Input(outputs) => {
                    let sides = [&rows.dg, &rows.du].map(|values| group_matrix(values, &group, d_ff));
                    gradient_products(products, group_matrix(&rows.x, &group, d_model), sides, outputs);
                }
                Task::Result(output) => {
                    let h = group_matrix(&rows.h, &group, d_ff);
                    gradient_products(products, h, [group_matrix(&rows.dy, &group, d_model)], [output]);
                }
            }
        });
        // SAFETY: there is a task for each part of each requested gradient, which writes the whole part.
        gradients.map(|gradient| gradient.map(|gradient| unsafe { gradient.assume_init() }))
    }
}

/// Gradients of one expert that are products with the same left operand.
enum Task<'a, S> {
    /// Gate and up.
    Input([Option<&'a mut [MaybeUninit<S>]>; 2]),
    /// Down.
    Result(Option<&'a mut [MaybeUninit<S>]>),
}

fn group_matrix<'a, S>(values: &'a [S], group: &Range<usize>, width: usize) -> Matrix<'a, S> {
    Matrix::rows(&values[group.start * width..group.end * width], [group.len(), width])
}

fn operand<'a, R>(operands: &'a [Option<R>], block: &Block) -> &'a R {
    match &operands[block.expert] {
        Some(operand) => operand,
        None => unreachable!("invariant: an expert of a block has rows"),
    }
}

/// Computes `lhsᵀ · rhs` for each right operand whose product is requested.
fn gradient_products<S: Scalar, P: Products<S, S>, const N: usize>(
    products: P,
    lhs: Matrix<'_, S>,
    rhs: [Matrix<'_, S>; N],
    outputs: [Option<&mut [MaybeUninit<S>]>; N],
) {
    let [rows, m] = lhs.shape();
    let n = rhs[0].shape()[1];
    if rows == 0 {
        for output in outputs.into_iter().flatten() {
            output.fill(MaybeUninit::new(S::nearest(S::Real::ZERO)));
        }
        return;
    }
    if outputs.iter().all(Option::is_none) {
        return;
    }
    let copy = products.copied_left(lhs.t(), n);
    let view = copy.is_none().then(|| products.left(lhs.t(), Threads::One));
    for (rhs, output) in rhs.into_iter().zip(outputs) {
        let Some(output) = output else { continue };
        let rhs = products.right(rhs, Threads::One);
        match (&copy, &view) {
            (Some(lhs), _) => product(products, output, [m, rows, n], lhs, &rhs),
            (None, Some(lhs)) => product(products, output, [m, rows, n], lhs, &rhs),
            (None, None) => unreachable!("invariant: there is a view where there is no copy"),
        };
    }
}
