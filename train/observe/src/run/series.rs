//! The values of one quantity over the steps of a run.

/// Values over ascending steps. A value that is not a number is stored as NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    steps: Vec<u64>,
    values: Vec<f64>,
}

impl Series {
    /// Adds a value. Drops values of this step and later ones: a run that resumed from an earlier checkpoint
    /// has written them again.
    pub(super) fn push(&mut self, step: u64, value: f64) {
        if self.steps.last().is_some_and(|last| *last >= step) {
            let stay = self.steps.partition_point(|known| *known < step);
            self.steps.truncate(stay);
            self.values.truncate(stay);
        }
        self.steps.push(step);
        self.values.push(value);
    }

    /// The steps, ascending.
    pub fn steps(&self) -> &[u64] {
        &self.steps
    }

    /// The value of each of [`Series::steps`].
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The last step and its value.
    pub fn last(&self) -> Option<(u64, f64)> {
        self.steps.last().copied().zip(self.values.last().copied())
    }

    /// Returns the recent growth of the value per step: the median over the last `most` pairs of neighbours,
    /// which a pause does not change. For times in seconds, this is the pace.
    pub fn growth(&self, most: usize) -> Option<f64> {
        let from = self.steps.len().saturating_sub(most.saturating_add(1));
        let pairs = self.steps[from..].windows(2).zip(self.values[from..].windows(2));
        let growths = pairs.map(|(steps, values)| (values[1] - values[0]) / (steps[1] - steps[0]) as f64);
        let mut growths: Vec<f64> = growths.filter(|growth| growth.is_finite()).collect();
        growths.sort_by(f64::total_cmp);
        growths.get(growths.len() / 2).copied()
    }

    /// The exponential moving average with this weight of earlier values, from 0 to 1 without 1. The weights of the
    /// values so far are normalized to 1, as in TensorBoard. Values that are not numbers are skipped.
    pub fn smoothed(&self, weight: f64) -> Series {
        let (mut sum, mut weights) = (0.0, 0.0);
        let numbers = self.steps.iter().zip(&self.values).filter(|(_, value)| value.is_finite());
        let average = |(step, value): (&u64, &f64)| {
            sum = weight * sum + (1.0 - weight) * value;
            weights = weight * weights + (1.0 - weight);
            (*step, sum / weights)
        };
        let (steps, values) = numbers.map(average).unzip();
        Series { steps, values }
    }

    /// The value at `step`.
    pub fn at(&self, step: u64) -> Option<f64> {
        self.steps.binary_search(&step).ok().map(|index| self.values[index])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_does_not_change_the_pace() {
        let mut time = Series::default();
        for (step, seconds) in [(10, 100.0), (20, 105.0), (30, 110.0), (40, 90_000.0), (50, 90_005.0)] {
            time.push(step, seconds);
        }
        assert_eq!((time.growth(50), time.growth(1)), (Some(0.5), Some(0.5)));
        assert_eq!(Series::default().growth(50), None);
    }

    #[test]
    fn steps_that_come_again_replace_those_that_were_there() {
        let mut series = Series::default();
        [(1, 1.0), (2, 2.0), (3, f64::NAN), (2, 5.0)]
            .into_iter()
            .for_each(|(step, value)| series.push(step, value));
        assert_eq!((series.steps(), series.values()), (&[1, 2][..], &[1.0, 5.0][..]));
        assert_eq!((series.at(2), series.at(3), series.last()), (Some(5.0), None, Some((2, 5.0))));
    }
}
