//! The average that is drawn over a noisy curve.

/// The exponential moving average of `values` over about `window` of them, without the bias of its start: the
/// first average is the first value. Values that are not finite are passed over and have no average of their own.
pub fn smoothed(values: &[f64], window: f64) -> Vec<f64> {
    let decay = 1.0 - 1.0 / window.max(1.0);
    let (mut sum, mut weight) = (0.0, 0.0);
    let average = |value: &f64| {
        if !value.is_finite() {
            return f64::NAN;
        }
        sum = decay * sum + value;
        weight = decay * weight + 1.0;
        sum / weight
    };
    values.iter().map(average).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_begin_without_a_bias_and_pass_over_what_is_no_number() {
        assert_eq!(smoothed(&[4.0, 4.0, 4.0], 10.0), [4.0, 4.0, 4.0]);
        assert_eq!(smoothed(&[1.0, 2.0], 1.0), [1.0, 2.0]);
        // Half as much weight one step back.
        let averages = smoothed(&[3.0, f64::NAN, 6.0], 2.0);
        assert_eq!((averages[0], averages[1].is_nan(), averages[2]), (3.0, true, 5.0));
    }
}
