//! Changes some keys of a configuration and keeps the rest of the user's file.

use std::path::Path;

use toml::{Table, Value};

use super::ConfigError;
use super::load::{apply, read};

/// Returns the text of the file `path` with `overrides` applied as [`load`](super::load) does, and without the
/// keys `removed` (`section.key`). Comments and the order of keys are kept if every changed key has its own
/// line; otherwise the text has the same keys and values, without comments.
///
/// # Errors
///
/// As for [`load`](super::load).
pub fn rewritten(path: &Path, overrides: &[String], removed: &[&str]) -> Result<String, ConfigError> {
    let (text, mut table, _) = read(path)?;
    for name in removed {
        if let Some((section, key)) = name.split_once('.')
            && let Some(section) = table.get_mut(section).and_then(Value::as_table_mut)
        {
            section.remove(key);
        }
    }
    for argument in overrides {
        apply(&mut table, argument)?;
    }
    let mut edited = text;
    for name in removed {
        edited = with_value(&edited, name, None);
    }
    for argument in overrides {
        let name = argument.split('=').next().unwrap_or_default().trim();
        edited = with_value(&edited, name, value_at(&table, name));
    }
    if toml::from_str::<Table>(&edited).is_ok_and(|edited| edited == table) {
        return Ok(edited);
    }
    toml::to_string(&table)
        .map_err(|error| ConfigError::invalid(format!("the configuration cannot be written: {error}")))
}

/// Returns the value of `section.key` in `table`.
fn value_at<'a>(table: &'a Table, name: &str) -> Option<&'a Value> {
    let (sections, key) = name.rsplit_once('.')?;
    let section = sections.split('.').try_fold(table, |table, name| table.get(name)?.as_table())?;
    section.get(key)
}

/// Returns `text` with `value` for the key `name`, on its existing line or a new one; without that line if
/// there is no value.
fn with_value(text: &str, name: &str, value: Option<&Value>) -> String {
    let Some((section, key)) = name.rsplit_once('.') else { return text.to_owned() };
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let mut inside = false;
    // The position after the last non-empty line of the section.
    let mut end = None;
    let mut found = None;
    for (index, line) in lines.iter().enumerate() {
        let line = line.trim();
        if let Some(header) = line.strip_prefix('[') {
            inside = header.split(']').next().is_some_and(|header| header.trim() == section);
        } else if inside && line.split_once('=').is_some_and(|(before, _)| before.trim() == key) {
            found = Some(index);
        }
        if inside && !line.is_empty() {
            end = Some(index + 1);
        }
    }
    match (found, value) {
        (Some(index), Some(value)) => {
            let comment = comment_of(&lines[index]).to_owned();
            lines[index] = format!("{key} = {value}{comment}");
        }
        (Some(index), None) => {
            lines.remove(index);
        }
        (None, Some(value)) => match end {
            Some(end) => lines.insert(end, format!("{key} = {value}")),
            None => lines.extend([String::new(), format!("[{section}]"), format!("{key} = {value}")]),
        },
        (None, None) => {}
    }
    lines.join("\n") + "\n"
}

/// Returns the comment at the end of a line, with the spaces before it.
fn comment_of(line: &str) -> &str {
    let mut quote = None;
    for (index, letter) in line.char_indices() {
        match (quote, letter) {
            (None, '#') => return &line[line[..index].trim_end().len()..],
            (None, '"' | '\'') => quote = Some(letter),
            (Some(open), letter) if open == letter => quote = None,
            _ => {}
        }
    }
    ""
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewrite(text: &str, overrides: &[&str], removed: &[&str]) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("run.toml");
        std::fs::write(&path, text).expect("a file");
        let overrides: Vec<_> = overrides.iter().map(|text| (*text).to_owned()).collect();
        rewritten(&path, &overrides, removed).expect("a text")
    }

    #[test]
    fn only_changed_lines_change() {
        let text = "# Mine.\n[train]\nsteps = 5    # few\nmicro_batch = \"auto\" # as it fits\n\n[shard]\n\
                    shard_size = 2\nstrategy = 'HYBRID_SHARD' # \"#\"\n";
        let wanted =
            ["shard.strategy=NO_SHARD", "train.micro_batch=4", "shard.recompute=block", "optim.lr=0.5"];
        assert_eq!(
            rewrite(text, &wanted, &["shard.shard_size"]),
            "# Mine.\n[train]\nsteps = 5    # few\nmicro_batch = 4 # as it fits\n\n[shard]\n\
             strategy = \"NO_SHARD\" # \"#\"\nrecompute = \"block\"\n\n[optim]\nlr = 0.5\n"
        );
        assert_eq!(rewrite(text, &[], &[]), text);
    }

    /// Covers keys without their own line, and values on several lines.
    #[test]
    fn other_texts_are_written_anew_with_the_same_keys() {
        for text in [
            "shard = { strategy = \"FULL_SHARD\" }\ntrain.steps = 5\n",
            "[shard]\n\"strategy\" = \"FULL_SHARD\"\n[train]\nsteps = 5\n",
        ] {
            let rewritten = rewrite(text, &["shard.strategy=NO_SHARD"], &[]);
            assert_eq!(rewritten, "[shard]\nstrategy = \"NO_SHARD\"\n\n[train]\nsteps = 5\n");
        }
        let text = "[data]\ntext = [\n  \"a\",\n  \"b\",\n]\n";
        assert_eq!(rewrite(text, &["data.text=[\"c\"]"], &[]), "[data]\ntext = [\"c\"]\n");
    }
}
