//! The settings of parts that a program adds, such as `[model.extra]`: which keys the parts read.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor, value};
use serde::forward_to_deserialize_any;
use serde_json::{Map, Value};

/// A key that no part reads.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{section}.{key}: no part of this program reads this setting{}: remove it or correct it", only(.known))]
pub struct UnreadKey {
    /// The section, such as `model.extra`.
    pub section: String,
    /// The key in the section.
    pub key: String,
    /// The keys of the section that parts read.
    pub known: Vec<&'static str>,
}

fn only(names: &[&str]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    if names.is_empty() { String::new() } else { format!(", only {}", names.join(", ")) }
}

/// The keys that parts have read, by section.
#[derive(Debug, Default)]
pub struct ReadKeys(RefCell<BTreeMap<String, Keys>>);

#[derive(Debug, Default)]
struct Keys {
    names: BTreeSet<&'static str>,
    /// True if a part reads keys of any name, as for a map.
    has_all: bool,
}

impl ReadKeys {
    /// Notes that a part reads `section` into a `T`: the fields of a structure, or all keys for any other type.
    pub fn note<T: DeserializeOwned>(&self, section: &str) {
        let mut fields = None;
        // Always fails: the deserializer has no values.
        let _ = T::deserialize(FieldsOf(&mut fields));
        let mut read = self.0.borrow_mut();
        let keys = read.entry(section.to_owned()).or_default();
        match fields {
            Some(fields) => keys.names.extend(fields),
            None => keys.has_all = true,
        }
    }

    /// Returns whether a part has read `section`.
    pub fn has(&self, section: &str) -> bool {
        self.0.borrow().contains_key(section)
    }

    /// Fails if `section`, which contains `keys`, has a key that no part has read.
    ///
    /// # Errors
    ///
    /// [`UnreadKey`] with the first such key.
    pub fn check(&self, section: &str, keys: &Map<String, Value>) -> Result<(), UnreadKey> {
        let (read, none) = (self.0.borrow(), Keys::default());
        let Keys { names, has_all } = read.get(section).unwrap_or(&none);
        match keys.keys().find(|key| !has_all && !names.contains(key.as_str())) {
            None => Ok(()),
            Some(key) => Err(UnreadKey {
                section: section.to_owned(),
                key: key.clone(),
                known: names.iter().copied().collect(),
            }),
        }
    }
}

/// A deserializer that notes the fields of a structure, and then fails.
struct FieldsOf<'a>(&'a mut Option<&'static [&'static str]>);

impl<'de> Deserializer<'de> for FieldsOf<'_> {
    type Error = value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(value::Error::custom("no values"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = Some(fields);
        self.deserialize_any(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_some(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use serde_json::json;

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only the names of the fields are read")]
    struct Settings {
        #[serde(alias = "ranks")]
        rank: usize,
        #[serde(default)]
        alpha: f64,
    }

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only the names of the fields are read")]
    struct Wrapped(Option<Settings>);

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only the names of the fields are read")]
    struct Open {
        #[serde(flatten)]
        rest: Map<String, Value>,
    }

    fn keys(value: Value) -> Map<String, Value> {
        let Value::Object(keys) = value else { panic!("a table") };
        keys
    }

    #[test]
    fn unread_keys_are_named_with_those_that_are_read() {
        let read = ReadKeys::default();
        let (some, other) = (keys(json!({ "ranks": 2, "alpha": 1.0 })), keys(json!({ "alhpa": 1.0 })));
        assert!(read.check("model.extra", &some).is_err() && !read.has("model.extra"));
        read.note::<Wrapped>("model.extra");
        read.check("model.extra", &some).unwrap();
        let message = read.check("model.extra", &other).unwrap_err().to_string();
        assert_eq!(
            message,
            "model.extra.alhpa: no part of this program reads this setting, only `alpha`, `rank`, `ranks`: remove it or \
             correct it"
        );
        assert!(read.check("model.extra.lora", &some).is_err(), "another section");
    }

    #[test]
    fn a_map_reads_all_keys() {
        for note in [ReadKeys::note::<Map<String, Value>>, ReadKeys::note::<Open>] {
            let read = ReadKeys::default();
            note(&read, "loss.extra");
            read.check("loss.extra", &keys(json!({ "any": 1 }))).unwrap();
        }
    }
}
