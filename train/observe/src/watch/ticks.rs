//! Where an axis has ticks, and what stands there.

use super::text::number;

/// An axis of a chart: which values it shows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Axis {
    pub from: f64,
    pub to: f64,
    /// Whether equal lengths are equal ratios. Values from 0 down are not shown then.
    pub is_log: bool,
}

impl Axis {
    /// An axis for the values from `from` to `to`, with some room if there is one value alone.
    pub(super) fn around(from: f64, to: f64, is_log: bool) -> Axis {
        if from < to {
            return Axis { from, to, is_log };
        }
        let room = if from == 0.0 { 1.0 } else { from.abs() * 0.1 };
        let (from, to) = if is_log { (from / 1.1, from * 1.1) } else { (from - room, from + room) };
        Axis { from: from.max(f64::MIN), to: to.min(f64::MAX), is_log }
    }

    /// Where `value` is: 0 at the beginning of the axis and 1 at its end. `None` if it is nowhere.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        let place = match self.is_log {
            true if value <= 0.0 => return None,
            true => (value / self.from).ln() / (self.to / self.from).ln(),
            false => (value - self.from) / (self.to - self.from),
        };
        place.is_finite().then_some(place)
    }

    /// At most about `most` round values of the axis, ascending.
    pub(super) fn ticks(&self, most: usize) -> Vec<f64> {
        let most = most.max(2);
        let decades = (self.to / self.from).log10();
        if self.is_log && decades >= 1.0 {
            // Of all that a number can be.
            let first = (self.from.log10().ceil() as i32).max(f64::MIN_10_EXP);
            let last = (self.to.log10().floor() as i32).min(f64::MAX_10_EXP);
            let every = (last - first).max(0) / most as i32 + 1;
            let powers = || (first..=last).filter(|power| power.rem_euclid(every) == 0);
            let factors: &[f64] = if powers().count() * 3 <= most { &[1.0, 2.0, 5.0] } else { &[1.0] };
            // Those of the power below the first may be in range as well.
            let powers = (first - 1..=last).filter(|power| power.rem_euclid(every) == 0);
            let ticks = powers.flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
            return ticks.filter(|tick| (self.from..=self.to).contains(tick)).collect();
        }
        let step = round_step((self.to - self.from) / most as f64);
        if !(step.is_normal() && step > 0.0) {
            return vec![self.from, self.to];
        }
        let first = (self.from / step).ceil();
        let count = ((self.to / step + 1e-9).floor() - first).max(0.0) as usize;
        (0..=count).map(|index| (first + index as f64) * step).collect()
    }

    /// The texts of ticks, with as many digits as tell them apart.
    pub(super) fn labels(&self, ticks: &[f64]) -> Vec<String> {
        let largest = ticks.iter().fold(0.0f64, |most, tick| most.max(tick.abs()));
        let gap = ticks.windows(2).map(|pair| pair[1] - pair[0]).fold(f64::INFINITY, f64::min);
        let is_plain = !self.is_log && largest < 1e4 && gap >= 1e-4;
        let digits = if gap.is_finite() && gap < 1.0 { (-gap.log10()).ceil().max(0.0) as usize } else { 0 };
        // Such as 2.5, whose step is 0.5.
        let digits = if gap.is_finite() && gap.fract() != 0.0 { digits.max(1) } else { digits };
        ticks
            .iter()
            .map(|tick| match is_plain {
                true => format!("{tick:.digits$}"),
                false => plain(*tick),
            })
            .collect()
    }
}

/// A number without zeros at its end.
fn plain(value: f64) -> String {
    let text = number(value);
    match text.contains('.') && !text.contains(['e', 'k', 'M', 'G', 'T']) {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// The next 1, 2 or 5 times a power of ten from `least` up.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= least * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(from: f64, to: f64, is_log: bool, most: usize) -> Vec<String> {
        let axis = Axis::around(from, to, is_log);
        axis.labels(&axis.ticks(most))
    }

    #[test]
    fn ticks_are_round_and_told_apart() {
        assert_eq!(labels(3.95, 5.7, false, 4), ["4.0", "4.5", "5.0", "5.5"]);
        assert_eq!(labels(0.0, 200.0, false, 5), ["0", "50", "100", "150", "200"]);
        assert_eq!(labels(0.0, 1_000_000.0, false, 3), ["0", "500k", "1M"]);
        assert_eq!(labels(0.0003, 0.003, false, 3), ["0.001", "0.002", "0.003"]);
        assert_eq!(labels(0.001, 10.0, true, 4), ["0.01", "1"]);
        assert_eq!(labels(1.0, 50.0, true, 8), ["1", "2", "5", "10", "20", "50"]);
        assert_eq!(labels(3.0, 6.0, true, 3), ["3", "4", "5", "6"]);
        assert_eq!(labels(2.0, 2.0, false, 2), ["1.8", "2.0", "2.2"]);
        assert_eq!(labels(0.0, 0.0, false, 2), ["-1", "0", "1"]);
    }

    #[test]
    fn the_largest_and_smallest_numbers_have_few_ticks() {
        let tiny = f64::from_bits(1);
        for (from, to) in [
            (f64::MAX, f64::MAX),
            (1.0, f64::MAX),
            (tiny, f64::MAX),
            (tiny, tiny),
            (tiny, 2.0 * tiny),
            (f64::MIN, f64::MAX),
            (f64::MIN, f64::MIN),
        ] {
            for is_log in [false, true] {
                if is_log && from <= 0.0 {
                    continue;
                }
                let axis = Axis::around(from, to, is_log);
                let ticks = axis.ticks(8);
                assert!(ticks.len() <= 27, "{axis:?}: {} ticks", ticks.len());
                assert_eq!(axis.labels(&ticks).len(), ticks.len());
            }
        }
    }

    #[test]
    fn values_have_their_place() {
        let linear = Axis::around(10.0, 20.0, false);
        assert_eq!((linear.place(15.0), linear.place(f64::NAN)), (Some(0.5), None));
        let log = Axis::around(1.0, 100.0, true);
        assert_eq!((log.place(10.0), log.place(0.0)), (Some(0.5), None));
    }
}
