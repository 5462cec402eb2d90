//! The memory of each operation: the counterpart of [`crate::ops`] without values.

use std::cell::RefCell;
use std::rc::Rc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use super::ledger::Held;
use super::tape::{GRADIENTS, LOGITS, MetaTape, MetaTensor, Products, Repeat};
use crate::ops::{logit_rows, rows_of_block};

const F32: u64 = 4;

/// Packed operands have widths that are multiples of this.
const PACK: u64 = 32;

pub(super) fn bytes(rows: u64, width: u64, element: u64) -> u64 {
    rows.saturating_mul(width).saturating_mul(element)
}

/// Backward state of maps with the same input.
#[derive(Default)]
struct SharedInput {
    copy: Option<Held>,
    has_gradient: bool,
}

impl MetaTape<'_> {
    /// Mirrors [`ops::linears`](crate::ops::linears): maps `x` to rows of each of `widths`.
    pub fn linears<const N: usize>(&self, x: MetaTensor, widths: [usize; N]) -> [MetaTensor; N] {
        let shared = Rc::new(RefCell::new(SharedInput::default()));
        widths.map(|width| self.linear_of_shared(&x, width as u64, shared.clone()))
    }

    /// Mirrors [`ops::linear`](crate::ops::linear()): maps `x` to rows of `width`.
    pub fn linear(&self, x: MetaTensor, width: usize) -> MetaTensor {
        let [y] = self.linears(x, [width]);
        y
    }

    fn linear_of_shared(&self, x: &MetaTensor, width: u64, shared: Rc<RefCell<SharedInput>>) -> MetaTensor {
        let (d_in, node) = (x.width, x.node);
        let operands = match self.batch.products {
            Products::InPlace => Vec::new(),
            Products::Packed => vec![self.packed(d_in, width)],
            Products::Widened => {
                vec![self.wide_rows(d_in), self.wide(d_in, width), self.wide_rows(width)]
            }
        };
        let y = self.tensor(width);
        drop(operands);
        let saved = self.trains().then(|| self.save(x));
        self.record(y, node.is_some(), move |tape, dy| {
            let mut shared = shared.borrow_mut();
            if node.is_some() {
                tape.input_gradient(node, [d_in, width], shared.has_gradient);
                shared.has_gradient = true;
            }
            if let Some(x) = saved.map(|x| x.take(tape)) {
                tape.weight_gradient([d_in, width], &mut shared.copy);
                drop((dy, x));
            }
        })
    }

    /// Mirrors the adapter of a map, of this `rank`: adds its result for `x` to `y`. Adapters are trained, even if the
    /// module's other weights are not.
    pub(crate) fn low_rank(&self, y: MetaTensor, x: MetaTensor, rank: usize, drops: bool) -> MetaTensor {
        let trained = self.replace_trained(true);
        let width = y.width();
        let x = if drops { self.dropped(x) } else { x };
        let narrow = self.linear(x, rank);
        let node = narrow.node;
        let scaled = self.record(self.in_place(narrow), node.is_some(), move |tape, dy| {
            tape.register(node, dy);
        });
        let added = self.linear(scaled, width);
        let sum = self.residual(y, added);
        self.replace_trained(trained);
        sum
    }

    /// Requests the gradient of the input of a map `[d_in, d_out]`, in the memory of another map's if it `adds`.
    fn input_gradient(&self, x: Option<usize>, [d_in, d_out]: [u64; 2], adds: bool) {
        let operands = match self.batch.products {
            Products::InPlace => Vec::new(),
            Products::Packed => vec![self.packed(d_in, d_out)],
            Products::Widened => vec![self.wide_rows(d_out), self.wide(d_in, d_out), self.wide_rows(d_in)],
        };
        if !adds {
            self.register(x, self.tensor(d_in).memory);
        } else if !self.batch.on_host {
            // The CPU adds to the sum while it is in the cache.
            self.ledger.write(bytes(self.batch.rows(), d_in, self.batch.element));
        }
        drop(operands);
    }

    /// Requests the gradient of the weight of a map `[d_in, d_out]`, and the transposed `copy` of the map's input.
    fn weight_gradient(&self, [d_in, d_out]: [u64; 2], copy: &mut Option<Held>) {
        let products = self.batch.products;
        let operands = match products {
            Products::InPlace => Vec::new(),
            Products::Packed => vec![self.packed(self.batch.rows(), d_out)],
            Products::Widened => vec![self.wide_rows(d_in), self.wide_rows(d_out)],
        };
        if self.batch.on_host && copy.is_none() {
            let element = if products == Products::Widened { F32 } else { self.batch.element };
            copy.replace(self.scratch(bytes(self.batch.rows(), d_in, element)));
        }
        let wide = (products == Products::Widened).then(|| self.wide(d_in, d_out));
        drop(operands);
        self.register_weight(d_in.saturating_mul(d_out));
        drop(wide);
    }

    /// Requests a bf16 operand `[rows, width]` in the order in which instructions read it.
    pub(super) fn packed(&self, rows: u64, width: u64) -> Held {
        self.scratch(bytes(rows, width.saturating_add(PACK - 1) / PACK * PACK, self.batch.element))
    }

    pub(super) fn wide(&self, rows: u64, width: u64) -> Held {
        self.scratch(bytes(rows, width, F32))
    }

    pub(super) fn wide_rows(&self, width: u64) -> Held {
        self.wide(self.batch.rows(), width)
    }

    /// Mirrors [`ops::rms_norm`](crate::ops::rms_norm()), which also adds the gradient of a residual stream `x`.
    pub fn rms_norm(&self, x: &MetaTensor) -> MetaTensor {
        let (y, node, width) = (self.tensor(x.width), x.node, x.width);
        let saved = self.save(x);
        let y = self.record(y, node.is_some(), move |tape, dy| {
            let x = saved.take(tape);
            let dx = tape.tensor(width).memory;
            // A GPU sums blocks of rows, and then their sums.
            let rows = tape.batch.rows();
            let blocks = rows.div_ceil(rows_of_block(usize::try_from(rows).unwrap_or(usize::MAX)) as u64);
            let sums = (!tape.batch.on_host).then(|| tape.wide(blocks, width));
            if let Some(node) = node {
                drop(tape.take_gradient(node));
            }
            tape.register(node, dx);
            tape.register_weight(width);
            drop((x, dy, sums));
        });
        self.again(y, [x], Repeat::New)
    }

    /// Mirrors [`ops::Residual::add_result`](crate::ops::Residual::add_result), on the CPU in the memory of `y`.
    pub fn residual(&self, x: MetaTensor, y: MetaTensor) -> MetaTensor {
        let (nodes, is_tracked) = ([y.node, x.node], x.node.is_some() || y.node.is_some());
        let sum = if self.batch.on_host {
            drop(x);
            self.in_place(y)
        } else {
            self.tensor(y.width)
        };
        self.record(sum, is_tracked, move |tape, dy| {
            nodes.into_iter().for_each(|node| tape.register(node, dy.clone()));
        })
    }

    /// Mirrors [`residual`](Self::residual) and [`rms_norm`](Self::rms_norm). On a GPU, one kernel computes both, which
    /// holds `x` and `y` until both outputs have memory.
    pub fn residual_and_norm(&self, x: MetaTensor, y: MetaTensor) -> (MetaTensor, MetaTensor) {
        let read = (!self.batch.on_host).then(|| (x.clone(), y.clone()));
        let sum = self.residual(x, y);
        let normed = self.rms_norm(&sum);
        drop(read);
        (sum, normed)
    }

    /// Mirrors [`ops::fork`](crate::ops::fork()): returns `x` for each of two readers.
    pub fn fork(&self, x: MetaTensor) -> [MetaTensor; 2] {
        let (node, width) = (x.node, x.width);
        [(); 2].map(|()| {
            let y = self.record(x.clone(), node.is_some(), move |tape, dy| {
                let sum = match node.and_then(|node| tape.take_gradient(node)) {
                    // A GPU writes the sum to new memory.
                    Some(_other) if !tape.batch.on_host => tape.tensor(width).memory,
                    _ => dy,
                };
                tape.register(node, sum);
            });
            self.again(y, [&x], Repeat::Same)
        })
    }

    /// Mirrors [`ops::rotary`](crate::ops::rotary()); on the CPU in the memory of `x`.
    pub fn rotary(&self, x: MetaTensor) -> MetaTensor {
        let (node, width) = (x.node, x.width);
        let backward = move |tape: &Self, dy| {
            let dx = if tape.batch.on_host { dy } else { tape.tensor(width).memory };
            tape.register(node, dx);
        };
        if self.is_selective() && x.again.is_some() {
            let y = self.record(self.tensor(width), node.is_some(), backward);
            return self.again(y, [&x], Repeat::InPlace);
        }
        let y = if self.batch.on_host { self.in_place(x) } else { self.tensor(width) };
        self.record(y, node.is_some(), backward)
    }

    /// Mirrors [`ops::dropout`](crate::ops::dropout()); does nothing if the pass has no dropout.
    pub fn dropout(&self, x: MetaTensor) -> MetaTensor {
        if self.batch.dropout { self.dropped(x) } else { x }
    }

    fn dropped(&self, x: MetaTensor) -> MetaTensor {
        let (node, width) = (x.node, x.width);
        let y = self.tensor(width);
        drop(x);
        self.record(y, node.is_some(), move |tape, dy| {
            tape.register(node, tape.tensor(width).memory);
            drop(dy);
        })
    }

    /// Mirrors [`ops::causal_attention`](crate::ops::causal_attention) with `heads` query heads.
    pub fn attention(&self, [q, k, v]: [MetaTensor; 3], heads: usize) -> MetaTensor {
        let (products, rows, kv) = (self.batch.products, self.batch.rows(), k.width);
        // Keys, and in backward also values, in the order in which tiles read them.
        let ordered = move |tape: &Self| match products {
            _ if !tape.batch.on_host => None,
            Products::Packed => Some(tape.scratch(bytes(rows, kv, tape.batch.element))),
            _ => Some(tape.wide_rows(kv)),
        };
        let operands = match products {
            Products::Widened => vec![self.wide_rows(q.width), self.wide_rows(kv), self.wide_rows(kv)],
            _ => Vec::new(),
        };
        let on_host = self.batch.on_host;
        let out_of_gpu = (!on_host).then(|| self.tensor(q.width));
        let logarithms = self.wide_rows(heads as u64);
        let keys = ordered(self);
        let wide = (products != Products::InPlace).then(|| self.wide_rows(q.width));
        let out = out_of_gpu.unwrap_or_else(|| self.tensor(q.width));
        drop((keys, operands, wide));
        let saved = out.clone();
        let (qkv, width) = ([&q, &k, &v].map(|x| (x.node, x.width)), q.width);
        let tracked = qkv.iter().any(|(node, _)| node.is_some());
        let read = [&q, &k, &v].map(|x| self.save(x));
        drop((q, k, v));
        self.record(out, tracked, move |tape, dy| {
            let read = read.map(|x| x.take(tape));
            let operands = match products {
                Products::Widened => [width, kv, kv, width, width].map(|width| tape.wide_rows(width)).into(),
                _ => Vec::new(),
            };
            let keys_and_values = [(); 2].map(|()| ordered(tape));
            let sums = on_host.then(|| tape.wide_rows(heads as u64));
            match products {
                Products::InPlace => {
                    for (node, width) in qkv {
                        tape.register(node, tape.tensor(width).memory);
                    }
                    // On a GPU, later kernels still need the sums.
                    drop(sums.or_else(|| Some(tape.wide_rows(heads as u64))));
                    drop(keys_and_values);
                }
                Products::Packed | Products::Widened => {
                    let wide = qkv.map(|(_, width)| tape.wide_rows(width));
                    drop((keys_and_values, sums));
                    // Gradients are converted to their own dtype one after the other.
                    for ((node, width), wide) in qkv.into_iter().zip(wide) {
                        tape.register(node, tape.tensor(width).memory);
                        drop(wide);
                    }
                }
            }
            drop((operands, read, saved, logarithms, dy));
        })
    }

    /// Mirrors [`ops::swiglu`](crate::ops::swiglu()) or another fused product of two tensors that saves both.
    pub fn gated(&self, gate: MetaTensor, up: MetaTensor) -> MetaTensor {
        let (y, width) = (self.tensor(gate.width), gate.width);
        let (nodes, read) = ([gate.node, up.node], [&gate, &up].map(|x| self.save(x)));
        let tracked = nodes.iter().any(Option::is_some);
        let y = self.record(y, tracked, move |tape, dy| {
            let read = read.map(|x| x.take(tape));
            for node in nodes {
                tape.register(node, tape.tensor(width).memory);
            }
            drop((read, dy));
        });
        self.again(y, [&gate, &up], Repeat::New)
    }

    /// Mirrors a function of each element that saves its input, such as
    /// [`ops::squared_relu`](crate::ops::squared_relu()) and burn's own operations.
    pub fn elementwise(&self, x: MetaTensor) -> MetaTensor {
        let (y, node, width, read) = (self.tensor(x.width), x.node, x.width, self.save(&x));
        let y = self.record(y, node.is_some(), move |tape, dy| {
            let read = read.take(tape);
            tape.register(node, tape.tensor(width).memory);
            drop((read, dy));
        });
        self.again(y, [&x], Repeat::New)
    }

    /// Mirrors [`ops::embedding`](crate::ops::embedding()) with a table `[vocabulary, width]`.
    pub fn embedding(&self, vocabulary: usize, width: usize) -> MetaTensor {
        let (vocabulary, width) = (vocabulary as u64, width as u64);
        let x = self.tensor(width);
        self.record(x, false, move |tape, dy| {
            // On the CPU, the sums of rows are f32; a GPU follows links from each position of a row to the next one.
            let needed = match (tape.batch.on_host, tape.batch.element) {
                (true, F32) => Vec::new(),
                (true, _) => vec![tape.wide_rows(width), tape.wide(vocabulary, width)],
                (false, _) => vec![tape.wide_rows(2)],
            };
            tape.register_weight(vocabulary.saturating_mul(width));
            drop((needed, dy));
        })
    }

    /// Mirrors [`ops::linear_cross_entropy`](crate::ops::linear_cross_entropy). If `tied`, the weight is the
    /// embedding's.
    pub fn cross_entropy(&self, hidden: MetaTensor, vocabulary: usize, tied: bool) -> MetaTensor {
        let (products, rows, d) = (self.batch.products, self.batch.rows(), hidden.width);
        let block = rows.min(logit_rows(vocabulary, self.batch.on_host) as u64);
        let vocabulary = vocabulary as u64;
        let (node, trains) = (hidden.node, self.trains());
        // The weight as an operand of both products.
        let operands = match products {
            Products::InPlace => Vec::new(),
            Products::Packed => vec![self.packed(d, vocabulary), self.packed(d, vocabulary)],
            Products::Widened => vec![self.wide_rows(d), self.wide(d, vocabulary)],
        };
        // Gradients are computed immediately, in f32.
        let dhidden = node.map(|_| self.wide_rows(d));
        let mut dweight = None;
        // A third block would hold the same memory as the second.
        for start in (0..rows).step_by(block.max(1) as usize).take(2) {
            let block = block.min(rows - start);
            let mut logits = Some(self.ledger.hold(LOGITS, bytes(block, vocabulary, F32)));
            // Gradients of the logits as operands; on the CPU, f32 gradients replace the logits.
            let (packs, on_host) = (products == Products::Packed, self.batch.on_host);
            let narrow = self.batch.element;
            let beside = packs || !on_host;
            let gradients = beside.then(|| self.ledger.hold(LOGITS, bytes(block, vocabulary, narrow)));
            logits = logits.filter(|_| !beside);
            let element = self.element_of_product();
            let scaled = (trains && on_host).then(|| self.scratch(bytes(block, d, element)));
            // The ordered left operand of the weight's gradient, or the width of both packed operands.
            let ordered = match (packs, tied) {
                (false, false) => bytes(block, d, element),
                (false, true) => bytes(block, vocabulary, element),
                (true, _) => bytes(block, d.saturating_add(vocabulary), element),
            };
            let ordered = (trains && on_host).then(|| self.scratch(ordered));
            if trains && dweight.is_none() {
                dweight = Some(self.ledger.hold(GRADIENTS, bytes(d, vocabulary, F32)));
            }
            drop((logits, gradients, scaled, ordered));
        }
        drop((operands, hidden));
        let loss = self.tensor(0);
        self.record(loss, node.is_some(), move |tape, dy| {
            drop(dy);
            // Converts the gradient to the dtype of the operands; a GPU multiplies it by the gradient of the loss.
            let converts = tape.batch.element != F32 || !tape.batch.on_host;
            if let Some(dhidden) = dhidden {
                let gradient = if converts { tape.tensor(d).memory } else { Rc::new(dhidden) };
                tape.register(node, gradient);
            }
            match dweight {
                Some(_) if converts => tape.register_weight(d.saturating_mul(vocabulary)),
                Some(dweight) => tape.keep_weight(dweight),
                None => {}
            }
        })
    }

    /// Returns the bytes of an element of a matrix product's operand.
    pub(super) fn element_of_product(&self) -> u64 {
        if self.batch.products == Products::Widened { F32 } else { self.batch.element }
    }

    /// Mirrors a custom loss: the logits of all rows of `hidden`, a copy in f32, log-probabilities, and gradients.
    pub fn whole_logits(&self, hidden: MetaTensor, vocabulary: usize) -> MetaTensor {
        let bytes = self.batch.rows().saturating_mul(vocabulary as u64).saturating_mul(F32);
        let logits = self.linear(hidden, vocabulary);
        let node = logits.node;
        let kept = [(); 2].map(|()| self.ledger.hold(LOGITS, bytes));
        let loss = self.tensor(0);
        self.record(loss, node.is_some(), move |tape, dy| {
            let gradients = [(); 2].map(|()| tape.ledger.hold(LOGITS, bytes));
            tape.register(node, tape.tensor(logits.width).memory);
            drop((logits, kept, gradients, dy));
        })
    }

    /// Mirrors burn's product of activations `a` and `b`, which saves both. The result has `width` elements per token,
    /// such as `heads * seq_len` for the scores of attention.
    pub fn product(&self, a: MetaTensor, b: MetaTensor, width: usize) -> MetaTensor {
        let width = width as u64;
        // burn multiplies copies in f32 on the host.
        let widened = |tape: &Self, widths: [u64; 3]| {
            let is_wide = tape.batch.on_host && tape.batch.element < F32;
            is_wide.then(|| widths.map(|width| tape.wide_rows(width)))
        };
        let operands = widened(self, [a.width, b.width, width]);
        let y = self.tensor(width);
        drop(operands);
        let factors = [&a, &b].map(|x| (x.node, x.width));
        let read = [&a, &b].map(|x| self.save(x));
        drop((a, b));
        self.record(y, factors.iter().any(|(node, _)| node.is_some()), move |tape, dy| {
            let read = read.map(|x| x.take(tape));
            for ((node, x), (_, other)) in [(factors[0], factors[1]), (factors[1], factors[0])] {
                if node.is_some() {
                    let operands = widened(tape, [width, other, x]);
                    tape.register(node, tape.tensor(x).memory);
                    drop(operands);
                }
            }
            drop((read, dy));
        })
    }

    /// Mirrors burn's `mask_fill`, which keeps the mask, a byte for each element.
    pub fn masked(&self, x: MetaTensor) -> MetaTensor {
        let (node, width) = (x.node, x.width);
        let mask = self.scratch(self.batch.rows().saturating_mul(width));
        let y = self.in_place(x);
        self.record(y, node.is_some(), move |tape, dy| {
            tape.register(node, dy);
            drop(mask);
        })
    }

    /// Mirrors burn's own softmax, which saves the shifted values and their exponentials.
    pub fn softmax(&self, x: MetaTensor) -> MetaTensor {
        let (node, width) = (x.node, x.width);
        let kept = [(); 2].map(|()| self.tensor(width));
        drop(x);
        let y = self.tensor(width);
        self.record(y, node.is_some(), move |tape, dy| {
            // The gradients of the quotient's numerator, and of its denominator before it is summed.
            let quotient = [(); 2].map(|()| tape.tensor(width));
            drop(dy);
            let dx = tape.tensor(width).memory;
            drop((kept, quotient));
            tape.register(node, dx);
        })
    }

    /// Mirrors a layer of which only the parameters are known: each matrix counts as a map that saves its input and
    /// output.
    pub fn unknown<M: Module>(&self, layer: &M, x: MetaTensor) -> MetaTensor {
        self.note_undescribed(std::any::type_name::<M>());
        let d = x.width();
        let mut matrices = Matrices(Vec::new());
        layer.visit(&mut matrices);
        let y = matrices.0.into_iter().fold(x, |y, width| self.linear(y, width));
        if y.width() == d { y } else { self.linear(y, d) }
    }
}

struct Matrices(Vec<usize>);

impl ModuleVisitor for Matrices {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if D >= 2 {
            self.0.extend(param.lazy_shape().iter().last());
        }
    }
}
