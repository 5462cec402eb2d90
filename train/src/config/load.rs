//! From a file and `--set` overrides to a [`Config`].

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::Config;

/// Why a configuration cannot be used. Every message names the key or file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "cannot read the configuration {path}: {source}; name a TOML file, such as one in configs/"
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is not TOML, or has an unknown key or a value of the wrong type.
    #[error("{path}: {message}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong, with line and column.
        message: String,
    },
    /// An override is not `section.key=value`.
    #[error("--set {argument}: write it as section.key=value, for example --set train.steps=100")]
    Override {
        /// The argument.
        argument: String,
    },
    /// An override names an unknown key or has a value of the wrong type.
    #[error("--set {argument}: {message}")]
    OverrideValue {
        /// The argument.
        argument: String,
        /// What is wrong.
        message: String,
    },
    /// Values that do not fit together.
    #[error("{}", list(.problems))]
    Invalid {
        /// One line each.
        problems: Vec<String>,
    },
}

impl ConfigError {
    /// A mistake in the configuration or the arguments.
    pub fn invalid(problem: impl Into<String>) -> Self {
        ConfigError::Invalid { problems: vec![problem.into()] }
    }
}

fn list(problems: &[String]) -> String {
    match problems {
        [problem] => problem.clone(),
        problems => {
            let lines: Vec<_> = problems.iter().map(|problem| format!("\n  - {problem}")).collect();
            format!("the configuration has {} problems:{}", problems.len(), lines.concat())
        }
    }
}

/// Reads `path` and applies `overrides` (`section.key=value`; the value is TOML, or else a string)
/// on top. Checks keys and types, not yet the values.
pub fn load(path: &Path, overrides: &[String]) -> Result<Config, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let parse_error = |error: toml::de::Error| ConfigError::Parse {
        path: path.to_owned(),
        message: plain(error.to_string().trim_end()) + &did_you_mean(error.message()),
    };
    // From the text, so that a mistake in the file is shown with its line.
    let mut config: Config = toml::from_str(&text).map_err(parse_error)?;
    let mut table: Table = toml::from_str(&text).map_err(parse_error)?;
    for argument in overrides {
        apply(&mut table, argument)?;
        config = Value::Table(table.clone()).try_into().map_err(|error: toml::de::Error| {
            ConfigError::OverrideValue {
                argument: argument.clone(),
                message: plain(&error.to_string().trim().replace('\n', " "))
                    + &did_you_mean(error.message()),
            }
        })?;
    }
    Ok(config)
}

/// The parser's message in the words of the configuration rather than of Rust.
fn plain(message: &str) -> String {
    let whole = "expected a whole number, 0 or more";
    [
        // What TOML says of a number that it cannot hold.
        ("u64 value was too large", TOO_LARGE),
        ("integer number overflowed", TOO_LARGE),
        ("unknown field", "unknown key"),
        ("unknown variant", "unknown value"),
        ("expected f64", "expected a number"),
        ("expected u64", whole),
        ("expected usize", whole),
    ]
    .iter()
    .fold(message.to_owned(), |message, (from, to)| message.replace(from, to))
}

/// What is said of a whole number that TOML has no room for.
const TOO_LARGE: &str = "the number is too large: whole numbers go from -9223372036854775808 to \
                         9223372036854775807";

/// How alike two names are at least, from 0 to 1, if one is a slip of the pen for the other.
const ALIKE: f64 = 0.7;

/// A hint at the name that was meant, if the parser's `message` is about an unknown one: it quotes that and
/// all that it knows.
fn did_you_mean(message: &str) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let unknown = quoted.next().filter(|_| message.starts_with("unknown "));
    let Some(unknown) = unknown.map(str::to_lowercase) else { return String::new() };
    quoted
        .map(|name| (strsim::jaro(&unknown, &name.to_lowercase()), name))
        .filter(|(alike, _)| *alike > ALIKE)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map_or_else(String::new, |(_, name)| format!("; did you mean `{name}`?"))
}

/// Whether a text is a whole number, of whatever size.
fn is_whole(text: &str) -> bool {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    digits.starts_with(|first: char| first.is_ascii_digit())
        && digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_')
}

fn apply(table: &mut Table, argument: &str) -> Result<(), ConfigError> {
    let malformed = || ConfigError::Override { argument: argument.to_owned() };
    let (path, value) = argument.split_once('=').ok_or_else(malformed)?;
    let (section, key) = path.trim().split_once('.').ok_or_else(malformed)?;
    if section.is_empty() || key.is_empty() || key.contains('.') {
        return Err(malformed());
    }
    let entry = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
    let section = entry.as_table_mut().ok_or_else(malformed)?;
    let (text, argument) = (value.trim(), argument.to_owned());
    let value = match parse_value(text) {
        Value::String(_) if is_whole(text) && text.replace('_', "").parse::<i64>().is_err() => {
            return Err(ConfigError::OverrideValue { argument, message: TOO_LARGE.to_owned() });
        }
        value => value,
    };
    section.insert(key.to_owned(), value);
    Ok(())
}

/// A TOML value, or the text itself where it is none: `--set shard.strategy=NO_SHARD` needs no
/// quotes.
fn parse_value(text: &str) -> Value {
    toml::from_str::<Table>(&format!("value = {text}"))
        .ok()
        .and_then(|mut table| table.remove("value"))
        .unwrap_or_else(|| Value::String(text.to_owned()))
}
