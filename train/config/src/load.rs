use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value as Json};
use toml::{Table, Value};

use super::Config;
use super::sections::key_of_flag;

/// Reasons why a configuration cannot be used. Every message names the key or file and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}; name a TOML file, such as one in configs/")]
    Read { path: PathBuf, source: std::io::Error },
    /// The file is not valid TOML, or has an unknown key or a value of the wrong type.
    #[error("{path}: {message}")]
    Parse { path: PathBuf, message: String },
    /// An override is not `section.key=value`.
    #[error("--set {argument}: write it as section.key=value, for example --set train.steps=100")]
    Override { argument: String },
    /// An override names an unknown key or has a value of the wrong type.
    #[error("--set {argument}: {message}")]
    OverrideValue { argument: String, message: String },
    /// Values that contradict each other or are out of range.
    #[error("{}", list(.problems))]
    Invalid { problems: Vec<String> },
}

impl ConfigError {
    /// Creates an error about a mistake in the configuration or the arguments.
    pub fn invalid(problem: impl Into<String>) -> Self {
        ConfigError::Invalid { problems: vec![problem.into()] }
    }
}

impl Config {
    /// Returns the section `[experiment]`, which holds a program's own keys.
    ///
    /// # Errors
    ///
    /// If the section has keys unknown to `T`, or values of other types.
    pub fn experiment<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        typed("experiment", &self.experiment)
    }
}

/// Converts a section of program-defined keys to the program's type.
pub fn typed<T: DeserializeOwned>(section: &str, keys: &Map<String, Json>) -> Result<T, ConfigError> {
    serde_json::from_value(Json::Object(keys.clone()))
        .map_err(|error| ConfigError::invalid(format!("{section}: {error}")))
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

/// Reads `path` and applies `overrides` (`section.key=value`). Checks keys and types, but not values.
pub fn load(path: &Path, overrides: &[String]) -> Result<Config, ConfigError> {
    let (_, mut table, mut config) = read(path)?;
    for argument in overrides {
        config = apply(&mut table, argument)?;
    }
    Ok(config)
}

pub(super) fn read(path: &Path) -> Result<(String, Table, Config), ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let parse_error = |error: toml::de::Error| ConfigError::Parse {
        path: path.to_owned(),
        message: plain(error.to_string().trim_end()) + &did_you_mean(error.message()),
    };
    // Parsed from the text, so that an error shows the line in the file.
    let config: Config = toml::from_str(&text).map_err(parse_error)?;
    let table: Table = toml::from_str(&text).map_err(parse_error)?;
    match non_finite(&table) {
        Some(key) => {
            Err(ConfigError::Parse { path: path.to_owned(), message: format!("{key}: {NON_FINITE}") })
        }
        None => Ok((text, table, config)),
    }
}

const NON_FINITE: &str =
    "expected a finite number: checkpoints store program-defined keys as JSON, which has no NaN or infinity";

/// Returns the first program-defined key whose value contains a NaN or infinite number.
fn non_finite(table: &Table) -> Option<String> {
    fn is_finite(value: &Value) -> bool {
        match value {
            Value::Float(number) => number.is_finite(),
            Value::Array(values) => values.iter().all(is_finite),
            Value::Table(values) => values.values().all(is_finite),
            _ => true,
        }
    }
    ["model.extra", "data.extra", "loss.extra", "optim.extra", "experiment"].into_iter().find_map(|section| {
        let mut names = section.split('.');
        let first = table.get(names.next()?)?;
        let keys = names.try_fold(first, |value, name| value.get(name))?.as_table()?;
        let (key, _) = keys.iter().find(|(_, value)| !is_finite(value))?;
        Some(format!("{section}.{key}"))
    })
}

