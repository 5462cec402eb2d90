use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const FOLDER: &str = "tensorboard";

/// The folder in which a run writes TensorBoard files, if it writes any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EventFolder {
    /// The run writes no TensorBoard files.
    #[default]
    None,
    /// The folder `tensorboard` in the run folder.
    OfRun,
    /// A subfolder of this folder, named after the run folder.
    Of(PathBuf),
}

impl EventFolder {
    /// Returns the folder for the TensorBoard files of the run in `out`, if the run writes any.
    pub fn path(&self, out: &Path) -> Option<PathBuf> {
        match self {
            EventFolder::None => None,
            EventFolder::OfRun => Some(out.join(FOLDER)),
            EventFolder::Of(folder) => {
                // Canonicalized, because `.` and `..` have no file name.
                let whole = out.canonicalize().unwrap_or_else(|_| out.to_owned());
                Some(folder.join(whole.file_name().unwrap_or(FOLDER.as_ref())))
            }
        }
    }

    pub(super) fn is_none(&self) -> bool {
        *self == EventFolder::None
    }
}

impl Serialize for EventFolder {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            EventFolder::None => serializer.serialize_bool(false),
            EventFolder::OfRun => serializer.serialize_bool(true),
            EventFolder::Of(folder) => folder.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for EventFolder {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BoolOrFolder)
    }
}

impl JsonSchema for EventFolder {
    fn schema_name() -> Cow<'static, str> {
        "EventFolder".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "type": "boolean" }, { "type": "string", "minLength": 1 }] })
    }
}

struct BoolOrFolder;

impl Visitor<'_> for BoolOrFolder {
    type Value = EventFolder;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("true, false or a folder")
    }

    fn visit_bool<E: de::Error>(self, is_written: bool) -> Result<EventFolder, E> {
        Ok(if is_written { EventFolder::OfRun } else { EventFolder::None })
    }

    fn visit_str<E: de::Error>(self, folder: &str) -> Result<EventFolder, E> {
        match folder {
            "" => Err(E::invalid_value(Unexpected::Str(folder), &self)),
            folder => Ok(EventFolder::Of(folder.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::LogSection;
    use super::*;

    #[test]
    fn folder_follows_the_setting() {
        let path = |value: &str| {
            let log: LogSection = toml::from_str(&format!("tensorboard = {value}")).expect("a section");
            let written = toml::to_string(&log).expect("TOML");
            assert_eq!(toml::from_str::<LogSection>(&written).expect("a section"), log);
            log.tensorboard.path(Path::new("runs/fox"))
        };
        assert_eq!(path("true").as_deref(), Some(Path::new("runs/fox/tensorboard")));
        assert_eq!(path("false"), None);
        assert_eq!(path("\"boards\"").as_deref(), Some(Path::new("boards/fox")));
        for wrong in ["1", "\"\"", "[]"] {
            let problem = toml::from_str::<LogSection>(&format!("tensorboard = {wrong}")).expect_err("none");
            assert!(problem.to_string().contains("expected true, false or a folder"), "{problem}");
        }
    }
}
