//! The tokens that start and end a text, as named by the files next to a tokenizer.

use std::path::Path;

use kiln_sys::files::{self, MAX_WHOLE};
use serde_json::Value;

use super::{DataError, Result};

/// A token as named in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Named {
    /// By its id.
    Id(u32),
    /// By its spelling.
    Spelling(String),
}

/// The tokens named by the files next to a tokenizer, in order of precedence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TokenNames {
    pub(super) start: Vec<Named>,
    pub(super) end: Vec<Named>,
}

/// Files that name tokens by their ids, and one that names them by their spellings.
const FILES: [&str; 3] = ["config.json", "generation_config.json", "tokenizer_config.json"];

impl TokenNames {
    /// Reads the files in the folder of `tokenizer`.
    ///
    /// # Errors
    ///
    /// When one of them cannot be read, or is not JSON.
    pub(super) fn beside(tokenizer: &Path) -> Result<Self> {
        let folder = tokenizer.parent().unwrap_or(Path::new(""));
        let mut names = Self::default();
        for file in FILES {
            let path = folder.join(file);
            if !path.is_file() {
                continue;
            }
            let content = files::read(&path, MAX_WHOLE).map_err(DataError::io("read", &path))?;
            let content: Value = serde_json::from_slice(&content)
                .map_err(|error| DataError::Info { path, problem: error.to_string() })?;
            for (names, name) in [(&mut names.start, "bos_token"), (&mut names.end, "eos_token")] {
                names.extend(named(&content[format!("{name}_id")]));
                names.extend(named(&content[name]));
            }
        }
        Ok(names)
    }
}

/// Returns a token by its id, by the first of a list of ids, or by its spelling, which may be in an object.
fn named(value: &Value) -> Option<Named> {
    match value {
        Value::Number(id) => Some(Named::Id(u32::try_from(id.as_u64()?).ok()?)),
        Value::Array(ids) => named(ids.first()?),
        Value::String(spelling) => Some(Named::Spelling(spelling.clone())),
        Value::Object(token) => named(token.get("content")?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_count_in_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let write = |file: &str, content: &str| std::fs::write(folder.path().join(file), content).unwrap();
        let tokenizer = folder.path().join("tokenizer.json");
        assert_eq!(TokenNames::beside(&tokenizer).unwrap(), TokenNames::default());
        write("tokenizer_config.json", r#"{"eos_token": {"content": "<a>"}, "bos_token": "<b>"}"#);
        write("generation_config.json", r#"{"eos_token_id": [7, 8], "pad_token_id": -1}"#);
        write("config.json", r#"{"eos_token_id": 3, "bos_token_id": null}"#);
        let names = TokenNames::beside(&tokenizer).unwrap();
        let spelling = |text: &str| Named::Spelling(text.to_owned());
        assert_eq!(names.end, [Named::Id(3), Named::Id(7), spelling("<a>")]);
        assert_eq!(names.start, [spelling("<b>")]);
        write("config.json", "{");
        assert!(TokenNames::beside(&tokenizer).unwrap_err().to_string().contains("config.json"));
    }
}
