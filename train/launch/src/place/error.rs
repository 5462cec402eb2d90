/// The reason why this process has no valid place. Messages name the variable or flag, its value, and the fix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    /// A value, shortened, is invalid. `problem`: what is wrong, and the fix.
    #[error("{name}={value}: {problem}")]
    Value { name: String, value: String, problem: String },
    /// A required value is missing. `problem`: why it is required, and the fix.
    #[error("{name} is not set: {problem}")]
    Missing { name: String, problem: String },
    /// Values, given as `NAME=value`, contradict each other. `problem`: the contradiction and the fix.
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

    pub(super) fn contradicting(values: [(&str, &str); 2], problem: &str) -> Self {
        let values = values.map(|(name, value)| format!("{name}={}", shortened(value)));
        EnvError::Contradiction { values: values.join(" and "), problem: problem.to_owned() }
    }

    pub(super) fn contradiction(values: &[(&str, usize)], problem: impl Into<String>) -> Self {
        let values: Vec<_> = values.iter().map(|(name, value)| format!("{name}={value}")).collect();
        EnvError::Contradiction { values: values.join(" and "), problem: problem.into() }
    }
}

const SHOWN: usize = 120;

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
