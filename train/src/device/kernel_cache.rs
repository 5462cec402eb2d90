//! Kernels that NVRTC has compiled, kept in the user's cache folder for the processes to come.
//!
//! CubeCL compiles every kernel anew in every process, which takes NVRTC half a minute for a model. Its own
//! cache would be a database of one writer, with its engine; files need neither, and processes of any number
//! of machines can share them. CubeCL finds the functions here in place of NVRTC's (`alias`): what is in the
//! folder is handed out without compiling it, and what is not is compiled by NVRTC and put there.
//!
//! A file is named after all that its content follows from: the source, the options, NVRTC and CUDA's
//! headers. Of the source, CubeCL numbers some variables in the order of a hash table, another one in every
//! process; so variables are numbered anew here, as they come. It is written beside and renamed, and carries
//! its own checksum. So processes may read and write at the same time, a stale file is never asked for, and a
//! damaged one counts as none. Whatever goes wrong with the folder, kernels are compiled.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::nvrtc::sys::nvrtcProgram;
use kiln_collectives::nvidia::{Lookup, environment};
use libloading::Library;
use sha2::{Digest, Sha256};

use super::alias::Instead;
use super::cache_folder::cache_folder;
use super::libraries::{self, HEADERS};
use crate::metrics::write_beside;

/// Part of every name: the way in which files are named and filled.
const FORMAT: &str = "1";

/// Bytes of the checksum that a file begins with.
const CHECKSUM: usize = 32;

const EXTENSION: &str = "ptx";

/// All went well, in NVRTC's words.
const SUCCESS: c_int = 0;

/// NVRTC's word for an error that is not the caller's.
const INTERNAL_ERROR: c_int = 11;

/// The cache of this process, once it is in place.
static CACHE: OnceLock<Cache> = OnceLock::new();

/// NVRTC's own functions; the types are those of its header, with numbers in place of enumerations.
struct Nvrtc {
    create: Create,
    compile: Compile,
    ptx_size: PtxSize,
    ptx: Ptx,
    destroy: Destroy,
}

type Create = unsafe extern "C" fn(
    *mut nvrtcProgram,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(nvrtcProgram, c_int, *const *const c_char) -> c_int;
type PtxSize = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> c_int;
type Ptx = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> c_int;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
type Destroy = unsafe extern "C" fn(*mut nvrtcProgram) -> c_int;

struct Cache {
    nvrtc: Nvrtc,
    kept: Kept,
    /// What is known of NVRTC's programs, by their addresses.
    programs: Mutex<HashMap<usize, Program>>,
}

enum Program {
    /// Not compiled yet.
    Source(Vec<u8>),
    /// Taken from the folder.
    Compiled(Vec<u8>),
}

/// The functions that are to be found in place of those of `library`, which is NVRTC, and loaded. None if
/// there is no folder to keep kernels in, and none after the first call.
pub(super) fn instead_of(library: &str) -> Vec<Instead> {
    let Some(folder) = folder(&environment) else { return Vec::new() };
    // SAFETY: `library` is NVRTC.
    let Ok((nvrtc, compiler)) = (unsafe { Nvrtc::of(library) }) else { return Vec::new() };
    let kept = Kept { folder, compiler, is_writable: AtomicBool::new(true) };
    if CACHE.set(Cache { nvrtc, kept, programs: Mutex::default() }).is_err() {
        return Vec::new();
    }
    vec![
        ("nvrtcCreateProgram", create_program as *const () as usize),
        ("nvrtcCompileProgram", compile_program as *const () as usize),
        ("nvrtcGetPTXSize", get_ptx_size as *const () as usize),
        ("nvrtcGetPTX", get_ptx as *const () as usize),
        ("nvrtcDestroyProgram", destroy_program as *const () as usize),
    ]
}

/// Where kernels are kept: in `kernels` of Kiln's folder for caches, if there is one.
fn folder(lookup: &Lookup) -> Option<PathBuf> {
    Some(cache_folder(lookup)?.join("kernels"))
}

/// A line for the doctor: where kernels are kept, and how many there are.
pub(super) fn describe() -> String {
    let Some(folder) = folder(&environment) else {
        return "compiled by every process anew, since neither XDG_CACHE_HOME nor HOME says where to keep them"
            .to_owned();
    };
    let (mut count, mut bytes) = (0, 0);
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|extension| extension == EXTENSION) {
            count += 1;
            bytes += entry.metadata().map_or(0, |file| file.len());
        }
    }
    let mib = bytes as f64 / f64::from(1 << 20);
    format!("{count} compiled kernels ({mib:.1} MiB) are kept in {}", folder.display())
}

