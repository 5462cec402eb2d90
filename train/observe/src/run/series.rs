//! The values of one quantity over the steps of a run.

use serde::Serialize;

/// Values over steps, which ascend. A value that is not a number is kept as NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    steps: Vec<u64>,
    values: Vec<f64>,
}

/// Values over steps, few enough to be drawn. `null` stands for what is not a number.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Points {
    /// Steps, ascending.
    pub steps: Vec<u64>,
    /// The values of those steps.
    pub values: Vec<Option<f64>>,
}

impl Series {
    /// Adds a value. Values of this step and later ones go: a run that went on from an earlier checkpoint has
    /// written them again.
    pub(super) fn push(&mut self, step: u64, value: f64) {
        if self.steps.last().is_some_and(|last| *last >= step) {
            let stay = self.steps.partition_point(|known| *known < step);
            self.steps.truncate(stay);
            self.values.truncate(stay);
        }
        self.steps.push(step);
        self.values.push(value);
    }

    /// Steps, ascending.
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

    /// By how much the value grows per step of late: the median over the last `most` pairs of neighbours, which a pause
    /// does not change. Of times in seconds it is the pace.
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

    /// The steps `from` to `to`, reduced to at most `most` points: of each stretch, its smallest and its largest
    /// value, so that no peak is lost.
    pub fn points(&self, from: u64, to: u64, most: usize) -> Points {
        let first = self.steps.partition_point(|step| *step < from);
        let end = self.steps.partition_point(|step| *step <= to).max(first);
        let mut points = Points::default();
        let mut take = |index: usize| {
            points.steps.push(self.steps[index]);
            points.values.push(Some(self.values[index]).filter(|value| value.is_finite()));
        };
        if end - first <= most {
            (first..end).for_each(take);
            return points;
        }
        let stretches = (most / 2).max(1);
        for stretch in 0..stretches {
            let at = |part: usize| first + (end - first) * part / stretches;
            let range = at(stretch)..at(stretch + 1);
            let by_value = |a: &usize, b: &usize| self.values[*a].total_cmp(&self.values[*b]);
            let finite = || range.clone().filter(|index| self.values[*index].is_finite());
            let (Some(least), Some(most)) = (finite().min_by(by_value), finite().max_by(by_value)) else {
                // Nothing but what is no number: one point says so.
                range.take(1).for_each(&mut take);
                continue;
            };
            take(least.min(most));
            if least != most {
                take(least.max(most));
            }
        }
        points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_points_keep_the_peaks() {
        let mut series = Series::default();
        (1..=10_000).for_each(|step| series.push(step, if step == 7777 { 50.0 } else { 1.0 / step as f64 }));
        let points = series.points(0, u64::MAX, 100);
        assert!(points.steps.len() <= 100 && points.steps.is_sorted());
        assert_eq!(points.values[points.steps.iter().position(|step| *step == 7777).unwrap()], Some(50.0));
        assert_eq!(points.values.first(), Some(&Some(1.0)));
        assert_eq!(series.points(5, 8, 100).steps, [5, 6, 7, 8]);
        assert_eq!(series.points(20_000, u64::MAX, 100), Points::default());
    }

    #[test]
    fn what_is_no_number_does_not_hide_a_peak() {
        let mut series = Series::default();
        let value = |step: u64| match step {
            50 => 9.0,
            51 | 101..=200 => f64::NAN,
            _ => 1.0,
        };
        (1..=200).for_each(|step| series.push(step, value(step)));
        let points = series.points(0, u64::MAX, 4);
        assert_eq!((points.steps, points.values), (vec![1, 50, 101], vec![Some(1.0), Some(9.0), None]));
    }

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
