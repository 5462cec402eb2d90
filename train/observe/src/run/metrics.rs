//! Numbers in `metrics.jsonl`, by key.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Numbers of a run: a [`Series`] for each key, such as `loss`, `val_loss` or `layers.3.ffn.rms`.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    series: Vec<(String, Series)>,
    places: HashMap<String, usize>,
}

impl Metrics {
    /// Returns the series of `key`.
    pub fn get(&self, key: &str) -> Option<&Series> {
        self.places.get(key).map(|place| &self.series[*place].1)
    }

    /// Returns every key with its series, in order of first appearance.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Series)> {
        self.series.iter().map(|(key, series)| (key.as_str(), series))
    }

    /// Returns the last step of any series.
    pub fn last_step(&self) -> Option<u64> {
        self.series.iter().filter_map(|(_, series)| series.steps().last().copied()).max()
    }

    /// Adds a line. Returns false if the line is not an object with a `step`.
    pub(super) fn add(&mut self, line: &[u8]) -> bool {
        let Ok(Line { step: Some(step), numbers }) = serde_json::from_slice(line) else { return false };
        // Consecutive lines mostly have the same keys in the same order.
        let mut expected = 0;
        for (key, value) in numbers {
            let place = match self.series.get(expected) {
                Some((known, _)) if *known == key => expected,
                _ => self.place_of(key),
            };
            expected = place + 1;
            self.series[place].1.push(step, value);
        }
        true
    }

    fn place_of(&mut self, key: Cow<'_, str>) -> usize {
        if let Some(place) = self.places.get(key.as_ref()) {
            return *place;
        }
        self.places.insert(key.clone().into_owned(), self.series.len());
        self.series.push((key.into_owned(), Series::default()));
        self.series.len() - 1
    }
}

struct Line<'a> {
    step: Option<u64>,
    numbers: Vec<(Cow<'a, str>, f64)>,
}

#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Deserialize<'de> for Line<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Numbers;
        impl<'de> Visitor<'de> for Numbers {
            type Value = Line<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a line of metrics")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Line<'de>, A::Error> {
                let mut line = Line { step: None, numbers: Vec::with_capacity(16) };
                while let Some(Key(key)) = map.next_key()? {
                    if key == "step" {
                        line.step = Some(map.next_value()?);
                        continue;
                    }
                    let value = match map.next_value::<&RawValue>()?.get() {
                        "null" => Some(f64::NAN),
                        json => json.parse().ok(),
                    };
                    line.numbers.extend(value.map(|value| (key, value)));
                }
                Ok(line)
            }
        }
        from.deserialize_map(Numbers)
    }
}

/// Values over ascending steps. Missing numbers are stored as NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    steps: Vec<u64>,
    values: Vec<f64>,
}

impl Series {
    /// Adds a value, and drops values of `step` and later steps: a run that resumes writes them again.
    pub(super) fn push(&mut self, step: u64, value: f64) {
        if self.steps.last().is_some_and(|last| *last >= step) {
            let stay = self.steps.partition_point(|known| *known < step);
            self.steps.truncate(stay);
            self.values.truncate(stay);
        }
        self.steps.push(step);
        self.values.push(value);
    }

    /// Returns the steps, ascending.
    pub fn steps(&self) -> &[u64] {
        &self.steps
    }

    /// Returns the values, one for each step.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// Returns the last step and its value.
    pub fn last(&self) -> Option<(u64, f64)> {
        self.steps.last().copied().zip(self.values.last().copied())
    }

    /// Returns the median growth of the value per step over the last `most` pairs, so pauses do not change it.
    pub fn growth(&self, most: usize) -> Option<f64> {
        let from = self.steps.len().saturating_sub(most.saturating_add(1));
        let pairs = self.steps[from..].windows(2).zip(self.values[from..].windows(2));
        let growths = pairs.map(|(steps, values)| (values[1] - values[0]) / (steps[1] - steps[0]) as f64);
        let mut growths: Vec<f64> = growths.filter(|growth| growth.is_finite()).collect();
        growths.sort_by(f64::total_cmp);
        growths.get(growths.len() / 2).copied()
    }

    /// Returns the exponential moving average, skipping NaN. `weight` is in `[0, 1)`.
    /// As in TensorBoard, the weights of the values so far are normalized to 1.
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

    /// Returns the value at `step`.
    pub fn at(&self, step: u64) -> Option<f64> {
        self.steps.binary_search(&step).ok().map(|index| self.values[index])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_kept_by_key() {
        let mut metrics = Metrics::default();
        assert!(metrics.add(br#"{"step":1,"loss":2.5,"tokens":100,"layers.0.rms":0.5}"#));
        assert!(metrics.add(br#"{"step":2,"loss":null,"parameter":"lm_head","skipped":1}"#));
        assert!(metrics.add(br#"{"step":2,"val_loss":2.25,"list":[1,2],"more":{"a":1}}"#));
        for line in ["", "{\"step\":3,\"lo", "{\"loss\":1.0}", "[1]", "{\"step\":-1}"] {
            assert!(!metrics.add(line.as_bytes()), "{line}");
        }
        let keys: Vec<_> = metrics.iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["loss", "tokens", "layers.0.rms", "skipped", "val_loss"]);
        let loss = metrics.get("loss").unwrap();
        assert_eq!((loss.steps(), loss.values()[0], loss.values()[1].is_nan()), (&[1, 2][..], 2.5, true));
        assert_eq!(metrics.last_step(), Some(2));
    }

    #[test]
    fn pause_does_not_change_the_growth() {
        let mut time = Series::default();
        for (step, seconds) in [(10, 100.0), (20, 105.0), (30, 110.0), (40, 90_000.0), (50, 90_005.0)] {
            time.push(step, seconds);
        }
        assert_eq!((time.growth(50), time.growth(1)), (Some(0.5), Some(0.5)));
        assert_eq!(Series::default().growth(50), None);
    }

    #[test]
    fn repeated_steps_replace_earlier_ones() {
        let mut series = Series::default();
        [(1, 1.0), (2, 2.0), (3, f64::NAN), (2, 5.0)]
            .into_iter()
            .for_each(|(step, value)| series.push(step, value));
        assert_eq!((series.steps(), series.values()), (&[1, 2][..], &[1.0, 5.0][..]));
        assert_eq!((series.at(2), series.at(3), series.last()), (Some(5.0), None, Some((2, 5.0))));
    }
}
