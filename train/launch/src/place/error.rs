//! What can be wrong with the description of a place.

/// Why the place of this process cannot be found. Messages name the variable or flag, its value, and what to
/// do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    /// A value that cannot be read. `value`: shortened; `problem`: what is wrong and what to do.
    #[error("{name}={value}: {problem}")]
    Value { name: String, value: String, problem: String },
    /// A value that is needed and not there. `problem`: why it is needed and what to do.
    #[error("{name} is not set: {problem}")]
    Missing { name: String, problem: String },
    /// Values that cannot all be true. `values`: the values, as `NAME=value`; `problem`: why, and what to do.
    #[error("{values} contradict each other: {problem}")]
    Contradiction { values: String, problem: String },
}

impl EnvError {
    pub(super) fn value(name: &str, value: &str, problem: impl Into<String>) -> Self {
        EnvError::Value { name: name.into(), value: shortened(value), problem: problem.into() }
    }

    pub(super) fn missing(name: &str, problem: impl Into<String>) -> Self {
        EnvError::Missing { name: name.into(), problem: problem.into() }
    }

    /// Values that are text.
    pub(super) fn contradicting(values: [(&str, &str); 2], problem: &str) -> Self {
        let values = values.map(|(name, value)| format!("{name}={}", shortened(value)));
        EnvError::Contradiction { values: values.join(" and "), problem: problem.to_owned() }
    }

    pub(super) fn contradiction(values: &[(&str, usize)], problem: impl Into<String>) -> Self {
        let values: Vec<_> = values.iter().map(|(name, value)| format!("{name}={value}")).collect();
        EnvError::Contradiction { values: values.join(" and "), problem: problem.into() }
    }
}

/// Characters of a value that messages and the doctor show.
const SHOWN: usize = 120;

/// A value as messages show it: one line, not too long.
pub(super) fn shortened(value: &str) -> String {
    let mut text: String = value
        .chars()
        .take(SHOWN)
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect();
    if value.chars().nth(SHOWN).is_some() {
        text.push('…');
    }
    text
}
