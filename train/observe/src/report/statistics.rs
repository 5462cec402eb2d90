//! Medians and quartiles.

/// The middle of some values, and how far they spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    /// First quartile.
    pub(super) lower: f64,
    /// Median.
    pub(super) median: f64,
    /// Third quartile.
    pub(super) upper: f64,
}

impl Spread {
    /// That of the finite ones of `values`; `None` if there are none. Between values, quantiles are interpolated
    /// linearly.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let at = |share: f64| {
            let place = share * last as f64;
            let (below, above) = (values[place.floor() as usize], values[place.ceil() as usize]);
            below + (above - below) * place.fract()
        };
        Some(Spread { lower: at(0.25), median: at(0.5), upper: at(0.75) })
    }
}

/// A number with `digits` that count, and thousands apart.
pub(super) fn significant(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return "not finite".to_owned();
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    let magnitude = value.abs().log10().floor() as i32;
    if !(-4..15).contains(&magnitude) {
        return format!("{value:.*e}", digits.saturating_sub(1));
    }
    let decimals = usize::try_from(digits as i32 - 1 - magnitude).unwrap_or(0);
    let text = format!("{value:.decimals$}");
    match text.split_once('.') {
        Some((whole, rest)) => format!("{}.{rest}", thousands(whole)),
        None => thousands(&text),
    }
}

/// A whole number with its thousands apart.
pub(super) fn count(value: u64) -> String {
    thousands(&value.to_string())
}

fn thousands(digits: &str) -> String {
    let (sign, digits) = digits.strip_prefix('-').map_or(("", digits), |rest| ("-", rest));
    let mut text = String::with_capacity(digits.len() + 8);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    format!("{sign}{text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_values() {
        let spread = Spread::of([4.0, 1.0, f64::NAN, 3.0, 2.0, 5.0]).unwrap();
        assert_eq!((spread.lower, spread.median, spread.upper), (2.0, 3.0, 4.0));
        let spread = Spread::of([1.0, 2.0]).unwrap();
        assert_eq!((spread.lower, spread.median, spread.upper), (1.25, 1.5, 1.75));
        assert_eq!(Spread::of([f64::INFINITY]), None);
    }

    #[test]
    fn numbers_have_as_many_digits_as_count() {
        let texts = [0.0, 53_371.4, 1234.5, 12.345, 0.012345, 1e-7, -1_234_567.0, f64::NAN]
            .map(|value| significant(value, 4));
        let expected = ["0", "53,371", "1,234", "12.35", "0.01235", "1.000e-7", "-1,234,567", "not finite"];
        assert_eq!(texts[0..1], expected[0..1]);
        assert!(texts[2] == "1,234" || texts[2] == "1,235");
        assert_eq!(
            [&texts[1], &texts[4], &texts[5], &texts[6], &texts[7]],
            [1, 4, 5, 6, 7].map(|i| expected[i])
        );
        assert_eq!(count(1_000_000), "1,000,000");
    }
}