impl Nvrtc {
    /// The functions of NVRTC that is loaded as `library`, and what tells it from others.
    ///
    /// # Safety
    ///
    /// `library` is the name of NVRTC.
    unsafe fn of(library: &str) -> Result<(Self, String), libloading::Error> {
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: the caller's promise; the types are those of NVRTC's header, and the numbers outlive the
        // call. The library stays loaded for the rest of the process's life.
        let nvrtc = unsafe {
            let library = Library::new(library)?;
            library.get::<Version>("nvrtcVersion")?(&mut major, &mut minor);
            let nvrtc = Nvrtc {
                create: *library.get::<Create>("nvrtcCreateProgram")?,
                compile: *library.get::<Compile>("nvrtcCompileProgram")?,
                ptx_size: *library.get::<PtxSize>("nvrtcGetPTXSize")?,
                ptx: *library.get::<Ptx>("nvrtcGetPTX")?,
                destroy: *library.get::<Destroy>("nvrtcDestroyProgram")?,
            };
            std::mem::forget(library);
            nvrtc
        };
        let file = libraries::loaded_from("nvrtc").and_then(|path| fs::metadata(path).ok());
        let size = file.map_or(0, |file| file.len());
        Ok((nvrtc, format!("NVRTC {major}.{minor} of {size} bytes")))
    }

    /// What NVRTC has made of `program`.
    ///
    /// # Safety
    ///
    /// It is NVRTC's, and compiled.
    unsafe fn compiled(&self, program: nvrtcProgram) -> Option<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the caller's promise; NVRTC writes a number, and then as many bytes as it has said.
        unsafe {
            if (self.ptx_size)(program, &mut size) != SUCCESS {
                return None;
            }
            let mut ptx = vec![0_u8; size];
            ((self.ptx)(program, ptx.as_mut_ptr().cast()) == SUCCESS).then_some(ptx)
        }
    }
}

impl Cache {
    fn programs(&self) -> MutexGuard<'_, HashMap<usize, Program>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The folder, and what compiles what is not there.
struct Kept {
    folder: PathBuf,
    /// NVRTC and its version.
    compiler: String,
    /// Whether nothing has gone wrong with writing yet.
    is_writable: AtomicBool,
}

impl Kept {
    /// The file that has `source` compiled with `options`.
    fn file(&self, source: &[u8], options: &[&[u8]]) -> PathBuf {
        let mut name = Sha256::new();
        let mut add = |part: &[u8]| {
            name.update((part.len() as u64).to_le_bytes());
            name.update(part);
        };
        add(FORMAT.as_bytes());
        add(self.compiler.as_bytes());
        for option in options {
            add(option);
            if let Some(include) = option.strip_prefix(b"--include-path=") {
                let folder = String::from_utf8_lossy(include);
                // Lengths tell the headers of one version of CUDA from those of another.
                let size = |name| fs::metadata(Path::new(&*folder).join(name)).map_or(0, |file| file.len());
                add(HEADERS.map(|name| size(name).to_string()).join(" ").as_bytes());
            }
        }
        add(&renumbered(source));
        self.folder.join(format!("{:x}.{EXTENSION}", name.finalize()))
    }

    /// What is in `file`; `None` if it is not there, or not as it was written.
    fn read(&self, file: &Path) -> Option<Vec<u8>> {
        let content = fs::read(file).ok()?;
        let (checksum, ptx) = content.split_at_checked(CHECKSUM)?;
        (checksum == &Sha256::digest(ptx)[..]).then(|| ptx.to_vec())
    }

