//! What a prepare that has ended early leaves in its folder, for the next one to go on from.
//!
//! From the moment the tokenizer is whole, the folder has `inputs.json` and a record of how much of the text
//! is in the token files. Everything else is worked out again when a prepare goes on: the text up to there is
//! read and cut, but not encoded, and the tokens are read from the disk. So the files come to the same bytes
//! as without the interruption.

use super::info::FORMAT_VERSION;
use super::inputs::Inputs;
use super::{DataError, Result};
use kiln_storage::durable;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// Name of the record, inside the folder.
const RECORD_FILE: &str = ".progress.json";

/// Text between two records, in bytes. What comes after the last one is encoded again.
pub(super) const RECORD_BYTES: u64 = if cfg!(test) { 1 } else { 32 << 20 };

/// How far the token files are on the disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Chunks of text in both files.
    pub(super) chunks: u64,
    /// Bytes of that text.
    pub(super) text_bytes: u64,
    /// Tokens of the training split.
    pub(super) train: u64,
    /// Tokens of the validation split.
    pub(super) validation: u64,
    /// Tokens, or characters left out, that stand for text which the tokenizer cannot express.
    pub(super) unknown: u64,
}

/// The record as it is on the disk. Another build may cut or encode text in another way.
#[derive(Serialize, Deserialize)]
struct Signed {
    build: String,
    format_version: u64,
    record: Record,
}

impl Record {
    /// Whether a folder has one.
    pub(super) fn is_in(folder: &Path) -> bool {
        folder.join(RECORD_FILE).exists()
    }

    /// The record of a folder that was being made of `inputs`; `None` if it has none of these.
    pub(super) fn load(folder: &Path, inputs: &Inputs) -> Option<Self> {
        let content = fs::read(folder.join(RECORD_FILE)).ok()?;
        let Signed { build, format_version, record } = serde_json::from_slice(&content).ok()?;
        let is_ours = build == env!("CARGO_PKG_VERSION") && format_version == FORMAT_VERSION;
        let then = Inputs::load(folder).ok().flatten()?;
        (is_ours && then.give_what(inputs)).then_some(record)
    }

    /// Writes the record, in the place of an earlier one. What it counts must be on the disk already.
    pub(super) fn save(self, folder: &Path) -> Result<()> {
        let path = folder.join(RECORD_FILE);
        let build = env!("CARGO_PKG_VERSION").to_owned();
        let signed = Signed { build, format_version: FORMAT_VERSION, record: self };
        let write = || durable::write_beside(&path, &serde_json::to_vec(&signed)?);
        write().map_err(DataError::io("write", &path))
    }

    /// Removes the record, and what a kill has left of one: nobody goes on from what is in the folder then.
    pub(super) fn remove(folder: &Path) -> Result<()> {
        let remove = || {
            for entry in fs::read_dir(folder)? {
                let entry = entry?;
                let name = entry.file_name();
                if name == RECORD_FILE || durable::is_beside(&name, RECORD_FILE) {
                    fs::remove_file(entry.path())?;
                }
            }
            // Before anything else comes into the folder.
            durable::sync_folder(folder)
        };
        remove().map_err(DataError::io("clean", folder))
    }
}

#[cfg(test)]
mod tests;
