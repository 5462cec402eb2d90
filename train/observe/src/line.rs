//! A complete line of `metrics.jsonl`, with its values in order.

use std::fmt;
use std::io::{self, Read};

use kiln_sys::LineReader;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// A number, exactly as written in the file.
    Number(String),
    /// A number that is NaN or infinite, or a missing text.
    Null,
    Text(String),
    Other(String),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Line {
    pub(crate) step: u64,
    /// Seconds since 1970; `None` in files of older builds.
    pub(crate) time: Option<f64>,
    /// Keys and values, except `step` and `time`, in the order of the line.
    pub(crate) values: Vec<(String, Value)>,
}

impl Line {
    /// Parses a line. Returns `None` if the line is incomplete or invalid.
    pub(crate) fn read(line: &[u8]) -> Option<Line> {
        let Pairs(pairs) = serde_json::from_slice(line).ok()?;
        let (mut step, mut line) = (None, Line::default());
        for (key, value) in pairs {
            match key.as_str() {
                "step" => step = Some(value.get().parse().ok()?),
                "time" => line.time = value.get().parse().ok(),
                _ => line.values.push((key, Value::new(value.get()))),
            }
        }
        line.step = step?;
        Some(line)
    }

    /// Returns the numeric values. A `null` in the file is returned as NaN.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().filter_map(|(key, value)| match value {
            Value::Number(number) => Some((key.as_str(), number.parse().ok()?)),
            Value::Null if !is_text(key) => Some((key.as_str(), f64::NAN)),
            _ => None,
        })
    }
}

pub(crate) fn is_text(key: &str) -> bool {
    key == "parameter"
}

impl Value {
    fn new(text: &str) -> Value {
        match text.as_bytes() {
            b"null" => Value::Null,
            [b'-' | b'0'..=b'9', ..] => Value::Number(text.to_owned()),
            _ => match serde_json::from_str(text) {
                Ok(text) => Value::Text(text),
                Err(_) => Value::Other(text.to_owned()),
            },
        }
    }
}

struct Pairs<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Pairs<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Pairs<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Pairs<'de>, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = object.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// Returns the complete lines of a metrics file. A run that resumes from an earlier checkpoint repeats steps:
/// the later line of a step replaces the earlier one and all lines after it.
pub(crate) fn lines_of<R: Read>(mut file: LineReader<R>) -> io::Result<Vec<Line>> {
    let mut lines: Vec<Line> = Vec::new();
    while let Some(line) = file.next_line()? {
        let Some(line) = Line::read(line) else { continue };
        if lines.last().is_some_and(|last| last.step > line.step) {
            lines.truncate(lines.partition_point(|known| known.step < line.step));
        }
        lines.push(line);
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_keep_order_and_digits() {
        let text =
            br#" {"step":3, "time":1.5,"loss":null,"b":96737.56346040845,"a" : -2.5e3,"parameter":null} "#;
        let line = Line::read(text).unwrap();
        assert_eq!((line.step, line.time), (3, Some(1.5)));
        let keys: Vec<_> = line.values.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["loss", "b", "a", "parameter"]);
        assert_eq!(line.values[1].1, Value::Number("96737.56346040845".to_owned()));
        let numbers: Vec<_> = line.numbers().collect();
        assert!(numbers[0].0 == "loss" && numbers[0].1.is_nan());
        assert_eq!(numbers[1..], [("b", 96737.56346040845), ("a", -2500.0)]);
        let line = Line::read(br#"{"step":1,"t\"":"a\n,}","list":[1,{"a":2}],"is":true}"#).unwrap();
        let values: Vec<_> = line.values.into_iter().map(|(_, value)| value).collect();
        let others = ["[1,{\"a\":2}]", "true"].map(|json| Value::Other(json.to_owned()));
        assert_eq!(values, [&[Value::Text("a\n,}".to_owned())][..], &others].concat());
        for none in [
            "",
            "{}",
            "{\"step\":3,\"lo",
            "{\"loss\":1.0}",
            "[1]",
            "{\"step\":-1}",
            "{\"step\":1}}",
            "{\"step\":1,}",
        ] {
            assert_eq!(Line::read(none.as_bytes()), None, "{none}");
        }
    }

    #[test]
    fn repeated_steps_replace_earlier_ones() {
        let text = b"{\"step\":1}\n{\"step\":2}\n{\"step\":2,\"val_loss\":1}\n{\"step\":3}\nwhat\n{\"step\":2,\"a\":1}\n{\"st";
        let lines = lines_of(LineReader::new(&text[..])).unwrap();
        assert_eq!(lines.iter().map(|line| line.step).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(lines[1].values.len(), 1);
    }
}
