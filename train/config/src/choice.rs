use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::{
    BoolDeserializer, I64Deserializer, MapAccessDeserializer, StrDeserializer, U64Deserializer,
};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const AUTO: &str = "auto";

/// A value, or `"auto"`. [`Config::settle`](super::Config::settle) replaces choices that depend on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice<T> {
    /// Leave the value to the device or to the tokenizer.
    Auto,
    /// The value that the user has set.
    Is(T),
}

impl<T> Choice<T> {
    /// Returns the value that the user has set, if any.
    pub fn given(self) -> Option<T> {
        match self {
            Choice::Auto => None,
            Choice::Is(value) => Some(value),
        }
    }
}

impl<T: Default> Default for Choice<T> {
    fn default() -> Self {
        Choice::Is(T::default())
    }
}

impl<T> From<T> for Choice<T> {
    fn from(value: T) -> Self {
        Choice::Is(value)
    }
}

impl<T: Serialize> Serialize for Choice<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Choice::Auto => serializer.serialize_str(AUTO),
            Choice::Is(value) => value.serialize(serializer),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Choice<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AutoOr(PhantomData))
    }
}

impl<T: JsonSchema> JsonSchema for Choice<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("Choice_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "const": AUTO }, generator.subschema_for::<T>()] })
    }
}

struct AutoOr<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for AutoOr<T> {
    type Value = Choice<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"auto\", or a value")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        match text {
            AUTO => Ok(Choice::Auto),
            _ => T::deserialize(StrDeserializer::new(text)).map(Choice::Is),
        }
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Self::Value, E> {
        T::deserialize(BoolDeserializer::new(value)).map(Choice::Is)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
        T::deserialize(I64Deserializer::new(number)).map(Choice::Is)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
        T::deserialize(U64Deserializer::new(number)).map(Choice::Is)
    }

    fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Choice::Is)
    }
}
