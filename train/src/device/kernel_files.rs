//! The files that compiled kernels are kept in.
//!
//! A file is named after all that its content follows from: the source, the options, NVRTC and CUDA's
//! headers, wherever these are. Of the source, CubeCL numbers some variables in the order of a hash table,
//! another one in every process; so variables are numbered anew here, as they come. It is written beside and
//! renamed, and carries its own checksum. So processes may read and write at the same time, a stale file is
//! never asked for, and a damaged one counts as none.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest, Sha256};

use super::libraries::HEADERS;
use crate::metrics::write_beside;

/// Part of every name: the way in which files are named and filled.
const FORMAT: &str = "2";

/// Bytes of the checksum that a file begins with.
const CHECKSUM: usize = 32;

/// How the name of a file ends.
pub(super) const EXTENSION: &str = "ptx";

/// The option that names a folder of headers.
const INCLUDE: &[u8] = b"--include-path=";

/// The kernel in `content`, that of a file; `None` if it is not as it was written.
pub(super) fn kernel_of(content: &[u8]) -> Option<&[u8]> {
    let (checksum, ptx) = content.split_at_checked(CHECKSUM)?;
    (checksum == &Sha256::digest(ptx)[..]).then_some(ptx)
}

/// Whether `name` is that of a file.
pub(super) fn is_file_name(name: &str) -> bool {
    let digest = name.strip_suffix(EXTENSION).and_then(|name| name.strip_suffix('.'));
    digest.is_some_and(|digest| digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The folder, and what compiles what is not there.
pub(super) struct Kept {
    pub(super) folder: PathBuf,
    /// NVRTC and its version.
    pub(super) compiler: String,
    /// Whether nothing has gone wrong with writing yet.
    pub(super) is_writable: AtomicBool,
}

impl Kept {
    /// The file that has `source` compiled with `options`.
    pub(super) fn file(&self, source: &[u8], options: &[&[u8]]) -> PathBuf {
        let mut name = Sha256::new();
        let mut add = |part: &[u8]| {
            name.update((part.len() as u64).to_le_bytes());
            name.update(part);
        };
        add(FORMAT.as_bytes());
        add(self.compiler.as_bytes());
        for option in options {
            let Some(include) = option.strip_prefix(INCLUDE) else {
                add(option);
                continue;
            };
            // Headers may be elsewhere on another machine. Lengths tell those of one version of CUDA from those
            // of another.
            let folder = String::from_utf8_lossy(include);
            let size = |name| fs::metadata(Path::new(&*folder).join(name)).map_or(0, |file| file.len());
            add(INCLUDE);
            add(HEADERS.map(|name| size(name).to_string()).join(" ").as_bytes());
        }
        add(&renumbered(source));
        self.folder.join(format!("{:x}.{EXTENSION}", name.finalize()))
    }

    /// What is in `file`; `None` if it is not there, or not as it was written.
    pub(super) fn read(&self, file: &Path) -> Option<Vec<u8>> {
        Some(kernel_of(&fs::read(file).ok()?)?.to_vec())
    }

    pub(super) fn write(&self, file: &Path, ptx: &[u8]) {
        if !self.is_writable.load(Ordering::Relaxed) {
            return;
        }
        let content = [&Sha256::digest(ptx)[..], ptx].concat();
        let written = fs::create_dir_all(&self.folder).and_then(|()| write_beside(file, &content));
        if let Err(error) = written {
            // Once is enough; the next process compiles again.
            self.is_writable.store(false, Ordering::Relaxed);
            let folder = self.folder.display();
            tracing::debug!("compiled kernels are not kept: writing to {folder} failed: {error}");
        }
    }
}

/// `source` with its variables, which are called `v` and a number, numbered in the order in which they come.
/// Sources that become the same differ in the names of variables alone.
fn renumbered(source: &[u8]) -> Vec<u8> {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let is_variable = |word: &[u8]| {
        word.split_first().is_some_and(|(first, rest)| {
            *first == b'v' && !rest.is_empty() && rest.iter().all(u8::is_ascii_digit)
        })
    };
    let mut numbers = HashMap::new();
    let mut renumbered = Vec::with_capacity(source.len());
    // Words, and what is between them.
    for part in source.chunk_by(|a, b| is_word(a) == is_word(b)) {
        if is_variable(part) {
            let next = numbers.len();
            let number = *numbers.entry(part).or_insert(next);
            renumbered.extend(format!("v{number}").bytes());
        } else {
            renumbered.extend(part);
        }
    }
    renumbered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(folder: &Path) -> Kept {
        let compiler = "13.0".to_owned();
        Kept { folder: folder.join("a/b"), compiler, is_writable: AtomicBool::new(true) }
    }

    #[test]
    fn what_was_written_is_found_by_what_it_was_made_of_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let kept = kept(folder.path());
        let include = format!("--include-path={}", folder.path().display());
        let options: [&[u8]; 2] = [b"-a", include.as_bytes()];
        let file = kept.file(b"source", &options);
        assert_eq!(kept.read(&file), None);
        assert!(file.file_name().and_then(|name| name.to_str()).is_some_and(is_file_name));
        kept.write(&file, b"ptx");
        assert_eq!(kept.read(&kept.file(b"source", &options)).as_deref(), Some(&b"ptx"[..]));
        // Anything else has another name.
        let newer = Kept { compiler: "13.1".to_owned(), ..self::kept(folder.path()) };
        let others = [
            kept.file(b"source2", &options),
            kept.file(b"source", &options[..1]),
            kept.file(b"source", &[b"-", b"a", options[1]]),
            newer.file(b"source", &options),
        ];
        fs::write(folder.path().join(HEADERS[0]), "newer").expect("a header");
        assert!(others.into_iter().chain([kept.file(b"source", &options)]).all(|o| o != file));

        // The same headers at another place are the same.
        let here = kept.file(b"source", &options);
        let moved = tempfile::tempdir().expect("a folder");
        fs::write(moved.path().join(HEADERS[0]), "newer").expect("a header");
        let include = format!("--include-path={}", moved.path().display());
        assert_eq!(kept.file(b"source", &[b"-a", include.as_bytes()]), here);
    }

    #[test]
    fn names_of_variables_make_no_other_kernel() {
        let same = |a: &str, b: &str| renumbered(a.as_bytes()) == renumbered(b.as_bytes());
        let source = "float v7 = v7_x[v12] + av1 + 1v2; v12 = v7;";
        assert_eq!(renumbered(source.as_bytes()), b"float v0 = v7_x[v1] + av1 + 1v2; v1 = v0;");
        assert!(same("v3 = v4 + v3;", "v9 = v10 + v9;"));
        assert!(same("v3 = v4 + v3;", "v4 = v3 + v4;"));
        for other in ["v3 = v3 + v4;", "v3 = v4 + v4;", "v3 = v4 + v5;", "w3 = v4 + w3;"] {
            assert!(!same("v3 = v4 + v3;", other), "{other}");
        }
    }

    #[test]
    fn damaged_files_count_as_none_and_are_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let kept = kept(folder.path());
        let file = kept.file(b"source", &[]);
        kept.write(&file, b"a kernel");
        let whole = fs::read(&file).expect("a file");
        for end in [0, CHECKSUM - 1, CHECKSUM, whole.len() - 1] {
            fs::write(&file, &whole[..end]).expect("a file");
            assert_eq!(kept.read(&file), None, "{end} bytes");
        }
        kept.write(&file, b"a kernel");
        assert_eq!(kept.read(&file).as_deref(), Some(&b"a kernel"[..]));
        // Nothing is left beside it.
        assert_eq!(fs::read_dir(&kept.folder).expect("the folder").count(), 1);
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        // In place of a folder.
        fs::write(folder.path().join("a"), "a file").expect("a file");
        let kept = kept(folder.path());
        let file = kept.file(b"source", &[]);
        kept.write(&file, b"ptx");
        kept.write(&file, b"ptx");
        assert_eq!(kept.read(&file), None);
        assert!(!kept.is_writable.load(Ordering::Relaxed));
    }
}
