use std::fmt;

use serde::Serialize;

/// Largest relative difference in f32 that a different order of sums causes.
pub const ROUNDING: f64 = 1e-5;

/// Largest relative rounding difference in bf16 or f16, for a kind of tensor that no earlier step compared.
const HALF_ROUNDING: f64 = 2e-2;

/// Factor by which a rounding difference may grow from one tensor to a later one.
const GROWTH: f64 = 100.0;

/// The distance between 1 and the next number in bf16.
const HALF_UNIT: f64 = 1.0 / 128.0;

/// Number of elements of one tensor that two runs may round in opposite directions in bf16 by chance.
const FLIPS: f64 = 4.0;

/// The kind of difference to expect between two runs, from their recorded facts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Set if nothing explains a rounding difference, so that every bit counts.
    pub is_strict: bool,
    /// Set if both runs compute or reduce in bf16 or f16, whose rounding is coarse.
    pub is_half: bool,
}

/// A tensor or a number of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorPlace {
    pub step: Option<u64>,
    /// The part of the step, such as `forward`; if there is no step, the kind of data, such as `weights`.
    pub phase: String,
    pub module: String,
    pub tensor: String,
}

impl fmt::Display for TensorPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TensorPlace { step, phase, module, tensor } = self;
        step.map_or(Ok(()), |step| write!(f, "step {step}, "))?;
        write!(f, "{phase}, {module}: {tensor}")
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    #[serde(flatten)]
    pub at: TensorPlace,
    /// Norm of the difference divided by the tensor's norm; `None` for token ids or different shapes.
    pub relative: Option<f64>,
    pub note: Option<String>,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Equal,
    Rounding,
    Different,
}

/// The size of a difference, and the facts needed to judge it.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// The difference relative to the tensor, or to all tensors of its kind in its module. Infinity and NaN are never
    /// rounding.
    pub relative: f64,
    /// Number of elements in bf16 or f16, which two runs may round in opposite directions; `u64::MAX` for f32.
    pub count: u64,
    /// Set if an earlier step compared places of this kind, so that the noise of these runs is known.
    pub is_known: bool,
}

/// Compares two things in chronological order and finds where they diverge.
#[derive(Clone, Debug)]
pub struct Judge {
    is_half: bool,
    is_strict: bool,
    pub seen: usize,
    pub equal: usize,
    pub worst: f64,
    /// The first place with different bits.
    pub first: Option<Difference>,
    /// The first place with a difference larger than rounding.
    pub parted: Option<Difference>,
}

impl Judge {
    pub fn new(Expected { is_strict, is_half }: Expected) -> Self {
        Judge { is_half, is_strict, seen: 0, equal: 0, worst: 0.0, first: None, parted: None }
    }

    pub fn same(&mut self) {
        self.seen += 1;
        self.equal += 1;
    }

    pub fn other(&mut self, difference: Difference, size: Size) {
        self.seen += 1;
        let relative = if size.relative.is_nan() { f64::INFINITY } else { size.relative };
        let is_more = self.is_strict || relative == f64::INFINITY || relative > self.rounding(size);
        self.worst = self.worst.max(relative);
        if is_more && self.parted.is_none() {
            self.parted = Some(difference.clone());
        }
        self.first.get_or_insert(difference);
    }

    /// Records a place that is not finite on one side, among places without order. It precedes all other places.
    pub fn non_finite(&mut self, difference: Difference) {
        self.seen += 1;
        if self.worst < f64::INFINITY {
            self.worst = f64::INFINITY;
            self.first = Some(difference.clone());
            self.parted = Some(difference);
        }
    }

    /// Returns the largest difference that rounding explains. If f32 values differ by `worst`, a fraction `worst /
    /// unit` of the elements rounds to another bf16 number, one `unit` away: relative to the tensor, `sqrt(worst *
    /// unit)`.
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

    pub fn verdict(&self) -> Verdict {
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
        let (module, phase) = ("embed".to_owned(), "forward".to_owned());
        let at = TensorPlace { step: Some(1), phase, module, tensor: tensor.to_owned() };
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
    fn non_finite_values_are_not_rounding() {
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
    fn bf16_jumps_are_judged_by_earlier_noise() {
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
        assert!(!parts(3.6e-10, 1e-2, false));
        assert!(parts(3.6e-10, 5e-3, true) && parts(1e-8, 5e-3, true));
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
