//! Every key of a configuration: as a commented file (`kiln config`), and as a JSON schema for editors.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use schemars::schema_for;
use serde_json::{Map, Value as Json};
use toml::{Table, Value};

use super::load::{apply, read};
use super::sections::sections;
use super::{Config, ConfigError, ModelSection};

/// Returns the JSON schema of a configuration file, with which editors complete keys and check values.
pub fn json_schema() -> Json {
    schema_for!(Config).to_value()
}

/// `kiln config`.
#[derive(Args)]
pub struct ConfigArgs {
    /// Configuration whose values are shown [default: the default values].
    config: Option<PathBuf>,
    /// Change one value of the configuration; may be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "config")]
    overrides: Vec<String>,
    /// Print all keys, with their meaning and values; the default.
    #[arg(long)]
    show: bool,
    /// Print the JSON schema of a configuration instead, for editors.
    #[arg(long, conflicts_with_all = ["config", "show"])]
    schema: bool,
}

impl ConfigArgs {
    /// Returns the text to print: TOML that [`load`](super::load) reads, or JSON.
    pub fn run(self) -> Result<String, ConfigError> {
        if self.schema {
            return Ok(format!("{:#}", json_schema()));
        }
        let (config, set) = match &self.config {
            None => (Config::default(), Table::new()),
            Some(path) => {
                let (_, mut set, mut config) = read(path)?;
                for argument in &self.overrides {
                    config = apply(&mut set, argument)?;
                }
                config.validate()?;
                if let Ok(model) = config.resolve_model(None, None) {
                    let ModelSection { preset, context_length, .. } = config.model;
                    config.model =
                        ModelSection { preset, context_length, ..ModelSection::from_model(&model) };
                }
                (config, set)
            }
        };
        let table = |config: &Config| {
            Table::try_from(config).map_err(|error| {
                ConfigError::invalid(format!("the configuration cannot be written: {error}"))
            })
        };
        let schema = json_schema();
        let text = commented(&schema, &table(&config)?, &table(&Config::default())?, &set);
        Ok(format!("{text}\n\n{}", experiment(&schema, &table(&config)?)))
    }
}

fn experiment(schema: &Json, config: &Table) -> String {
    let section = "experiment";
    let keys = config.get(section).cloned().unwrap_or_else(|| Value::Table(Table::new()));
    let meaning = schema["properties"][section]["description"].as_str().unwrap_or_default();
    let mut text = comment(meaning, "");
    let _ = write!(text, "{}", Table::from_iter([(section.to_owned(), keys)]));
    text.trim_end().to_owned()
}

const WIDTH: usize = 110;

/// Lists all keys of `schema` with meaning and value; marks keys of `set` that differ from `defaults`.
fn commented(schema: &Json, config: &Table, defaults: &Table, set: &Table) -> String {
    let mut text = String::new();
    for (section, keys) in sections() {
        let described = &schema["properties"][section];
        let values =
            |table: &Table| table.get(section).and_then(Value::as_table).cloned().unwrap_or_default();
        let (values, defaults) = (values(config), values(defaults));
        let meaning = described["description"].as_str().unwrap_or_default();
        let _ = writeln!(text, "{}[{section}]", comment(meaning, ""));
        let properties = &resolve(schema, described)["properties"];
        for key in keys {
            let described = &properties[key];
            // A section omits keys that few runs set; the schema has their defaults.
            let unset = || Value::try_from(&described["default"]).ok();
            let default = defaults.get(*key).cloned().or_else(unset);
            let value = values.get(*key).cloned().or_else(|| default.clone());
            text += "\n";
            text += &key_comment(schema, described);
            let line = match &value {
                Some(value) => format!("{key} = {value}"),
                None => format!("# {key} ="),
            };
            text += &line;
            let is_set = set.get(section).is_some_and(|keys| keys.get(key).is_some());
            match default {
                Some(default) if is_set && Some(&default) != value.as_ref() => {
                    let _ = write!(text, "  # default: {default}");
                }
                None if is_set => text += "  # default: not set",
                _ => {}
            }
            text += "\n";
        }
        text += "\n";
    }
    text.trim_end().to_owned()
}

