//! Metrics as CSV.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::PathBuf;

use super::{ExportError, runs};
use crate::line::{Line, Value};

/// Returns the metrics of the runs in `folders` as CSV (RFC 4180), with a row per step and a column per key.
/// Missing, NaN and infinite values are empty cells. With several runs, the first column is the run's name.
///
/// # Errors
///
/// If a folder is not a run, or has no metrics.
pub fn csv(folders: &[PathBuf]) -> Result<String, ExportError> {
    let runs = runs(folders).collect::<Result<Vec<_>, _>>()?;
    let mut columns: Vec<&str> = vec!["step", "time"];
    let mut places: HashMap<&str, usize> = columns.iter().copied().zip(0..).collect();
    for (key, _) in runs.iter().flat_map(|run| &run.lines).flat_map(|line| &line.values) {
        places.entry(key).or_insert_with(|| {
            columns.push(key);
            columns.len() - 1
        });
    }
    let row = |name: &str, cells: Vec<Cow<'_, str>>| {
        let name = (runs.len() > 1).then(|| cell(name));
        name.into_iter().chain(cells).collect::<Vec<_>>().join(",") + "\n"
    };
    let mut text = row("run", columns.iter().map(|column| cell(column)).collect());
    for run in &runs {
        // An evaluation writes a second line for its step.
        for lines in run.lines.chunk_by(|one, next| one.step == next.step) {
            text += &row(&run.name, cells(lines, &places));
        }
    }
    Ok(text)
}

fn cells<'a>(lines: &'a [Line], places: &HashMap<&str, usize>) -> Vec<Cow<'a, str>> {
    let mut cells = vec![Cow::Borrowed(""); places.len()];
    for Line { step, time, values } in lines {
        cells[0] = step.to_string().into();
        if let Some(time) = time {
            cells[1] = time.to_string().into();
        }
        for (key, value) in values {
            cells[places[key.as_str()]] = match value {
                Value::Null => "".into(),
                Value::Number(text) | Value::Text(text) | Value::Other(text) => cell(text),
            };
        }
    }
    cells
}

/// Returns `text` as a cell of a table: quoted if it contains a separator.
pub fn cell(text: &str) -> Cow<'_, str> {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")).into(),
        false => text.into(),
    }
}
