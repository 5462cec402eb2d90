//! Keys of a JSON file, with errors that name the file and the key.

use std::path::{Path, PathBuf};

use kiln_sys::files;
use serde_json::{Map, Value};

use super::HuggingFaceError;

/// Maximum size of a file. The index of a model of many thousand tensors has a few million bytes.
const MAX_BYTES: u64 = 1 << 28;

/// An object of a JSON file. A key whose value is null counts as absent.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    path: PathBuf,
    /// Prefix of names in messages, such as `rope_scaling.`.
    prefix: String,
    map: Map<String, Value>,
}

impl Keys {
    /// Reads a file that contains an object.
    pub(super) fn read(path: &Path) -> Result<Self, HuggingFaceError> {
        let text = files::read(path, MAX_BYTES).map_err(HuggingFaceError::io("read", path))?;
        let json = |problem: String| HuggingFaceError::Json { path: path.to_owned(), problem };
        match serde_json::from_slice(&text) {
            Ok(Value::Object(map)) => Ok(Keys { path: path.to_owned(), prefix: String::new(), map }),
            Ok(_) => Err(json("it holds no object".to_owned())),
            Err(error) => Err(json(error.to_string())),
        }
    }

    /// Returns whether it is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Returns all keys.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str)
    }

    /// Returns the value of a key.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Returns whether the value of the key is null.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// Returns a nested object.
    pub(super) fn object(&self, key: &str) -> Result<Option<Keys>, HuggingFaceError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Value::Object(map) = value else { return Err(self.wrong(key, "an object")) };
        let prefix = format!("{}{key}.", self.prefix);
        Ok(Some(Keys { path: self.path.clone(), prefix, map: map.clone() }))
    }

    /// Returns a size.
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, HuggingFaceError> {
        self.typed(key, "a whole number of zero or more", |value| {
            value.as_u64().and_then(|size| usize::try_from(size).ok())
        })
    }

    /// Returns a required size.
    pub(super) fn needed(&self, key: &str) -> Result<usize, HuggingFaceError> {
        self.size(key)?.ok_or_else(|| self.problem(key, "is missing"))
    }

    /// Returns a number.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, HuggingFaceError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// Returns a required number.
    pub(super) fn needed_number(&self, key: &str) -> Result<f64, HuggingFaceError> {
        self.number(key)?.ok_or_else(|| self.problem(key, "is missing"))
    }

    /// Returns a boolean; false if it is absent.
    pub(super) fn flag(&self, key: &str) -> Result<bool, HuggingFaceError> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// Returns a string.
    pub(super) fn text(&self, key: &str) -> Result<Option<String>, HuggingFaceError> {
        self.typed(key, "a text", |value| value.as_str().map(str::to_owned))
    }

    /// Returns an array of strings.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<String>>, HuggingFaceError> {
        self.typed(key, "a list of texts", |value| {
            value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned)).collect()
        })
    }

    /// Returns an array of sizes; empty if it is absent.
    pub(super) fn sizes(&self, key: &str) -> Result<Vec<usize>, HuggingFaceError> {
        let size = |value: &Value| value.as_u64().and_then(|size| usize::try_from(size).ok());
        let sizes =
            self.typed(key, "a list of whole numbers", |value| value.as_array()?.iter().map(size).collect())?;
        Ok(sizes.unwrap_or_default())
    }

    /// Returns token ids: a number or an array of numbers; empty if it is absent.
    pub(super) fn ids(&self, key: &str) -> Result<Vec<u32>, HuggingFaceError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.typed(key, "a token id or a list of token ids", |value| match value {
            Value::Array(ids) => ids.iter().map(id).collect::<Option<Vec<_>>>(),
            value => id(value).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// Returns the error for a problem with a key.
    pub(super) fn problem(&self, key: &str, problem: &str) -> HuggingFaceError {
        HuggingFaceError::Key {
            path: self.path.clone(),
            key: format!("{}{key}", self.prefix),
            problem: problem.to_owned(),
        }
    }

    /// Returns the error for a value that Kiln's decoder does not support.
    pub(super) fn unsupported(&self, key: &str, supported: &'static str) -> HuggingFaceError {
        let value = self.map.get(key).map_or_else(|| "(absent)".to_owned(), short);
        HuggingFaceError::Unsupported {
            path: self.path.clone(),
            key: format!("{}{key}", self.prefix),
            value,
            supported,
        }
    }

    fn wrong(&self, key: &str, expected: &str) -> HuggingFaceError {
        let value = self.map.get(key).map(short).unwrap_or_default();
        self.problem(key, &format!("is {value}, expected {expected}"))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, HuggingFaceError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(self.wrong(key, expected)),
            },
        }
    }
}

/// Formats a value as JSON, truncated if it is long.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text,
    }
}
