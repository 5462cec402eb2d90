//! Reads keys of a JSON file, with errors that name the file and the key.

use std::path::{Path, PathBuf};

use kiln_sys::files;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::CheckpointError;
use crate::error::Result;

/// Maximum size of a file. The index of a model with many thousand tensors has a few million bytes.
const MAX_BYTES: u64 = 1 << 28;

/// A JSON object in a file. A key whose value is null counts as absent.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    path: PathBuf,
    /// Prefix of key names in messages, such as `rope_scaling.`.
    prefix: String,
    pub(super) map: Map<String, Value>,
}

impl Keys {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = files::read(path, MAX_BYTES).map_err(CheckpointError::io("read", path))?;
        let json = |problem: String| CheckpointError::Json { path: path.to_owned(), problem };
        match serde_json::from_slice(&text) {
            Ok(Value::Object(map)) => Ok(Keys { path: path.to_owned(), prefix: String::new(), map }),
            Ok(_) => Err(json("it is not an object".to_owned())),
            Err(error) => Err(json(error.to_string())),
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Keys>> {
        let prefix = format!("{}{key}.", self.prefix);
        let map = self.typed(key, "an object")?;
        Ok(map.map(|map| Keys { path: self.path.clone(), prefix, map }))
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number of zero or more")
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number")
    }

    /// Returns a boolean; false if the key is absent.
    pub(super) fn flag(&self, key: &str) -> Result<bool> {
        Ok(self.typed(key, "true or false")?.unwrap_or(false))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string")
    }

    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        self.typed(key, "an array of strings")
    }

    /// Returns an array of sizes; empty if the key is absent.
    pub(super) fn sizes(&self, key: &str) -> Result<Vec<usize>> {
        Ok(self.typed(key, "an array of whole numbers")?.unwrap_or_default())
    }

    /// Returns token ids, written as a number or an array of numbers; empty if the key is absent.
    pub(super) fn ids(&self, key: &str) -> Result<Vec<u32>> {
        let expected = "a token id or an array of token ids";
        match self.get(key) {
            Some(Value::Array(_)) => Ok(self.typed(key, expected)?.unwrap_or_default()),
            _ => Ok(self.typed(key, expected)?.into_iter().collect()),
        }
    }

    /// Returns the value of a required key; fails if `value` is `None`.
    pub(super) fn needed<T>(&self, key: &str, value: Result<Option<T>>) -> Result<T> {
        value?.ok_or_else(|| self.problem(key, "is missing"))
    }

    pub(super) fn problem(&self, key: &str, problem: impl Into<String>) -> CheckpointError {
        let (path, key) = (self.path.clone(), format!("{}{key}", self.prefix));
        CheckpointError::Key { path, key, problem: problem.into() }
    }

    pub(super) fn unsupported(&self, key: &str, supported: &'static str) -> CheckpointError {
        let value = self.map.get(key).map_or_else(|| "(absent)".to_owned(), short);
        let (path, key) = (self.path.clone(), format!("{}{key}", self.prefix));
        CheckpointError::Unsupported { path, key, value, supported }
    }

    fn typed<'a, T: Deserialize<'a>>(&'a self, key: &str, expected: &str) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = |_| self.problem(key, format!("is {}, expected {expected}", short(value)));
        T::deserialize(value).map(Some).map_err(wrong)
    }
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text,
    }
}
