//! Named values of a logged step, in addition to those of every step.

use serde::ser::{Serialize, SerializeMap, Serializer};

/// Named values of one step, in the order in which they were set. Each is a separate key in `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Values(Vec<(String, f64)>);

impl Values {
    /// Returns the value called `name`.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }

    /// Sets the value of `name`.
    pub fn set(&mut self, name: impl Into<String>, value: f64) {
        let name = name.into();
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => self.0.push((name, value)),
        }
    }

    /// Iterates over names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// Sets all of `values`.
    pub fn extend(&mut self, values: Values) {
        values.0.into_iter().for_each(|(name, value)| self.set(name, value));
    }

    /// Returns whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Values {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        self.0.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
        map.end()
    }
}
