use std::cell::RefCell;

use serde::de::value::{Error, MapDeserializer};
use serde::de::{Deserialize, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::Config;

pub(super) type SectionKeys = Vec<(&'static str, &'static [&'static str])>;

/// Returns every section with its keys in order of declaration, which a JSON schema does not keep.
pub(super) fn sections() -> SectionKeys {
    let found = RefCell::default();
    // Deserializing a struct passes its field names first, so no values are needed.
    let read = Config::deserialize(Names { section: None, found: &found });
    debug_assert!(read.is_ok(), "every section has a default: {read:?}");
    found.into_inner()
}

/// A deserializer that presents every section without keys, and collects the names of sections and keys.
#[derive(Clone, Copy)]
struct Names<'a> {
    /// `None` for the whole configuration.
    section: Option<&'static str>,
    found: &'a RefCell<SectionKeys>,
}

impl<'de> IntoDeserializer<'de> for Names<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Names<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(MapDeserializer::new(std::iter::empty::<(&str, Names<'_>)>()))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let Some(section) = self.section else {
            let sections = fields.iter().map(|name| (*name, Names { section: Some(name), ..self }));
            return visitor.visit_map(MapDeserializer::new(sections));
        };
        self.found.borrow_mut().push((section, fields));
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Flags of other programs, with the key that has their meaning.
const ELSEWHERE: [(&str, &str); 6] = [
    ("batch_size", "train.global_batch"),
    ("learning_rate", "optim.lr"),
    ("max_steps", "train.steps"),
    ("model", "model.preset"),
    ("num_steps", "train.steps"),
    ("per_device_train_batch_size", "train.micro_batch"),
];

/// Returns the key that a flag such as `--seq-len` would set; `None` if there is no such key, or several.
pub fn key_of_flag(flag: &str) -> Option<String> {
    let name = flag.trim_start_matches('-').replace('-', "_");
    if let Some((_, key)) = ELSEWHERE.iter().find(|(other, _)| *other == name) {
        return Some((*key).to_owned());
    }
    let mut found = sections().into_iter().filter(|(_, keys)| keys.iter().any(|key| **key == *name));
    match (found.next(), found.next()) {
        (Some((section, _)), None) => Some(format!("{section}.{name}")),
        _ => None,
    }
}
