//! Where two things part, and whether rounding explains it.

use std::fmt;

use serde::Serialize;

/// A relative difference that sums in another order make in f32, at most.
pub(crate) const ROUNDING: f64 = 1e-5;

/// The same where a pass computes in bf16 or f16, and nothing of the kind was compared in an earlier step.
const HALF_ROUNDING: f64 = 2e-2;

/// How much a difference by rounding may grow from one tensor to a later one before it is more than rounding.
const GROWTH: f64 = 100.0;

/// The distance between 1 and the next number in bf16.
const HALF_UNIT: f64 = 1.0 / 128.0;

/// Elements of one tensor that may round the other way in bf16 before that is more than chance.
const FLIPS: f64 = 4.0;

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

/// The size of a difference, and the facts by which it is judged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// The difference relative to the tensor, or to all tensors of its kind in its module, some of which may be
    /// nothing but rounding. Infinite or NaN is never rounding.
    pub(crate) relative: f64,
    /// Number of elements in bf16 or f16, each of which may round the other way; `u64::MAX` for an f32 tensor.
    pub(crate) count: u64,
    /// Set if an earlier step compared places of this kind, so that the noise of these runs is known.
    pub(crate) is_known: bool,
}

/// Goes through two things in the order of time, and finds where they part.
#[derive(Clone, Debug)]
pub(crate) struct Judge {
    /// Set if both compute in bf16 or f16.
    is_half: bool,
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
        Judge { is_half, is_strict, seen: 0, equal: 0, worst: 0.0, first: None, parted: None }
    }

    /// A place with the same bits.
    pub(crate) fn same(&mut self) {
        self.seen += 1;
        self.equal += 1;
    }

    /// A place with other bits.
    pub(crate) fn other(&mut self, difference: Difference, size: Size) {
        self.seen += 1;
        let relative = if size.relative.is_nan() { f64::INFINITY } else { size.relative };
        let is_more = self.is_strict || relative == f64::INFINITY || relative > self.rounding(size);
        self.worst = self.worst.max(relative);
        if is_more && self.parted.is_none() {
            self.parted = Some(difference.clone());
        }
        self.first.get_or_insert(difference);
    }

    /// A place at which one of two things without an order of time is not finite. It is named before all others.
    pub(crate) fn non_finite(&mut self, difference: Difference) {
        self.seen += 1;
        // The first of its kind stays.
        if self.worst < f64::INFINITY {
            self.worst = f64::INFINITY;
            self.first = Some(difference.clone());
            self.parted = Some(difference);
        }
    }

    /// The largest difference that rounding explains. An f32 that is `worst` apart rounds the other way in bf16
    /// once in unit / `worst` times, and then by a unit: together, the root of `worst` units.
    fn rounding(&self, Size { count, is_known, .. }: Size) -> f64 {
        let floor = match (self.is_half, is_known) {
            (false, _) => ROUNDING,
            (true, false) => HALF_ROUNDING,
            (true, true) => {
                let spread = GROWTH * (self.worst * HALF_UNIT).sqrt();
                let flips = HALF_UNIT * (FLIPS / count.max(1) as f64).sqrt();
                spread.max(flips).clamp(ROUNDING, HALF_ROUNDING)
            }
        };
        floor.max(GROWTH * self.worst)
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
        let size = |relative| Size { relative, count: 1000, is_known: false };
        differences
            .iter()
            .for_each(|(difference, relative)| judge.other(difference.clone(), size(*relative)));
        judge
    }

    #[test]
    fn what_is_not_finite_is_no_rounding() {
        for size in [f64::NAN, f64::INFINITY] {
            assert_eq!(judged(false, &[at("a", size)]).verdict(), Verdict::Different, "{size}");
            let judge = judged(false, &[at("a", f64::INFINITY), at("b", size)]);
            assert_eq!((judge.verdict(), judge.worst), (Verdict::Different, f64::INFINITY), "{size}");
        }
        let mut judge = judged(false, &[at("a", 0.5)]);
        judge.non_finite(at("b", f64::NAN).0);
        judge.non_finite(at("c", f64::NAN).0);
        assert_eq!(judge.parted.map(|parted| parted.at.tensor).as_deref(), Some("b"));
        assert_eq!(judge.first.map(|first| first.at.tensor).as_deref(), Some("b"));
    }

    #[test]
    fn in_bf16_a_jump_is_judged_by_the_noise_before_it() {
        let parts = |noise: f64, jump: f64, is_known: bool| {
            let mut judge = Judge::new(Expected { is_strict: false, is_half: true });
            let mut add = |relative, is_known| {
                let size = Size { relative, count: 4096, is_known };
                judge.other(at("a", relative).0, size);
            };
            add(noise, false);
            add(jump, is_known);
            judge.verdict() == Verdict::Different
        };
        // The first step of a kind says what the noise is.
        assert!(!parts(3.6e-10, 1e-2, false));
        // A gradient that is scaled by 1.01 on one of two ranks.
        assert!(parts(3.6e-10, 5e-3, true) && parts(1e-8, 5e-3, true));
        // Weights that are a little apart round the other way here and there.
        assert!(!parts(3.6e-10, 1.2e-4, true) && !parts(1e-7, 1e-3, true));
        assert!(!parts(2e-3, 1e-2, true) && parts(2e-3, 0.3, true));
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
