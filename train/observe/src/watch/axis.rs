//! Axes of charts: ranges, and labels with round numbers.

use super::format::short;

/// Larger values are drawn as this value, so that differences stay finite.
const LARGEST: f64 = f64::MAX / 4.0;

const LEAST_POWERS: f64 = 0.01;

/// The range of an axis. The ends of a logarithmic axis are powers of ten.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    from: f64,
    to: f64,
    is_log: bool,
}

impl Scale {
    pub(super) fn for_steps(from: u64, to: u64, is_log: bool) -> (Scale, [String; 3]) {
        let from = if is_log { from.max(1) } else { from };
        let (from, to) = (from as f64, to.max(from + 1) as f64);
        let middle = if is_log { (from * to).sqrt() } else { (from + to) / 2.0 };
        let ends = if is_log { (from.log10(), to.log10()) } else { (from, to) };
        (Scale { from: ends.0, to: ends.1, is_log }, [from, middle, to].map(|step| format!("{step:.0}")))
    }

    /// Returns a scale for the values `least` to `most` with round ends, and about `parts` labels.
    pub(super) fn for_values(least: f64, most: f64, is_log: bool, parts: usize) -> (Scale, Vec<String>) {
        let place = |value: f64| match is_log {
            true => value.max(f64::MIN_POSITIVE).log10(),
            false => value.clamp(-LARGEST, LARGEST),
        };
        let (mut from, mut to) = (place(least), place(most));
        if !(to - from).is_normal() || is_log && to - from < LEAST_POWERS {
            let room = if is_log { 0.05 } else { (from.abs() * 0.1).max(f64::MIN_POSITIVE) };
            let room = if from == 0.0 && !is_log { 1.0 } else { room };
            (from, to) = (from - room, to + room);
        }
        let step = round_step((to - from) / parts.max(1) as f64);
        let (first, last) = ((from / step + 1e-6).floor(), (to / step - 1e-6).ceil());
        let ticks = (0..=(last - first) as usize).map(|index| (first + index as f64) * step);
        let labels = if is_log {
            ticks.map(|tick| power(tick, step)).collect()
        } else {
            labels(&ticks.collect::<Vec<_>>(), step)
        };
        (Scale { from: first * step, to: last * step, is_log }, labels)
    }

    /// Returns the position of `value`, from 0 at the start to 1 at the end. `None` if it has no logarithm.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        let value = match self.is_log {
            true if value <= 0.0 => return None,
            true => value.max(f64::MIN_POSITIVE).log10(),
            false => value.clamp(-LARGEST, LARGEST),
        };
        let place = (value - self.from) / (self.to - self.from);
        // Large positions would overflow when lines are clipped.
        place.is_finite().then_some(place.clamp(-1e6, 1e6))
    }
}

/// Returns the smallest number of at least `least` that is 1, 2 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor()).max(f64::MIN_POSITIVE);
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= least * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

fn power(power: f64, step: f64) -> String {
    let is_whole = (power - power.round()).abs() < 1e-9;
    let (power, digits) =
        if is_whole { (power.round(), 0.0) } else { (power, (-step.log10()).ceil().max(1.0)) };
    let decimals = (digits - power.floor()).max(0.0) as usize;
    match power {
        -2.0..3.0 => format!("{:.decimals$}", 10f64.powf(power)),
        _ => format!("{:.*}e{}", digits as usize, 10f64.powf(power - power.floor()), power.floor()),
    }
}

