//! Results of kernel checks, stored for later processes under the hash of their key.
//! Files are replaced atomically; a damaged file counts as missing.

use std::path::Path;
use std::time::UNIX_EPOCH;
use std::{env, fs, io};

use burn::tensor::FloatDType;
use kiln_model::ops::FusedOp;
use kiln_model::verify::{Finding, Shapes};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::metrics::write_atomic;
use crate::version::version;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) device: String,
    /// The program: its version, and its file's size and modification time.
    pub(super) build: String,
    pub(super) dtypes: Vec<FloatDType>,
    pub(super) shapes: Shapes,
    pub(super) fault: Option<FusedOp>,
}

impl Key {
    pub(super) fn new(
        device: String,
        dtypes: Vec<FloatDType>,
        shapes: Shapes,
        fault: Option<FusedOp>,
    ) -> Self {
        let file = env::current_exe().and_then(fs::metadata).ok();
        let size = file.as_ref().map_or(0, fs::Metadata::len);
        let changed = file.and_then(|file| file.modified().ok()?.duration_since(UNIX_EPOCH).ok());
        let changed = changed.unwrap_or_default().as_nanos();
        let build = format!("{}, {size} bytes of {changed}", version());
        Key { device, build, dtypes, shapes, fault }
    }

    pub(super) fn file_name(&self) -> String {
        let digest = Sha256::digest(format!("{self:?}"));
        format!("{digest:x}.json")
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct Kept {
    key: Key,
    findings: Vec<Finding>,
}

impl Kept {
    /// Reads the findings for `key`; `None` if the file is missing or belongs to a different key.
    pub(super) fn read(file: &Path, key: &Key) -> Option<Vec<Finding>> {
        let kept: Kept = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
        (kept.key == *key).then_some(kept.findings)
    }

    pub(super) fn write(file: &Path, key: &Key, findings: &[Finding]) -> io::Result<()> {
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder)?;
        }
        let kept = Kept { key: key.clone(), findings: findings.to_vec() };
        write_atomic(file, &serde_json::to_vec_pretty(&kept)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_found_by_what_it_follows_from_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let shapes = Shapes { attention: vec![(64, None)], experts: false };
        let key = Key::new("a GPU".to_owned(), vec![FloatDType::F32], shapes, None);
        let file = folder.path().join("verified").join(key.file_name());
        assert_eq!(Kept::read(&file, &key), None);
        let finding = Finding {
            op: FusedOp::RmsNorm,
            dtype: FloatDType::F32,
            error: None,
            bound: 1e-5,
            place: "output".to_owned(),
        };
        Kept::write(&file, &key, std::slice::from_ref(&finding)).expect("a folder to write to");
        assert_eq!(Kept::read(&file, &key), Some(vec![finding]));

        let others = [
            Key { device: "another driver".to_owned(), ..key.clone() },
            Key { build: "another program".to_owned(), ..key.clone() },
            Key { dtypes: vec![FloatDType::BF16], ..key.clone() },
            Key { shapes: Shapes { attention: vec![(64, Some(9))], experts: false }, ..key.clone() },
            Key { fault: Some(FusedOp::RmsNorm), ..key.clone() },
        ];
        for other in others {
            assert_ne!(other.file_name(), key.file_name());
            assert_eq!(Kept::read(&file, &other), None);
        }
        fs::write(&file, "{").expect("a file");
        assert_eq!(Kept::read(&file, &key), None);
    }
}
