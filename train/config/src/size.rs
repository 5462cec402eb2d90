use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes with a unit, such as `46GiB` or `1.5 TB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

/// Units and their bytes; a number is written with the first unit that divides it.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" is not a size: write it as in \"46GiB\" or \"500MB\"");
        let (unit, bytes) = UNITS
            .iter()
            .find(|(unit, _)| {
                let start = text.len().saturating_sub(unit.len());
                text.get(start..).is_some_and(|end| end.eq_ignore_ascii_case(unit))
            })
            .ok_or_else(wrong)?;
        let number: f64 = text[..text.len() - unit.len()].trim().parse().map_err(|_| wrong())?;
        let size = number * *bytes as f64;
        let valid = size.is_finite() && size >= 1.0;
        if valid { Ok(ByteSize(size as u64)) } else { Err(wrong()) }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Text)
    }
}

impl JsonSchema for ByteSize {
    fn schema_name() -> Cow<'static, str> {
        "ByteSize".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": "^[0-9.]+ ?([KMGTkmgt][Ii]?)?[Bb]$" })
    }
}

struct Text;

impl Visitor<'_> for Text {
    type Value = ByteSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as \"46GiB\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
        text.parse().map_err(E::custom)
    }
}

/// Writes the size exactly, so that it can be read again.
impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |(_, bytes): &&(&str, u64)| self.0.is_multiple_of(*bytes);
        let (unit, bytes) = UNITS.iter().find(fits).unwrap_or(&("B", 1));
        write!(f, "{}{unit}", self.0 / bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::ByteSize;

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes) in
            [("46GiB", 46 << 30), ("1.5 tib", 3 << 39), ("500MB", 500_000_000), ("7B", 7), ("0.5KiB", 512)]
        {
            let size: ByteSize = text.parse().expect("a size");
            assert_eq!(size, ByteSize(bytes), "{text}");
            assert_eq!(size.to_string().parse(), Ok(size), "{text}");
        }
        assert_eq!(ByteSize(46 << 30).to_string(), "46GiB");
        for wrong in ["", "46", "GiB", "-1GiB", "0B", "nanGiB", "infB", "1e400B", "46 Gi", "4,6GiB"] {
            let problem = wrong.parse::<ByteSize>().expect_err("no size");
            assert!(problem.starts_with(&format!("\"{wrong}\" is not a size")), "{problem}");
        }
    }
}
