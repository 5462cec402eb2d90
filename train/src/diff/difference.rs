//! Where two things part, and whether rounding explains it.

use std::fmt;

use serde::Serialize;

/// A relative difference that sums in another order make in f32, at most.
pub(crate) const ROUNDING: f64 = 1e-5;

/// The same where a pass computes in bf16 or f16.
const HALF_ROUNDING: f64 = 2e-2;

/// How much a difference by rounding may grow from one tensor to a later one before it is more than rounding.
const GROWTH: f64 = 100.0;

/// What is expected of two runs, by what is recorded of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    /// Nothing explains rounding: every bit counts.
    pub(crate) is_strict: bool,
    /// Both compute or reduce in bf16 or f16, whose rounding is coarse.
    pub(crate) is_half: bool,
}

/// A tensor or a number of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct TensorPlace {
    /// The optimizer step, where there is one.
    pub(crate) step: Option<u64>,
    /// The part of the step, as in `forward`; what is compared, as in `weights`, where there is none.
    pub(crate) phase: String,
    /// The module, as in `layers.3`.
    pub(crate) unit: String,
    /// The tensor in it.
    pub(crate) tensor: String,
}

impl fmt::Display for TensorPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TensorPlace { step, phase, unit, tensor } = self;
        step.map_or(Ok(()), |step| write!(f, "step {step}, "))?;
        write!(f, "{phase}, {unit}: {tensor}")
    }
}

/// One place in which two things differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Difference {
    /// Where.
    #[serde(flatten)]
    pub(crate) at: TensorPlace,
    /// By how much, relative to the tensor: the norm of the difference over the norm. `None` if that has no
    /// meaning, as for token ids, or for tensors of other shapes.
    pub(crate) relative: Option<f64>,
    /// What else is known of it.
    pub(crate) note: Option<String>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.at)?;
        match (self.relative, &self.note) {
            (Some(relative), None) => write!(f, " (relative difference {relative:.1e})"),
            (Some(relative), Some(note)) => write!(f, " (relative difference {relative:.1e}; {note})"),
            (None, Some(note)) => write!(f, " ({note})"),
            (None, None) => Ok(()),
        }
    }
}

/// What a comparison has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// The same bits everywhere.
    Equal,
    /// Other bits, by no more than rounding.
    Rounding,
    /// More than that.
    Different,
}

/// Goes through two things in the order of time, and finds where they part.
#[derive(Clone, Debug)]
pub(crate) struct Judge {
    /// Relative differences up to this are rounding.
    tolerance: f64,
    /// Whether any other bit is a difference.
    is_strict: bool,
    /// Places that were compared.
    pub(crate) seen: usize,
    /// Those of them that have the same bits.
    pub(crate) equal: usize,
    /// The largest difference so far.
    pub(crate) worst: f64,
    /// The first place with other bits.
    pub(crate) first: Option<Difference>,
    /// The first place with a difference that is more than rounding.
    pub(crate) parted: Option<Difference>,
}

impl Judge {
    pub(crate) fn new(Expected { is_strict, is_half }: Expected) -> Self {
        let tolerance = if is_half { HALF_ROUNDING } else { ROUNDING };
        Judge { tolerance, is_strict, seen: 0, equal: 0, worst: 0.0, first: None, parted: None }
    }

    /// A place with the same bits.
    pub(crate) fn same(&mut self) {
        self.seen += 1;
        self.equal += 1;
    }

    /// A place with other bits. `size` is what is held against the tolerance: the difference relative to the
    /// tensor, or to all tensors of its kind in its module, some of which may be nothing but rounding.
    pub(crate) fn other(&mut self, difference: Difference, size: f64) {
        self.seen += 1;
        let is_more = self.is_strict || size > self.tolerance.max(GROWTH * self.worst);
        self.worst = self.worst.max(size);
        if is_more && self.parted.is_none() {
            self.parted = Some(difference.clone());
        }
        self.first.get_or_insert(difference);
    }

    pub(crate) fn verdict(&self) -> Verdict {
        match (&self.first, &self.parted) {
            (None, _) => Verdict::Equal,
            (Some(_), None) => Verdict::Rounding,
            (Some(_), Some(_)) => Verdict::Different,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(tensor: &str, relative: f64) -> (Difference, f64) {
        let (unit, phase) = ("embed".to_owned(), "forward".to_owned());
        let at = TensorPlace { step: Some(1), phase, unit, tensor: tensor.to_owned() };
        (Difference { at, relative: Some(relative), note: None }, relative)
    }

    fn judged(is_strict: bool, differences: &[(Difference, f64)]) -> Judge {
        let mut judge = Judge::new(Expected { is_strict, is_half: false });
        judge.same();
        differences.iter().for_each(|(difference, size)| judge.other(difference.clone(), *size));
        judge
    }

    #[test]
    fn rounding_grows_and_mistakes_jump() {
        assert_eq!(judged(false, &[]).verdict(), Verdict::Equal);
        let grown = judged(false, &[at("a", 1e-7), at("b", 5e-6), at("c", 1e-4)]);
        assert_eq!((grown.verdict(), grown.seen, grown.equal), (Verdict::Rounding, 4, 1));
        let jumped = judged(false, &[at("a", 1e-7), at("b", 0.5), at("c", 0.7)]);
        assert_eq!(jumped.verdict(), Verdict::Different);
        assert_eq!(jumped.first.expect("one").at.tensor, "a");
        assert_eq!(jumped.parted.expect("one").at.tensor, "b");
        let strict = judged(true, &[at("a", 1e-9), at("b", 0.5)]);
        assert_eq!(strict.parted.expect("one").at.tensor, "a");
    }
}
