//! Files of compiled kernels, named after the source, the options, and the versions of NVRTC and CUDA's headers, so
//! that machines can share them. CubeCL numbers some variables in the order of a hash table, so variables are
//! renumbered first. Files are written atomically and contain a checksum; a damaged file counts as missing.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

/// Version of the naming scheme and file format, part of every name.
const FORMAT: &str = "3";

const CHECKSUM: usize = 32;

/// The form of a compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Form {
    /// Machine code, which the driver loads without compiling.
    Cubin,
    /// PTX, which the driver compiles again.
    Ptx,
}

impl Form {
    /// All forms, best first.
    pub const ALL: [Form; 2] = [Form::Cubin, Form::Ptx];

    /// File extension of kernels of this form.
    pub fn extension(self) -> &'static str {
        match self {
            Form::Cubin => "cubin",
            Form::Ptx => "ptx",
        }
    }
}

const INCLUDE: &[u8] = b"--include-path=";

/// Returns the kernel in a file's `content`, or `None` if the file is damaged.
pub fn kernel_of(content: &[u8]) -> Option<&[u8]> {
    let (checksum, kernel) = content.split_at_checked(CHECKSUM)?;
    (checksum == &Sha256::digest(kernel)[..]).then_some(kernel)
}

/// Returns the form of the kernel in file `name`; `None` if it is not a kernel file.
pub fn form_of(name: &str) -> Option<Form> {
    let (digest, extension) = name.split_once('.')?;
    let form = Form::ALL.into_iter().find(|form| form.extension() == extension)?;
    (digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(form)
}

/// The folder of kernels of one compiler.
pub struct Kept {
    folder: PathBuf,
    compiler: String,
    is_writable: AtomicBool,
}

impl Kept {
    /// Uses `folder`, which need not exist, for kernels compiled by `compiler`.
    pub fn new(folder: PathBuf, compiler: String) -> Self {
        Kept { folder, compiler, is_writable: AtomicBool::new(true) }
    }

    /// Returns the path, without extension, for `source` compiled with `options`.
    pub fn file(&self, source: &[u8], options: &[&[u8]]) -> PathBuf {
        let mut name = Sha256::new();
        let mut add = |part: &[u8]| {
            name.update((part.len() as u64).to_le_bytes());
            name.update(part);
        };
        add(FORMAT.as_bytes());
        add(self.compiler.as_bytes());
        for option in options {
            match option.strip_prefix(INCLUDE) {
                None => add(option),
                Some(folder) => {
                    add(INCLUDE);
                    add(version_of_headers(Path::new(&*String::from_utf8_lossy(folder))).as_bytes());
                }
            }
        }
        add(&renumbered(source));
        self.folder.join(format!("{:x}", name.finalize()))
    }

    /// Reads the kernel of `file` in this form; `None` if it is missing or damaged.
    pub fn read(&self, file: &Path, form: Form) -> Option<Vec<u8>> {
        Some(kernel_of(&fs::read(file.with_extension(form.extension())).ok()?)?.to_vec())
    }

    /// Stores `kernel` as `file`, if the folder is writable.
    pub fn write(&self, file: &Path, form: Form, kernel: &[u8]) {
        if !self.is_writable.load(Ordering::Relaxed) {
            return;
        }
        let content = [&Sha256::digest(kernel)[..], kernel].concat();
        let file = file.with_extension(form.extension());
        if let Err(error) = self.replace(&file, &content) {
            self.is_writable.store(false, Ordering::Relaxed);
            let folder = self.folder.display();
            tracing::debug!("compiled kernels are not kept: writing to {folder} failed: {error}");
        }
    }

    /// A crash of the machine may leave a damaged file, which is replaced later.
    fn replace(&self, file: &Path, content: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let mut temporary = NamedTempFile::new_in(&self.folder)?;
        temporary.write_all(content)?;
        temporary.persist(file)?;
        Ok(())
    }
}

/// Returns the version of CUDA's headers in `folder`, such as `13000`; empty if there are none.
fn version_of_headers(folder: &Path) -> String {
    const NAME: &str = "#define CUDART_VERSION";
    let mut start = Vec::new();
    if let Ok(file) = File::open(folder.join("cuda_runtime_api.h")) {
        let _ = file.take(32 << 10).read_to_end(&mut start);
    }
    let start = String::from_utf8_lossy(&start);
    let version = start.lines().find_map(|line| line.strip_prefix(NAME));
    version.map_or_else(String::new, |version| version.trim().to_owned())
}

/// Renumbers variables such as `v12` in the order of their appearance. Sources with equal results differ only in the
/// names of variables.
fn renumbered(source: &[u8]) -> Vec<u8> {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let is_variable = |word: &[u8]| {
        word.split_first().is_some_and(|(first, rest)| {
            *first == b'v' && !rest.is_empty() && rest.iter().all(u8::is_ascii_digit)
        })
    };
    let mut numbers = HashMap::new();
    let mut renumbered = Vec::with_capacity(source.len());
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
        Kept::new(folder.join("a/b"), "13.0".to_owned())
    }

    fn write_headers(folder: &Path, version: &str) {
        let text = format!("/* a licence */\n#define CUDART_VERSION  {version}\n");
        fs::write(folder.join("cuda_runtime_api.h"), text).expect("a header");
    }

    #[test]
    fn kernels_are_keyed_by_source_and_versions() {
        let folder = tempfile::tempdir().expect("a folder");
        let kept = kept(folder.path());
        write_headers(folder.path(), "13000");
        let include = format!("--include-path={}", folder.path().display());
        let options: [&[u8]; 2] = [b"-a", include.as_bytes()];
        let file = kept.file(b"source", &options);
        assert_eq!(kept.read(&file, Form::Ptx), None);
        kept.write(&file, Form::Ptx, b"ptx");
        assert_eq!(kept.read(&kept.file(b"source", &options), Form::Ptx).as_deref(), Some(&b"ptx"[..]));
        assert_eq!(kept.read(&file, Form::Cubin), None);
        let newer = Kept::new(kept.folder.clone(), "13.1".to_owned());
        let others = [
            kept.file(b"source2", &options),
            kept.file(b"source", &options[..1]),
            kept.file(b"source", &[b"-", b"a", options[1]]),
            newer.file(b"source", &options),
        ];
        write_headers(folder.path(), "13010");
        assert!(others.into_iter().chain([kept.file(b"source", &options)]).all(|o| o != file));

        let here = kept.file(b"source", &options);
        let moved = tempfile::tempdir().expect("a folder");
        write_headers(moved.path(), "13010");
        let include = format!("--include-path={}", moved.path().display());
        assert_eq!(kept.file(b"source", &[b"-a", include.as_bytes()]), here);
    }

    #[test]
    fn names_tell_the_form() {
        let digest = "0123456789abcdef".repeat(4);
        assert_eq!(form_of(&format!("{digest}.cubin")), Some(Form::Cubin));
        assert_eq!(form_of(&format!("{digest}.ptx")), Some(Form::Ptx));
        for other in [digest.clone(), format!("{digest}.txt"), format!("{digest}0.ptx"), "x.ptx".to_owned()] {
            assert_eq!(form_of(&other), None, "{other}");
        }
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
    fn damaged_files_are_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let kept = kept(folder.path());
        let file = kept.file(b"source", &[]);
        kept.write(&file, Form::Cubin, b"a kernel");
        let path = file.with_extension("cubin");
        let whole = fs::read(&path).expect("a file");
        for end in [0, CHECKSUM - 1, CHECKSUM, whole.len() - 1] {
            fs::write(&path, &whole[..end]).expect("a file");
            assert_eq!(kept.read(&file, Form::Cubin), None, "{end} bytes");
        }
        kept.write(&file, Form::Cubin, b"a kernel");
        assert_eq!(kept.read(&file, Form::Cubin).as_deref(), Some(&b"a kernel"[..]));
        assert_eq!(fs::read_dir(&kept.folder).expect("the folder").count(), 1);
    }

    #[test]
    fn an_unwritable_folder_only_disables_the_cache() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("a"), "a file").expect("a file");
        let kept = kept(folder.path());
        let file = kept.file(b"source", &[]);
        kept.write(&file, Form::Ptx, b"ptx");
        kept.write(&file, Form::Ptx, b"ptx");
        assert_eq!(kept.read(&file, Form::Ptx), None);
        assert!(!kept.is_writable.load(Ordering::Relaxed));
    }
}
