//! A complete line of `metrics.jsonl`, with its values in order.

use std::io::{self, Read};

use kiln_sys::LineReader;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// The value of a key in a line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// A number, exactly as written: no digit is lost.
    Number(String),
    /// A number that is NaN or infinite, or a missing text.
    Null,
    /// A text.
    Text(String),
    /// Anything else, as JSON.
    Other(String),
}

/// A line of metrics, or any other object with a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Line {
    pub(crate) step: u64,
    /// Seconds since 1970; `None` for lines of older builds.
    pub(crate) time: Option<f64>,
    /// Keys and values, except `step` and `time`, in the order of the line.
    pub(crate) values: Vec<(String, Value)>,
}

impl Line {
    /// Parses a line. `None` if it is invalid, such as half a line.
    pub(crate) fn read(line: &[u8]) -> Option<Line> {
        let mut rest = Rest(std::str::from_utf8(line).ok()?.trim());
        let (mut step, mut line) = (None, Line::default());
        rest.take('{')?;
        if rest.take('}').is_none() {
            loop {
                let (key, _) = rest.next::<String>()?;
                rest.take(':')?;
                let (_, text) = rest.next::<IgnoredAny>()?;
                match key.as_str() {
                    "step" => step = Some(text.parse().ok()?),
                    "time" => line.time = text.parse().ok(),
                    _ => line.values.push((key, Value::of(text))),
                }
                if rest.take(',').is_none() {
                    break rest.take('}')?;
                }
            }
        }
        line.step = step?;
        rest.0.is_empty().then_some(line)
    }

    /// Returns the numeric values. NaN and infinite values, written as `null`, are returned as NaN.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().filter_map(|(key, value)| match value {
            Value::Number(number) => Some((key.as_str(), number.parse().ok()?)),
            Value::Null if !is_text(key) => Some((key.as_str(), f64::NAN)),
            _ => None,
        })
    }
}

/// Returns true if the key has text values.
pub(crate) fn is_text(key: &str) -> bool {
    key == "parameter"
}

impl Value {
    /// Parses the JSON `text` of a value.
    fn of(text: &str) -> Value {
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

/// The rest of a line. Numbers are taken as text: `serde_json` preserves all their digits only with a feature
/// that would slow down every other use of JSON.
struct Rest<'a>(&'a str);

impl<'a> Rest<'a> {
    /// Takes `sign`, if it comes next.
    fn take(&mut self, sign: char) -> Option<()> {
        self.0 = self.0.trim_start().strip_prefix(sign)?;
        Some(())
    }

    /// Takes the next value, and returns it with its JSON.
    fn next<T: Deserialize<'a>>(&mut self) -> Option<(T, &'a str)> {
        let text = self.0.trim_start();
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<T>();
        let value = values.next()?.ok()?;
        let (json, rest) = text.split_at_checked(values.byte_offset())?;
        self.0 = rest;
        Some((value, json))
    }
}

/// Returns the complete lines of a metrics file. A step lower than the one before replaces the earlier lines
/// of that step and later ones, as when a run resumes from an earlier checkpoint.
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
    fn lines_keep_their_order_and_every_digit() {
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
    fn steps_that_come_again_replace_those_that_were_there() {
        let text = b"{\"step\":1}\n{\"step\":2}\n{\"step\":2,\"val_loss\":1}\n{\"step\":3}\nwhat\n{\"step\":2,\"a\":1}\n{\"st";
        let lines = lines_of(LineReader::new(&text[..])).unwrap();
        assert_eq!(lines.iter().map(|line| line.step).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(lines[1].values.len(), 1);
    }
}