fn key_comment(schema: &Json, described: &Json) -> String {
    let mut values = Vec::new();
    let kind = kind(schema, described, &mut values);
    let meaning = described["description"].as_str().unwrap_or_default();
    // Values that have their own meanings are listed below the key's meaning.
    let kind = if kind.split(", ").count() == values.len() { String::new() } else { format!(" ({kind})") };
    let mut text = comment(&format!("{meaning}{kind}"), "");
    for (value, meaning) in values {
        text += &comment(&format!("{value}: {meaning}"), "  ");
    }
    text
}

/// Describes the type of a value, and adds each named value that has its own meaning to `values`.
fn kind(schema: &Json, described: &Json, values: &mut Vec<(String, String)>) -> String {
    let described = resolve(schema, described);
    if let Some(value) = described.get("const") {
        if let Some(meaning) = described["description"].as_str() {
            values.push((value.to_string(), meaning.to_owned()));
        }
        return value.to_string();
    }
    if let Some(names) = described["enum"].as_array() {
        return names.iter().map(Json::to_string).collect::<Vec<_>>().join(", ");
    }
    if let Some(choices) = described["oneOf"].as_array().or(described["anyOf"].as_array()) {
        let choices = choices.iter().filter(|choice| choice["type"] != "null");
        return choices.map(|choice| kind(schema, choice, values)).collect::<Vec<_>>().join(", ");
    }
    let name = match &described["type"] {
        Json::Array(types) => types.iter().find(|name| *name != "null"),
        name => Some(name),
    };
    match name.and_then(Json::as_str) {
        Some("boolean") => "true or false".to_owned(),
        Some("integer") => "whole number".to_owned(),
        Some("number") => "number".to_owned(),
        Some("string") => "string".to_owned(),
        Some("array") => format!("array of {}", kind(schema, &described["items"], values)),
        _ => match described["properties"]["kind"]["const"].as_str() {
            Some(kind) => {
                let keys = described["properties"].as_object().into_iter().flat_map(Map::keys);
                let others: Vec<_> =
                    keys.filter(|key| *key != "kind").map(|key| format!(", {key} = ...")).collect();
                format!("{{ kind = \"{kind}\"{} }}", others.concat())
            }
            None => "table".to_owned(),
        },
    }
}

fn resolve<'a>(schema: &'a Json, described: &'a Json) -> &'a Json {
    let path = described["$ref"].as_str().and_then(|path| path.strip_prefix('#'));
    path.and_then(|path| schema.pointer(path)).unwrap_or(described)
}

fn comment(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    let mut line = format!("# {indent}");
    let empty = line.len();
    // Removes the link brackets of Rust documentation.
    let text = text.replace("[`", "`").replace("`]", "`");
    for word in text.split_whitespace() {
        if line.len() > empty && line.len() + 1 + word.len() > WIDTH {
            lines += line.trim_end();
            lines += "\n";
            line.truncate(0);
            let _ = write!(line, "# {indent}");
        }
        if line.len() > empty {
            line += " ";
        }
        line += word;
    }
    lines + line.trim_end() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_text_is_a_configuration() {
        let (defaults, none) = (Table::try_from(Config::default()).expect("TOML"), Table::new());
        for values in [&none, &defaults] {
            let text = commented(&json_schema(), values, &defaults, values);
            let read: Config = toml::from_str(&text).expect("a configuration");
            assert_eq!(read, Config::default());
            let with_all: String = text.lines().filter(|line| line.contains(" =")).collect();
            let keys = sections().into_iter().flat_map(|(_, keys)| keys);
            keys.for_each(|key| assert!(with_all.contains(&format!("{key} =")), "{key} is missing"));
        }
    }

    #[test]
    fn every_key_has_a_meaning() {
        let schema = json_schema();
        for (section, keys) in sections() {
            let section = &resolve(&schema, &schema["properties"][section]);
            assert_eq!(section["additionalProperties"], false);
            for key in keys {
                let meaning = section["properties"][key]["description"].as_str();
                assert!(meaning.is_some_and(|text| text.ends_with('.')), "{key}: {meaning:?}");
            }
        }
    }
}
