//! The numbers of `metrics.jsonl`, by key.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::series::Series;

/// The numbers of a run's metrics: a [`Series`] for each key, such as `loss`, `val_loss` or `layers.3.ffn.rms`.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    series: Vec<(String, Series)>,
    places: HashMap<String, usize>,
}

impl Metrics {
    /// The series of `key`, if any line has it.
    pub fn get(&self, key: &str) -> Option<&Series> {
        self.places.get(key).map(|place| &self.series[*place].1)
    }

    /// Returns every key with its series, in order of first appearance.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Series)> {
        self.series.iter().map(|(key, series)| (key.as_str(), series))
    }

    /// Returns the last step of any line.
    pub fn last_step(&self) -> Option<u64> {
        self.series.iter().filter_map(|(_, series)| series.steps().last().copied()).max()
    }

    /// Adds a line. Returns false if it is not an object with a `step`.
    pub(super) fn add(&mut self, line: &[u8]) -> bool {
        let Ok(Line { step: Some(step), numbers }) = serde_json::from_slice(line) else { return false };
        // Lines mostly have the keys of the line before, in the same order.
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

    /// Returns the index of the series of `key`, creating the series if necessary.
    fn place_of(&mut self, key: Cow<'_, str>) -> usize {
        if let Some(place) = self.places.get(key.as_ref()) {
            return *place;
        }
        self.places.insert(key.clone().into_owned(), self.series.len());
        self.series.push((key.into_owned(), Series::default()));
        self.series.len() - 1
    }
}

/// A line of metrics: its step, and all its other numbers.
struct Line<'a> {
    step: Option<u64>,
    numbers: Vec<(Cow<'a, str>, f64)>,
}

/// A value of a line: a number, or `null`, which represents NaN or an infinite number. Anything else is
/// `None`.
struct Value(Option<f64>);

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Number;
        impl<'de> Visitor<'de> for Number {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(Value(Some(value)))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(Value(Some(value as f64)))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(Value(Some(value as f64)))
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value(Some(f64::NAN)))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Value, E> {
                Ok(Value(None))
            }

            fn visit_str<E>(self, _: &str) -> Result<Value, E> {
                Ok(Value(None))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Value(None))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Value(None))
            }
        }
        from.deserialize_any(Number)
    }
}

/// A key, borrowed where it has no escapes.
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
                    if let Value(Some(value)) = map.next_value()? {
                        line.numbers.push((key, value));
                    }
                }
                Ok(line)
            }
        }
        from.deserialize_map(Numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_kept_by_key_and_other_lines_refused() {
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
}
