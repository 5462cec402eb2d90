//! Reduces series to a length that can be drawn.

use serde::Serialize;

use crate::run::Series;

/// A series in a limited number of intervals of steps. Numbers that are NaN or infinite become `null`.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct Reduced {
    pub(crate) total: usize,
    pub(crate) last: Option<(u64, Option<f64>)>,
    /// Middle step of each interval, ascending.
    pub(crate) steps: Vec<u64>,
    pub(crate) mean: Vec<Option<f64>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) low: Vec<Option<f64>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) high: Vec<Option<f64>>,
}

/// Reduces the steps `from` to `to` of a series to at most `most` intervals. With `is_log`, the intervals are
/// equally long on a logarithmic axis of steps.
pub(crate) fn reduce(series: &Series, from: u64, to: u64, most: usize, is_log: bool) -> Reduced {
    let steps = series.steps();
    let first = steps.partition_point(|step| *step < from);
    let end = steps.partition_point(|step| *step <= to).max(first);
    let last = (first..end).last().map(|place| (steps[place], number(series.values()[place])));
    let mut reduced = Reduced { total: end - first, last, ..Reduced::default() };
    if end - first <= most {
        reduced.steps = steps[first..end].to_vec();
        reduced.mean = series.values()[first..end].iter().map(|value| number(*value)).collect();
        return reduced;
    }
    let most = most.max(1);
    let ends = (1..=most).map(|stretch| match is_log {
        false => first + (end - first) * stretch / most,
        true => {
            let (least, largest) = (steps[first].max(1) as f64, steps[end - 1].max(1) as f64);
            let border = least * (largest / least).powf(stretch as f64 / most as f64);
            // Rounding must not drop the last step.
            if stretch == most { end } else { steps.partition_point(|step| (*step as f64) <= border) }
        }
    });
    let mut start = first;
    for end in ends {
        if end <= start {
            continue;
        }
        let (mut low, mut high, mut sum, mut count) = (f64::INFINITY, f64::NEG_INFINITY, 0.0, 0u32);
        for value in series.values()[start..end].iter().filter(|value| value.is_finite()) {
            (low, high) = (low.min(*value), high.max(*value));
            (sum, count) = (sum + value, count + 1);
        }
        reduced.steps.push(steps[start + (end - 1 - start) / 2]);
        reduced.mean.push(number(sum / f64::from(count)));
        reduced.low.push(number(low));
        reduced.high.push(number(high));
        start = end;
    }
    reduced
}

/// Returns the value at the last step up to `step`.
pub(super) fn last_until(series: &Series, step: u64) -> Option<f64> {
    let index = series.steps().partition_point(|known| *known <= step).checked_sub(1)?;
    Some(series.values()[index])
}

/// Rounds to six digits, which is more than a screen shows.
fn number(value: f64) -> Option<f64> {
    if !value.is_finite() {
        return None;
    }
    if value == 0.0 {
        return Some(0.0);
    }
    let digits = 5 - value.abs().log10().floor() as i32;
    let rounded = match digits {
        0..=200 => (value * 10f64.powi(digits)).round() / 10f64.powi(digits),
        -200..0 => (value / 10f64.powi(-digits)).round() * 10f64.powi(-digits),
        _ => value,
    };
    Some(rounded)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::fs;

    use super::*;
    use crate::run::Run;

    fn with(values: impl Fn(u64) -> f64, count: u64, check: impl FnOnce(&Series)) {
        let folder = tempfile::tempdir().unwrap();
        let mut lines = String::new();
        for step in 1..=count {
            writeln!(lines, "{}", serde_json::json!({ "step": step, "loss": values(step) })).unwrap();
        }
        fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
        let run = Run::open(folder.path()).unwrap();
        check(run.metrics().get("loss").unwrap());
    }

    #[test]
    fn a_short_series_is_itself() {
        with(
            |step| if step == 2 { f64::NAN } else { step as f64 },
            3,
            |series| {
                let whole = reduce(series, 0, u64::MAX, 3, false);
                assert_eq!((whole.steps, whole.low.len(), whole.total), (vec![1, 2, 3], 0, 3));
                assert_eq!(whole.mean, [Some(1.0), None, Some(3.0)]);
                assert_eq!(reduce(series, 2, 2, 3, false).steps, [2]);
                assert_eq!(reduce(series, 9, 5, 3, false), Reduced::default());
                assert_eq!((last_until(series, 0), last_until(series, 9)), (None, Some(3.0)));
            },
        );
    }

    #[test]
    fn a_long_series_keeps_its_means_and_peaks() {
        with(
            |step| if step == 777 { 50.0 } else { (step % 2) as f64 },
            10_000,
            |series| {
                for is_log in [false, true] {
                    let few = reduce(series, 0, u64::MAX, 100, is_log);
                    assert!(few.steps.len() <= 100 && few.steps.is_sorted() && few.total == 10_000);
                    assert!(few.high.contains(&Some(50.0)), "{is_log}");
                    assert_eq!(few.low.len(), few.mean.len());
                    assert_eq!(few.mean.last(), Some(&Some(0.5)));
                    assert_eq!(few.last, Some((10_000, Some(0.0))));
                }
                assert_eq!(reduce(series, 0, u64::MAX, 200, true).steps[..3], [1, 2, 3]);
            },
        );
    }

    #[test]
    fn numbers_are_short() {
        let cases =
            [(0.123456789, 0.123457), (1.0, 1.0), (-98765432.1, -98765400.0), (1e-9 / 3.0, 3.33333e-10)];
        for (value, expected) in cases {
            let got = number(value).unwrap();
            assert!((got - expected).abs() <= 1e-12 * expected.abs(), "{got}");
        }
        assert_eq!([number(f64::INFINITY), number(0.0)], [None, Some(0.0)]);
        assert_eq!(number(5e-324), Some(5e-324));
    }
}
