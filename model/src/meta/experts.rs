//! The memory of a layer of experts.

use std::rc::Rc;

use super::ops::bytes;
use super::tape::{MetaTape, MetaTensor, Products};

impl MetaTape<'_> {
    /// Mirrors [`ops::router_softmax`](crate::ops::router_softmax), which saves probabilities in f32.
    pub fn router_softmax(&self, logits: MetaTensor) -> MetaTensor {
        let MetaTensor { width, node, .. } = logits;
        let y = MetaTensor { memory: Rc::new(self.wide_rows(width)), width, node: None, again: None };
        let saved = y.clone();
        self.record(y, node.is_some(), move |tape, dy| {
            tape.register(node, tape.tensor(width).memory);
            drop((saved, dy));
        })
    }

    /// Mirrors [`ops::experts`](crate::ops::experts()): tokens choose `chosen` of `experts` experts of width `d_ff`.
    pub fn experts(
        &self,
        x: MetaTensor,
        probabilities: MetaTensor,
        [experts, chosen, d_ff]: [usize; 3],
    ) -> MetaTensor {
        let (d, d_ff, element) = (x.width, d_ff as u64, self.element_of_product());
        let rows = self.batch.rows().saturating_mul(chosen as u64);
        let stacked = (experts as u64).saturating_mul(d).saturating_mul(d_ff);
        let operands = move |tape: &Self| match tape.batch.products {
            Products::InPlace => Vec::new(),
            Products::Packed => {
                let rows = |width: u64| (experts as u64).saturating_mul(width);
                [(rows(d), d_ff), (rows(d), d_ff), (rows(d_ff), d)]
                    .map(|(rows, width)| tape.packed(rows, width))
                    .into()
            }
            Products::Widened => vec![tape.wide(stacked, 3), tape.wide_rows(d)],
        };
        let wide = move |tape: &Self| tape.scratch(bytes(rows, d_ff, element));
        let narrow = move |tape: &Self| tape.scratch(bytes(rows, d, element));
        let held = operands(self);
        let hidden = [(); 2].map(|()| self.scratch(bytes(rows, d_ff, self.batch.element)));
        let scratch = [narrow(self), wide(self), narrow(self)];
        let y = self.tensor(d);
        drop((held, scratch));
        let (node, read) = (x.node, self.save(&x));
        drop(x);
        self.record(y, node.is_some(), move |tape, dy| {
            let x = read.take(tape);
            let is_wide = tape.batch.products == Products::Widened;
            let held = operands(tape);
            let mut scratch = Some([wide(tape), wide(tape), wide(tape), narrow(tape), narrow(tape)]);
            // Widened copies live until the gradients have their own dtype, packed operands until the first products.
            let held = is_wide.then(|| {
                let hidden = [wide(tape), wide(tape)];
                (held, hidden, tape.wide_rows(d), tape.wide(stacked, 3))
            });
            scratch = scratch.filter(|_| !is_wide);
            (0..3).for_each(|_| tape.register_weight(stacked));
            tape.register(node, tape.tensor(d).memory);
            drop((held, scratch, hidden, x, dy));
            tape.register(probabilities.node, Rc::new(tape.wide_rows(probabilities.width)));
        })
    }
}
