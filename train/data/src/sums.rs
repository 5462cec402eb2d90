//! `SHA256SUMS`: the SHA-256 of all other files of a prepared folder, as `sha256sum --check` reads it.

use super::listing::sha256_of;
use super::{DataError, Result};
use kiln_sys::durable;
use kiln_sys::files::{self, MAX_WHOLE};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;

pub(super) const SUMS_FILE: &str = "SHA256SUMS";

const MAX_BYTES: u64 = 1 << 20;

/// Reads a small file of a folder. Fails if its SHA-256 differs from the one in `SHA256SUMS`.
pub(super) fn read_small_file(folder: &Path, name: &'static str) -> Result<Vec<u8>> {
    let path = folder.join(name);
    let content = match files::read(&path, MAX_WHOLE) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(DataError::NotPrepared { folder: folder.to_owned(), file: name });
        }
        content => content.map_err(DataError::io("read", &path))?,
    };
    let problem = match Sums::load(folder)? {
        None => return Ok(content),
        Some(Err(problem)) => format!("{}: {problem}", folder.join(SUMS_FILE).display()),
        Some(Ok(sums)) => {
            let agrees = |sum: &str| sum == format!("{:x}", Sha256::digest(&content));
            if sums.get(name).is_none_or(agrees) {
                return Ok(content);
            }
            format!(
                "{}: its SHA-256 differs from the one in {SUMS_FILE}; if the change is intended, remove \
                 {SUMS_FILE}",
                path.display()
            )
        }
    };
    Err(DataError::Damaged { folder: folder.to_owned(), problems: vec![problem] })
}

pub(super) fn write_small_file(
    folder: &Path,
    name: &'static str,
    value: &impl Serialize,
) -> Result<(), DataError> {
    let path = folder.join(name);
    let write = || {
        let mut json = serde_json::to_vec_pretty(value)?;
        json.push(b'\n');
        durable::write(&path, &json)
    };
    write().map_err(DataError::io("write", &path))
}

/// SHA-256 in hexadecimal, by file name.
pub(super) struct Sums(BTreeMap<String, String>);

impl Sums {
    /// Computes the checksums of `files`, but reuses the checksums in `known`.
    pub(super) fn compute(folder: &Path, files: &[&str], known: &[(&str, Option<&String>)]) -> Result<Self> {
        let known: BTreeMap<_, _> = known.iter().copied().collect();
        let sum = |name: &&str| {
            let sum = match known.get(name).copied().flatten() {
                Some(sum) => sum.clone(),
                None => {
                    let path = folder.join(name);
                    File::open(&path).and_then(sha256_of).map_err(DataError::io("read", &path))?
                }
            };
            Ok(((*name).to_owned(), sum))
        };
        files.iter().map(sum).collect::<Result<_, _>>().map(Self)
    }

    /// Reads the checksums of a folder; `None` if it has none. The inner error names the invalid line.
    pub(super) fn load(folder: &Path) -> Result<Option<Result<Self, String>>> {
        let path = folder.join(SUMS_FILE);
        let content = match files::read(&path, MAX_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            content => content.map_err(DataError::io("read", &path))?,
        };
        let text = String::from_utf8_lossy(&content);
        let parse = |(index, line): (usize, &str)| {
            // `sha256sum` marks files read in binary mode with a star.
            let (sum, name) = line.split_once(' ').ok_or(index)?;
            let name = name.strip_prefix([' ', '*']).ok_or(index)?;
            let is_sum = sum.len() == 64 && sum.bytes().all(|byte| byte.is_ascii_hexdigit());
            is_sum.then(|| (name.to_owned(), sum.to_ascii_lowercase())).ok_or(index)
        };
        let sums = text.lines().enumerate().map(parse).collect::<Result<_, usize>>();
        Ok(Some(sums.map(Self).map_err(|index| format!("line {} is not a SHA-256", index + 1))))
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(super) fn save(&self, folder: &Path) -> Result<()> {
        let path = folder.join(SUMS_FILE);
        let text: String = self.0.iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect();
        durable::write(&path, text.as_bytes()).map_err(DataError::io("write", &path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn sums_have_the_format_of_sha256sum() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "abc").unwrap();
        let known = "0".repeat(64);
        let sums = Sums::compute(folder.path(), &["a", "b"], &[("b", Some(&known))]).unwrap();
        sums.save(folder.path()).unwrap();
        let text = fs::read_to_string(folder.path().join(SUMS_FILE)).unwrap();
        assert_eq!(text, format!("{ABC}  a\n{known}  b\n"));
        let loaded = Sums::load(folder.path()).unwrap().unwrap().unwrap();
        assert_eq!((loaded.get("a"), loaded.get("c")), (Some(ABC), None));
    }

    #[test]
    fn invalid_sums_are_named() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Sums::load(folder.path()).unwrap().is_none());
        for wrong in ["abc  a", &ABC[1..], ABC, &format!("{ABC}-a")] {
            fs::write(folder.path().join(SUMS_FILE), format!("{ABC} *a\n{wrong}\n")).unwrap();
            let problem = Sums::load(folder.path()).unwrap().unwrap().err();
            assert_eq!(problem.as_deref(), Some("line 2 is not a SHA-256"), "{wrong}");
        }
    }
}
