//! How the configurations of runs differ.

use std::collections::BTreeSet;

use super::document::{Block, Cell, Table};
use super::subject::Subject;

/// Keys with their values in every run; a run that does not have a key has no value of it.
type Values = Vec<(String, Vec<Option<String>>)>;

/// Keys of which not all runs have the same value, and those of which they have. A run without a configuration
/// does not count.
pub(super) fn compare(subjects: &[Subject<'_>]) -> (Values, Values) {
    let configs: Vec<_> = subjects.iter().map(|subject| subject.run.config()).collect();
    let keys: BTreeSet<&String> = configs.iter().flat_map(|config| config.keys()).collect();
    let known: Vec<usize> = (0..configs.len()).filter(|run| !configs[*run].is_empty()).collect();
    let values = keys.into_iter().map(|key| {
        let values: Vec<_> = configs.iter().map(|config| config.get(key).cloned()).collect();
        (key.clone(), values)
    });
    values.partition(|(_, values)| known.iter().any(|run| values[*run] != values[known[0]]))
}

/// The keys that differ, and the others when asked for.
pub(super) fn blocks(subjects: &[Subject<'_>]) -> Vec<Block> {
    let (different, common) = compare(subjects);
    if different.is_empty() && common.is_empty() {
        return vec![Block::Text("No configuration is there.".to_owned())];
    }
    let mut blocks = Vec::new();
    if subjects.len() > 1 {
        blocks.push(match different.is_empty() {
            true => Block::Text("All keys have the same values in all runs.".to_owned()),
            false => Block::Table(Table {
                caption:
                    "Keys of the configuration whose values differ. A dash: the run does not have the key."
                        .to_owned(),
                head: std::iter::once("Key".to_owned())
                    .chain(subjects.iter().map(|subject| subject.name.clone()))
                    .collect(),
                rows: different.iter().map(|(key, values)| row(key, values)).collect(),
            }),
        });
    }
    if !common.is_empty() {
        let caption = match subjects.len() {
            1 => "The configuration of the run, with every default.",
            _ => "Keys of the configuration with the same value in all runs, with every default.",
        };
        let table = Table {
            caption: caption.to_owned(),
            head: vec!["Key".to_owned(), "Value".to_owned()],
            rows: common.iter().map(|(key, values)| row(key, &values[..1.min(values.len())])).collect(),
        };
        let summary = match subjects.len() {
            1 => format!("All {} keys", table.rows.len()),
            _ => format!("The {} keys that all runs share", table.rows.len()),
        };
        // Of a run alone there is nothing else to see.
        blocks.push(Block::Folded(summary, vec![Block::Table(table)]));
    }
    blocks
}

fn row(key: &str, values: &[Option<String>]) -> Vec<Cell> {
    let value = |value: &Option<String>| match value {
        Some(value) if value.is_empty() => Cell::Code("\"\"".to_owned()),
        Some(value) => Cell::Code(value.clone()),
        None => Cell::text(None),
    };
    std::iter::once(Cell::Code(key.to_owned())).chain(values.iter().map(value)).collect()
}
