use std::fmt;

use kiln_model::ops::Seen;

use kiln_train::run::Pass;

use super::breakpoint::{Part, written};
use crate::hash::split;
use kiln_train::run::Moment;

/// Prefix of the names of tensors that [`breakpoint!`](crate::breakpoint) shows.
const IN_CODE: &str = "breakpoint: ";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) step: u64,
    pub(super) what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    Part(Part),
    Tensor {
        /// The micro-batch, from 0.
        micro_batch: usize,
        pass: Pass,
        /// The place, such as `layers.3.ffn`.
        place: String,
        name: String,
    },
}

impl Point {
    pub(super) fn of(at: Moment, seen: &Seen<'_>) -> Self {
        let Moment { step, micro_batch, pass, .. } = at;
        let (place, name) = (seen.place.to_owned(), seen.name.to_owned());
        Point { step, what: What::Tensor { micro_batch, pass, place, name } }
    }

    /// Depth inside a module: 0 at its edge, 1 in `layers.3.ffn`.
    pub(super) fn depth(&self) -> usize {
        match &self.what {
            What::Part(_) => 0,
            What::Tensor { place, .. } => match split(place) {
                (_, "") => 0,
                (_, inside) => inside.split('.').count(),
            },
        }
    }

    pub(super) fn in_code(&self) -> Option<&str> {
        match &self.what {
            What::Tensor { pass: Pass::Forward | Pass::Recompute, name, .. } => name.strip_prefix(IN_CODE),
            _ => None,
        }
    }

    pub(super) fn ends(&self, start: &Point) -> bool {
        match (&self.what, &start.what) {
            (What::Tensor { pass, place, name, .. }, What::Tensor { pass: entered, place: of, .. }) => {
                let exit = if *pass == Pass::Backward { "input" } else { "output" };
                // A pass that is over has left the place as well.
                pass != entered || (place == of && name == exit)
            }
            _ => true,
        }
    }

    /// Returns the point's name without step and micro-batch, such as `backward layers.3 output`.
    pub(super) fn name(&self) -> String {
        match &self.what {
            What::Part(part) => written(part),
            What::Tensor { pass, place, name, .. } => format!("{} {place} {name}", written(pass)),
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = self.step;
        match &self.what {
            What::Part(Part::Data) => write!(f, "step {step}, before its first forward pass"),
            What::Part(Part::Optimizer) => write!(f, "step {step}, before the update"),
            What::Part(Part::Step) => write!(f, "the end of step {step}"),
            What::Tensor { micro_batch, pass, place, name } => {
                let of = if *pass == Pass::Backward { "the gradient of " } else { "" };
                write!(f, "step {step}, micro-batch {micro_batch}, {}: {of}{place} {name}", written(pass))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(pass: Pass, place: &str, name: &str) -> Point {
        let (place, name) = (place.to_owned(), name.to_owned());
        Point { step: 3, what: What::Tensor { micro_batch: 0, pass, place, name } }
    }

    #[test]
    fn points_have_a_depth_and_an_end() {
        let block = tensor(Pass::Backward, "layers.3", "output");
        let inside = tensor(Pass::Backward, "layers.3.ffn", "output");
        let end = tensor(Pass::Backward, "layers.3", "input");
        assert_eq!([&block, &inside, &end].map(Point::depth), [0, 1, 0]);
        assert_eq!(tensor(Pass::Forward, "embed", "output").depth(), 0);
        assert!(end.ends(&block) && !inside.ends(&block) && !block.ends(&block));
        assert!(tensor(Pass::Backward, "layers.3.ffn", "input").ends(&inside));
        assert_eq!(block.to_string(), "step 3, micro-batch 0, backward: the gradient of layers.3 output");
        assert_eq!(block.name(), "backward layers.3 output");
    }
}
