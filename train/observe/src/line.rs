//! A line of `metrics.jsonl` with everything in it, in its order.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

/// A line of metrics, or any other object with a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Line {
    pub(crate) step: u64,
    /// Seconds since 1970; lines of older builds have none.
    pub(crate) time: Option<f64>,
    /// Keys and values besides `step` and `time`, in the order of the line.
    pub(crate) values: Vec<(String, Value)>,
}

impl Line {
    /// Reads a line. `None` if it is none, such as half of one.
    pub(crate) fn read(line: &[u8]) -> Option<Line> {
        serde_json::from_slice(line).ok()
    }

    /// The values that are numbers. What is NaN or infinite is written as `null`, and is NaN here.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().filter_map(|(key, value)| match value {
            Value::Number(number) => Some((key.as_str(), number.as_f64()?)),
            // The one key with a text, which may be missing.
            Value::Null if key != "parameter" => Some((key.as_str(), f64::NAN)),
            _ => None,
        })
    }
}

impl<'de> Deserialize<'de> for Line {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Line;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a line of metrics")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Line, A::Error> {
                let (mut step, mut line) = (None, Line::default());
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "step" => step = Some(map.next_value()?),
                        "time" => line.time = map.next_value()?,
                        _ => line.values.push((key, map.next_value()?)),
                    }
                }
                line.step = step.ok_or_else(|| serde::de::Error::missing_field("step"))?;
                Ok(line)
            }
        }
        from.deserialize_map(Entries)
    }
}

/// The lines of a file of metrics, as far as they are whole. A step that is lower than the one before it takes
/// the place of what was there of that step and later ones, as when a run goes on from an earlier checkpoint.
pub(crate) fn lines_of(text: &[u8]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for line in text.split(|byte| *byte == b'\n').filter_map(Line::read) {
        if lines.last().is_some_and(|last| last.step > line.step) {
            lines.truncate(lines.partition_point(|known| known.step < line.step));
        }
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_keep_their_order_and_only_numbers_are_numbers() {
        let text = br#"{"step":3,"time":1.5,"loss":null,"b":1,"a":2.5,"parameter":null}"#;
        let line = Line::read(text).unwrap();
        assert_eq!((line.step, line.time), (3, Some(1.5)));
        let keys: Vec<_> = line.values.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["loss", "b", "a", "parameter"]);
        let numbers: Vec<_> = line.numbers().collect();
        assert!(numbers[0].0 == "loss" && numbers[0].1.is_nan());
        assert_eq!(numbers[1..], [("b", 1.0), ("a", 2.5)]);
        for none in ["", "{\"step\":3,\"lo", "{\"loss\":1.0}", "[1]", "{\"step\":-1}"] {
            assert_eq!(Line::read(none.as_bytes()), None, "{none}");
        }
    }

    #[test]
    fn steps_that_come_again_replace_those_that_were_there() {
        let text = b"{\"step\":1}\n{\"step\":2}\n{\"step\":2,\"val_loss\":1}\n{\"step\":3}\nwhat\n{\"step\":2,\"a\":1}\n{\"st";
        let lines = lines_of(text);
        assert_eq!(lines.iter().map(|line| line.step).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(lines[1].values.len(), 1);
    }
}
