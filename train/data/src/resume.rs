//! The state that a preparation leaves in its folder when it ends early, so that the next one can resume.
//!
//! As soon as the tokenizer is complete, the folder has `inputs.json` and a record of how much of the text is
//! in the token files. A resumed preparation recomputes everything else: it reads and cuts the text up to
//! that point without encoding it, and reads the tokens from disk. So the files are identical to those of an
//! uninterrupted preparation.

use super::info::FORMAT_VERSION;
use super::inputs::Inputs;
use super::{DataError, Result};
use kiln_sys::durable;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// Name of the record, inside the folder.
const RECORD_FILE: &str = ".progress.json";

/// Bytes of text between two records. Text after the last record is encoded again.
pub(super) const RECORD_BYTES: u64 = if cfg!(test) { 1 } else { 32 << 20 };

/// The amount of work that is on disk in the token files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Number of text chunks in both files.
    pub(super) chunks: u64,
    /// Bytes of text in these chunks.
    pub(super) text_bytes: u64,
    /// Tokens of the training split.
    pub(super) train: u64,
    /// Tokens of the validation split.
    pub(super) validation: u64,
    /// Number of tokens that stand for text which the tokenizer cannot express, or of characters omitted for
    /// that reason.
    pub(super) unknown: u64,
}

/// The record as stored on disk. Another build may cut or encode text differently.
#[derive(Serialize, Deserialize)]
struct Signed {
    build: String,
    format_version: u64,
    record: Record,
}

impl Record {
    /// Reports whether a folder has a record.
    pub(super) fn is_in(folder: &Path) -> bool {
        folder.join(RECORD_FILE).exists()
    }

    /// Reads the record of a folder that was being prepared from `inputs`; `None` if it has none for these
    /// inputs.
    pub(super) fn load(folder: &Path, inputs: &Inputs) -> Option<Self> {
        let content = fs::read(folder.join(RECORD_FILE)).ok()?;
        let Signed { build, format_version, record } = serde_json::from_slice(&content).ok()?;
        let is_ours = build == env!("CARGO_PKG_VERSION") && format_version == FORMAT_VERSION;
        let then = Inputs::load(folder).ok().flatten()?;
        (is_ours && then.give_what(inputs)).then_some(record)
    }

    /// Writes the record, replacing an earlier one. The tokens it counts must already be on disk.
    pub(super) fn save(self, folder: &Path) -> Result<()> {
        let path = folder.join(RECORD_FILE);
        let build = env!("CARGO_PKG_VERSION").to_owned();
        let signed = Signed { build, format_version: FORMAT_VERSION, record: self };
        let write = || durable::write_beside(&path, &serde_json::to_vec(&signed)?);
        write().map_err(DataError::io("write", &path))
    }

    /// Removes the record, and any partial record left by a kill: the folder can then no longer be resumed.
    pub(super) fn remove(folder: &Path) -> Result<()> {
        let remove = || {
            for entry in fs::read_dir(folder)? {
                let entry = entry?;
                let name = entry.file_name();
                if name == RECORD_FILE || durable::is_beside(&name, RECORD_FILE) {
                    fs::remove_file(entry.path())?;
                }
            }
            // Done before any other file is added to the folder.
            durable::sync_folder(folder)
        };
        remove().map_err(DataError::io("clean", folder))
    }
}

#[cfg(test)]
mod tests;
