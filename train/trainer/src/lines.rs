//! Files that users write with one record per line: JSON objects, or prompts.

use std::io::{self, ErrorKind};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::EvalError;
use kiln_data::describe_json;
use kiln_sys::files::{self, MAX_WHOLE};

/// Extensions of files of JSON lines.
const JSON_LINES: [&str; 2] = ["jsonl", "ndjson"];

/// Reads a file with one JSON object per line, with line numbers from 1. Skips blank lines. Errors call a line
/// `expected`.
///
/// # Errors
///
/// If the file cannot be read, has no object, or has a line that is not a `T`.
pub fn read_json<T: DeserializeOwned>(
    path: &Path,
    expected: &'static str,
) -> Result<Vec<(usize, T)>, EvalError> {
    read(path, expected, |line| serde_json::from_str(line).map_err(|error| describe_json(&error)))
}

/// Reads a file of prompts with line numbers from 1: one object with "prompt" per line of a `.jsonl` or `.ndjson`
/// file, and one prompt per line of any other file. Skips blank lines.
///
/// # Errors
///
/// As for [`read_json`].
pub fn read_prompts(path: &Path) -> Result<Vec<(usize, String)>, EvalError> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object")]
    struct Line {
        prompt: String,
    }
    let extension = path.extension().and_then(|extension| extension.to_str());
    if !extension.is_some_and(|extension| JSON_LINES.contains(&extension)) {
        return read(path, "a prompt", |line| Ok(line.to_owned()));
    }
    let lines = read_json(path, "an object with the string \"prompt\"")?;
    Ok(lines.into_iter().map(|(number, Line { prompt })| (number, prompt)).collect())
}

fn read<T>(
    path: &Path,
    expected: &'static str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<(usize, T)>, EvalError> {
    let text = files::read(path, MAX_WHOLE).and_then(|bytes| {
        String::from_utf8(bytes)
            .map_err(|_| io::Error::new(ErrorKind::InvalidData, "stream did not contain valid UTF-8"))
    });
    let text = text.map_err(|source| EvalError::Read { path: path.to_owned(), source })?;
    // A byte order mark does not belong to the first line.
    let text = text.strip_prefix('\u{FEFF}').unwrap_or(&text);
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let records: Vec<_> = lines
        .map(|(index, line)| {
            let invalid =
                |problem| EvalError::Line { path: path.to_owned(), line: index + 1, problem, expected };
            Ok((index + 1, parse(line).map_err(invalid)?))
        })
        .collect::<Result<_, _>>()?;
    if records.is_empty() { Err(EvalError::NoLines { path: path.to_owned(), expected }) } else { Ok(records) }
}