/// Rewrites the parser's message in terms of the configuration instead of Rust.
fn plain(message: &str) -> String {
    let whole = "expected a whole number, 0 or more";
    [
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

const TOO_LARGE: &str = "the number is too large: whole numbers go from -9223372036854775808 to \
                         9223372036854775807";

/// Minimum similarity of two names, from 0 to 1, for one to be a typo of the other.
const ALIKE: f64 = 0.7;

/// Suggests the quoted name that resembles the unknown name in the parser's `message`.
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

fn is_whole(text: &str) -> bool {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    digits.starts_with(|first: char| first.is_ascii_digit())
        && digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_')
}

pub(super) fn apply(table: &mut Table, argument: &str) -> Result<Config, ConfigError> {
    let malformed = || ConfigError::Override { argument: shown(argument) };
    let (path, value) = argument.split_once('=').ok_or_else(malformed)?;
    let (path, text) = (path.trim(), value.trim());
    let (sections, key) = path.rsplit_once('.').ok_or_else(|| match key_of_flag(path) {
        Some(key) => {
            let message = format!("a key needs its section: --set {key}={text}");
            ConfigError::OverrideValue { argument: shown(argument), message }
        }
        None => malformed(),
    })?;
    if path.split('.').any(str::is_empty) {
        return Err(malformed());
    }
    let refused = |message| ConfigError::OverrideValue { argument: shown(argument), message };
    // `--set shard.strategy=NO_SHARD` needs no quotes.
    let parsed = toml::from_str::<Table>(&format!("value = {text}")).ok();
    let value = parsed.and_then(|mut table| table.remove("value")).unwrap_or_else(|| Value::from(text));
    if value.is_str() && is_whole(text) && text.replace('_', "").parse::<i64>().is_err() {
        return Err(refused(TOO_LARGE.to_owned()));
    }
    section(table, sections).ok_or_else(malformed)?;
    let mut read = |value: Value| {
        if let Some(section) = section(table, sections) {
            section.insert(key.to_owned(), value);
        }
        Value::Table(table.clone()).try_into::<Config>()
    };
    let error = match read(value.clone()) {
        Ok(config) => {
            return match non_finite(table) {
                Some(_) => Err(refused(NON_FINITE.to_owned())),
                None => Ok(config),
            };
        }
        Err(error) => error,
    };
    // Retried as a string, so that users need not quote it for both the shell and TOML.
    let may_be_text = !matches!(value, Value::String(_) | Value::Array(_) | Value::Table(_));
    let error = match may_be_text.then(|| read(Value::String(text.to_owned()))) {
        Some(Ok(config)) => return Ok(config),
        Some(Err(of_text)) if !of_text.message().starts_with("invalid type") => of_text,
        _ => error,
    };
    let message = match expectation(&error, path, &value) {
        Some(message) => message,
        // The message of the key's own type already says what it expects.
        None if !["unknown ", "invalid "].iter().any(|word| error.message().starts_with(word)) => {
            error.message().to_owned()
        }
        None => {
            let text = error.to_string();
            plain(&text.trim().replace('\n', " ")) + &did_you_mean(error.message())
        }
    };
    Err(refused(message))
}

/// Returns the section at `path`, such as `model.extra`, creating it if missing; `None` if `path` contains a value.
fn section<'a>(table: &'a mut Table, path: &str) -> Option<&'a mut Table> {
    path.split('.').try_fold(table, |table, name| {
        table.entry(name).or_insert_with(|| Value::Table(Table::new())).as_table_mut()
    })
}

/// Describes the expected type, with an example, if the parser's `error` is about the type of `value`.
fn expectation(error: &toml::de::Error, path: &str, value: &Value) -> Option<String> {
    let (found, expected) = error.message().split_once(", expected ")?;
    let found = found.strip_prefix("invalid type: ").or(found.strip_prefix("invalid value: "))?;
    // An error inside a list or a table is not about the whole value.
    let is_inside = match value {
        Value::Array(_) => found != "sequence",
        Value::Table(_) => found != "map",
        _ => false,
    };
    let (_, kind, example) = KINDS.iter().find(|(name, ..)| !is_inside && expected == *name)?;
    let quote = if example.contains([' ', '"']) { "'" } else { "" };
    Some(format!("expected {kind}, as in --set {quote}{path}={example}{quote}"))
}

const KINDS: &[(&str, &str, &str)] = &[
    ("u64", "a whole number, 0 or more", "8"),
    ("usize", "a whole number, 0 or more", "8"),
    ("f64", "a number", "0.1"),
    ("a boolean", "true or false", "true"),
    ("a string", "a string", "text"),
    ("path string", "a path", "folder/name"),
    ("\"auto\", or a value", "auto or a value", "auto"),
    ("a sequence", "an array", "[\"one\", \"two\"]"),
    ("internally tagged enum RopeScaling", "a table", "{ kind = \"linear\", factor = 4.0 }"),
];

fn shown(argument: &str) -> String {
    const MOST: usize = 80;
    match argument.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &argument[..end]),
        None => argument.to_owned(),
    }
}