    fn write(&self, file: &Path, ptx: &[u8]) {
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

/// As `nvrtcCreateProgram`.
unsafe extern "C" fn create_program(
    program: *mut nvrtcProgram,
    source: *const c_char,
    name: *const c_char,
    count: c_int,
    headers: *const *const c_char,
    names: *const *const c_char,
) -> c_int {
    let Some(cache) = CACHE.get() else { return INTERNAL_ERROR };
    // SAFETY: what the caller promises NVRTC: text that ends with a zero, and room for a program.
    unsafe {
        let code = (cache.nvrtc.create)(program, source, name, count, headers, names);
        // Headers of its own are not in what a file is named after.
        if code == SUCCESS && count == 0 && !source.is_null() {
            let source = CStr::from_ptr(source).to_bytes().to_vec();
            cache.programs().insert(*program as usize, Program::Source(source));
        }
        code
    }
}

/// As `nvrtcCompileProgram`, which is not called for what is in the folder.
unsafe extern "C" fn compile_program(
    program: nvrtcProgram,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    let Some(cache) = CACHE.get() else { return INTERNAL_ERROR };
    let known = cache.programs().remove(&(program as usize));
    // SAFETY: what the caller promises NVRTC: its program, and as many texts as it says.
    unsafe {
        let Some(Program::Source(source)) = known else {
            return (cache.nvrtc.compile)(program, count, options);
        };
        let texts: Vec<&[u8]> = (0..usize::try_from(count).unwrap_or(0))
            .map(|index| CStr::from_ptr(*options.add(index)).to_bytes())
            .collect();
        let file = cache.kept.file(&source, &texts);
        if let Some(ptx) = cache.kept.read(&file) {
            cache.programs().insert(program as usize, Program::Compiled(ptx));
            return SUCCESS;
        }
        let code = (cache.nvrtc.compile)(program, count, options);
        if code == SUCCESS
            && let Some(ptx) = cache.nvrtc.compiled(program)
        {
            cache.kept.write(&file, &ptx);
        }
        code
    }
}

/// As `nvrtcGetPTXSize`.
unsafe extern "C" fn get_ptx_size(program: nvrtcProgram, size: *mut usize) -> c_int {
    let Some(cache) = CACHE.get() else { return INTERNAL_ERROR };
    // SAFETY: what the caller promises NVRTC: its program, and room for a number.
    unsafe {
        if let Some(Program::Compiled(ptx)) = cache.programs().get(&(program as usize)) {
            *size = ptx.len();
            return SUCCESS;
        }
        (cache.nvrtc.ptx_size)(program, size)
    }
}

/// As `nvrtcGetPTX`.
unsafe extern "C" fn get_ptx(program: nvrtcProgram, to: *mut c_char) -> c_int {
    let Some(cache) = CACHE.get() else { return INTERNAL_ERROR };
    // SAFETY: what the caller promises NVRTC: its program, and room for as many bytes as were said.
    unsafe {
        if let Some(Program::Compiled(ptx)) = cache.programs().get(&(program as usize)) {
            ptr::copy_nonoverlapping(ptx.as_ptr(), to.cast(), ptx.len());
            return SUCCESS;
        }
        (cache.nvrtc.ptx)(program, to)
    }
}

/// As `nvrtcDestroyProgram`.
unsafe extern "C" fn destroy_program(program: *mut nvrtcProgram) -> c_int {
    let Some(cache) = CACHE.get() else { return INTERNAL_ERROR };
    // SAFETY: what the caller promises NVRTC: its program.
    unsafe {
        cache.programs().remove(&(*program as usize));
        (cache.nvrtc.destroy)(program)
    }
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

    #[test]
    fn the_folder_is_the_users() {
        let place = |xdg: Option<&str>, home: Option<&str>| {
            folder(&|name| if name == "HOME" { home } else { xdg }.map(PathBuf::from))
        };
        assert_eq!(place(Some("/c"), Some("/h")), Some("/c/kiln/kernels".into()));
        assert_eq!(place(None, Some("/h")), Some("/h/.cache/kiln/kernels".into()));
        // The specification has relative paths ignored.
        assert_eq!(place(Some("c"), Some("/h")), Some("/h/.cache/kiln/kernels".into()));
        assert_eq!(place(None, None), None);
    }
}
