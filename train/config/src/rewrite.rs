use std::path::Path;

use toml::{Table, Value};
use toml_edit::{DocumentMut, InlineTable, Item};

use super::ConfigError;
use super::load::{apply, read};

/// Returns the text of the file `path` with `overrides` applied as [`load`](super::load) does, and without the
/// keys `removed` (`section.key`). Comments, formatting and the order of keys are kept.
///
/// # Errors
///
/// As for [`load`](super::load).
pub fn rewritten(path: &Path, overrides: &[String], removed: &[&str]) -> Result<String, ConfigError> {
    let (text, mut table, _) = read(path)?;
    let mut document: DocumentMut = text.parse().map_err(|error: toml_edit::TomlError| {
        ConfigError::Parse { path: path.to_owned(), message: error.to_string() }
    })?;
    for name in removed {
        if let Some((section, key)) = name.split_once('.') {
            table.get_mut(section).and_then(Value::as_table_mut).and_then(|section| section.remove(key));
            let section = document.get_mut(section).and_then(Item::as_table_like_mut);
            section.and_then(|section| section.remove(key));
        }
    }
    for argument in overrides {
        apply(&mut table, argument)?;
        let name = argument.split('=').next().unwrap_or_default().trim();
        if let Some((sections, key)) = name.rsplit_once('.') {
            set(document.as_item_mut(), &table, sections, key);
        }
    }
    Ok(document.to_string())
}

/// Copies the value of `key` in `sections`, such as `a.b`, from `table` to `item`, if `table` has the value.
fn set(mut item: &mut Item, mut table: &Table, sections: &str, key: &str) -> Option<()> {
    for name in sections.split('.') {
        table = table.get(name)?.as_table()?;
        let missing = match item.is_inline_table() {
            true => toml_edit::value(InlineTable::new()),
            false => {
                let mut table = toml_edit::Table::new();
                // A section that only contains other sections needs no header.
                table.set_implicit(true);
                Item::Table(table)
            }
        };
        item = item.as_table_like_mut()?.entry(name).or_insert(missing);
    }
    let mut value: toml_edit::Value = table.get(key)?.to_string().parse().ok()?;
    let section = item.as_table_like_mut()?;
    match section.get_mut(key).and_then(Item::as_value_mut) {
        Some(old) => {
            *value.decor_mut() = old.decor().clone();
            *old = value;
        }
        None => {
            section.insert(key, toml_edit::value(value));
        }
    }
    Some(())
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
    fn only_changed_values_change() {
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

    #[test]
    fn every_form_of_toml_is_edited_in_place() {
        for (text, setting, expected) in [
            (
                "shard = { strategy = \"FULL_SHARD\" } # all\ntrain.steps = 5\n",
                "shard.strategy=NO_SHARD",
                "shard = { strategy = \"NO_SHARD\" } # all\ntrain.steps = 5\n",
            ),
            (
                "[shard]\n\"strategy\" = \"FULL_SHARD\"\n[train]\nsteps = 5\n",
                "shard.strategy=NO_SHARD",
                "[shard]\n\"strategy\" = \"NO_SHARD\"\n[train]\nsteps = 5\n",
            ),
            ("train.steps = 5\n", "train.seed=7", "train.steps = 5\ntrain.seed = 7\n"),
            ("[data]\ntext = [\n  \"a\",\n  \"b\",\n]\n", "data.text=[\"c\"]", "[data]\ntext = [\"c\"]\n"),
            (
                "model = { preset = \"10m\" }\n",
                "model.extra.depth=2",
                "model = { preset = \"10m\" , extra = { depth = 2 } }\n",
            ),
            (
                "[model]\npreset = \"10m\"\n",
                "model.extra.depth=2",
                "[model]\npreset = \"10m\"\n\n[model.extra]\ndepth = 2\n",
            ),
        ] {
            assert_eq!(rewrite(text, &[setting], &[]), expected);
        }
    }
}