fn labels(ticks: &[f64], step: f64) -> Vec<String> {
    let largest = ticks.iter().fold(0.0f64, |most, tick| most.max(tick.abs()));
    let place = |value: f64| (value.log10() + 1e-6).floor();
    let is_plain = largest < 1e4 && step >= 0.99e-4;
    let digits = if is_plain { (-place(step)).max(0.0) as usize } else { 0 };
    let label = |tick: &f64| if is_plain { format!("{tick:.digits$}") } else { short(*tick) };
    let labels: Vec<String> = ticks.iter().map(label).collect();
    if is_plain || (1e4..1e15).contains(&largest) && labels.windows(2).all(|pair| pair[0] != pair[1]) {
        return labels;
    }
    let digits = (place(largest) - place(step)).clamp(0.0, 15.0) as usize;
    ticks.iter().map(|tick| format!("{tick:.digits$e}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(from: f64, to: f64, is_log: bool, parts: usize) -> Vec<String> {
        Scale::for_values(from, to, is_log, parts).1
    }

    #[test]
    fn labels_are_round_and_distinct() {
        assert_eq!(labels(3.95, 5.7, false, 4), ["3.5", "4.0", "4.5", "5.0", "5.5", "6.0"]);
        assert_eq!(labels(0.0, 200.0, false, 5), ["0", "50", "100", "150", "200"]);
        assert_eq!(labels(0.0, 1_000_000.0, false, 3), ["0", "500k", "1M"]);
        assert_eq!(labels(0.0003, 0.003, false, 3), ["0.000", "0.001", "0.002", "0.003"]);
        assert_eq!(labels(0.001, 10.0, true, 4), ["1e-3", "0.01", "0.1", "1", "10"]);
        assert_eq!(labels(1e-9, 1e7, true, 4), ["1e-10", "1e-5", "1", "1e5", "1e10"]);
        assert_eq!(labels(3.0, 6.0, true, 3), ["2.5", "4.0", "6.3"]);
        assert_eq!(labels(2.0, 2.0, false, 2), ["1.8", "2.0", "2.2"]);
        assert_eq!(labels(0.0, 0.0, false, 2), ["-1", "0", "1"]);
        assert_eq!(Scale::for_steps(1, 100, true).1, ["1", "10", "100"]);
        assert_eq!(Scale::for_steps(7, 7, false).1[0], "7");
    }

    #[test]
    fn axis_has_at_least_two_labels() {
        assert_eq!(labels(3e-4, 3e-4, false, 2), ["2.5e-4", "3.0e-4", "3.5e-4"]);
        assert_eq!(labels(7.5e-5, 3e-3, false, 2), ["0.000", "0.002", "0.004"]);
        for (from, to, is_log) in
            [(1e-5, 1e-5, false), (1e-5, 1e-5, true), (1e-5, 1e-3, true), (2.4, 2.6, false)]
        {
            let labels = labels(from, to, is_log, 2);
            let is_distinct = labels.windows(2).all(|pair| pair[0] != pair[1]);
            assert!(labels.len() > 1 && is_distinct, "{labels:?}");
        }
        assert_eq!(
            labels(10_010.0, 10_160.0, false, 3),
            ["1.000e4", "1.005e4", "1.010e4", "1.015e4", "1.020e4"]
        );
    }

    #[test]
    fn huge_and_tiny_values_have_few_labels() {
        let sizes = [f64::MAX, f64::MAX / 1.05, 1e300, 1.0, 1e-300, f64::MIN_POSITIVE, 1e-323, 5e-324];
        for (from, to) in sizes.iter().flat_map(|from| sizes.iter().map(move |to| (*from, *to))) {
            let (from, to) = (f64::min(from, to), f64::max(from, to));
            for (from, to, is_log) in
                [(from, to, true), (from, to, false), (-from, to, false), (-to, -from, false)]
            {
                let (scale, labels) = Scale::for_values(from, to, is_log, 4);
                assert!((2..=8).contains(&labels.len()), "{scale:?}: {labels:?}");
                assert!(labels.iter().all(|label| label.len() <= 10), "{scale:?}: {labels:?}");
                for value in [from, to] {
                    let place = scale.place(value);
                    assert!(place.is_some_and(|place| (-0.01..1.01).contains(&place)), "{scale:?}: {value}");
                }
            }
        }
    }

    #[test]
    fn values_have_their_place() {
        let (linear, _) = Scale::for_values(10.0, 20.0, false, 2);
        assert_eq!((linear.place(15.0), linear.place(f64::NAN)), (Some(0.5), None));
        let (log, _) = Scale::for_values(1.0, 100.0, true, 2);
        assert_eq!((log.place(10.0), log.place(0.0)), (Some(0.5), None));
    }
}
