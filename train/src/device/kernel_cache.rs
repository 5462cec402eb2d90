//! Kernels that NVRTC has compiled, kept in the user's cache folder for the processes to come.
//!
//! CubeCL compiles every kernel anew in every process, which takes NVRTC half a minute for a model. Its own
//! cache would be a database of one writer, with its engine; files (`kernel_files`) need neither, and
//! processes of any number of machines can share them. CubeCL finds the functions here in place of NVRTC's
//! (`alias`): what is in the folder is handed out without compiling it, and what is not is compiled by NVRTC
//! and put there. Whatever goes wrong with the folder, kernels are compiled.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::nvrtc::sys::nvrtcProgram;
use kiln_collectives::nvidia::{Lookup, environment};
use libloading::Library;

use super::alias::Instead;
use super::cache_folder::cache_folder;
use super::kernel_counts::KernelCounts;
use super::kernel_files::{EXTENSION, Kept};
use super::libraries;

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

/// Kernels that this process has taken from the folder, those that NVRTC has compiled, and the nanoseconds that
/// compiling took.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static COMPILED: AtomicU64 = AtomicU64::new(0);
static COMPILING: AtomicU64 = AtomicU64::new(0);

struct Cache {
    nvrtc: Nvrtc,
    /// `None` if there is no folder to keep kernels in.
    kept: Option<Kept>,
    /// What is known of NVRTC's programs, by their addresses.
    programs: Mutex<HashMap<usize, Program>>,
}

enum Program {
    /// Not compiled yet.
    Source(Vec<u8>),
    /// Taken from the folder.
    Compiled(Vec<u8>),
}

/// The functions that are to be found in place of those of `library`, which is NVRTC, and loaded. None after
/// the first call.
pub(super) fn instead_of(library: &str) -> Vec<Instead> {
    // SAFETY: `library` is NVRTC.
    let Ok((nvrtc, compiler)) = (unsafe { Nvrtc::of(library) }) else { return Vec::new() };
    let kept =
        folder(&environment).map(|folder| Kept { folder, compiler, is_writable: AtomicBool::new(true) });
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
pub(super) fn folder(lookup: &Lookup) -> Option<PathBuf> {
    Some(cache_folder(lookup)?.join("kernels"))
}

/// [`folder`], where something is to be kept there.
///
/// # Errors
///
/// If there is none.
pub(super) fn folder_to_keep() -> std::io::Result<PathBuf> {
    folder(&environment).ok_or_else(|| {
        std::io::Error::new(
            std::io::ErrorKind::NotFound,
            "neither XDG_CACHE_HOME nor HOME says where kernels are kept",
        )
    })
}

/// The kernels of this process so far.
pub(super) fn counts() -> KernelCounts {
    KernelCounts {
        taken: TAKEN.load(Ordering::Relaxed),
        compiled: COMPILED.load(Ordering::Relaxed),
        compiling: Duration::from_nanos(COMPILING.load(Ordering::Relaxed)),
    }
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
            return compile(cache, program, count, options);
        };
        let texts: Vec<&[u8]> = (0..usize::try_from(count).unwrap_or(0))
            .map(|index| CStr::from_ptr(*options.add(index)).to_bytes())
            .collect();
        let file = cache.kept.as_ref().map(|kept| (kept, kept.file(&source, &texts)));
        if let Some(ptx) = file.as_ref().and_then(|(kept, file)| kept.read(file)) {
            TAKEN.fetch_add(1, Ordering::Relaxed);
            cache.programs().insert(program as usize, Program::Compiled(ptx));
            return SUCCESS;
        }
        let code = compile(cache, program, count, options);
        if code == SUCCESS
            && let Some((kept, file)) = file
            && let Some(ptx) = cache.nvrtc.compiled(program)
        {
            kept.write(&file, &ptx);
        }
        code
    }
}

/// Lets NVRTC compile, and counts it.
///
/// # Safety
///
/// As for `nvrtcCompileProgram`.
unsafe fn compile(
    cache: &Cache,
    program: nvrtcProgram,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    let begun = Instant::now();
    // SAFETY: the caller's promise.
    let code = unsafe { (cache.nvrtc.compile)(program, count, options) };
    COMPILED.fetch_add(1, Ordering::Relaxed);
    let nanos = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
    COMPILING.fetch_add(nanos, Ordering::Relaxed);
    code
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
