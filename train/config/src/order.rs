//! The sections and keys of a configuration in order of declaration, which a JSON schema does not keep.

use serde::de::value::{Error, MapDeserializer, StrDeserializer};
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error as _, IntoDeserializer, MapAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::Config;

type Names = &'static [&'static str];

/// Returns every section with its keys.
pub(super) fn sections() -> Vec<(&'static str, Names)> {
    let mut found = Vec::new();
    // Deserializing a struct passes its field names first, so no values are needed.
    let read = Config::deserialize(Sections(&mut found));
    debug_assert!(read.is_ok(), "every section has a default: {read:?}");
    found
}

/// A deserializer of a configuration with every section, which collects the sections' names.
struct Sections<'a>(&'a mut Vec<(&'static str, Names)>);

impl<'de> Deserializer<'de> for Sections<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Error> {
        Err(Error::custom("a configuration is a struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: Names,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_map(Walk { sections: fields.iter(), section: "", found: self.0 })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Visits the sections one after the other.
struct Walk<'a> {
    sections: std::slice::Iter<'static, &'static str>,
    section: &'static str,
    found: &'a mut Vec<(&'static str, Names)>,
}

impl<'de> MapAccess<'de> for Walk<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        let Some(section) = self.sections.next() else { return Ok(None) };
        self.section = section;
        let name: StrDeserializer<'_, Error> = section.into_deserializer();
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        seed.deserialize(Keys { section: self.section, found: self.found })
    }
}

/// A deserializer of a section without any key set, which collects the keys' names.
struct Keys<'a> {
    section: &'static str,
    found: &'a mut Vec<(&'static str, Names)>,
}

impl<'de> Deserializer<'de> for Keys<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let empty: [(&str, &str); 0] = [];
        visitor.visit_map(MapDeserializer::new(empty.into_iter()))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: Names,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.found.push((self.section, fields));
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}
/// Returns the full name of the key that a flag such as `--lr` or `--seq-len` would set; `None` if there is no
/// such key, or several sections have one.
pub fn key_of_flag(flag: &str) -> Option<String> {
    let name = flag.trim_start_matches('-').replace('-', "_");
    let mut found = sections().into_iter().filter(|(_, keys)| keys.iter().any(|key| **key == *name));
    match (found.next(), found.next()) {
        (Some((section, _)), None) => Some(format!("{section}.{name}")),
        _ => None,
    }
}
