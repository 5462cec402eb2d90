//! Caches kernels compiled by NVRTC in the user's cache folder, because NVRTC takes half a minute for a model. CubeCL's
//! own cache is a database with a single writer; many processes and machines can share plain files
//! ([`kernel_files`](crate::kernel_files)). CubeCL finds this module's functions instead of NVRTC's (`alias`). If the
//! folder is unusable, kernels are simply compiled.
//!
//! NVRTC creates both PTX and machine code (a cubin) for the real architecture that CubeCL requests. The driver would
//! take as long as NVRTC to compile PTX, so CubeCL gets the cubin when it asks for PTX: `cuModuleLoadData` accepts
//! either. If the driver refuses a process's first cubin, kernels are returned as PTX.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};
use cudarc::nvrtc::sys::nvrtcProgram;
use libloading::Library;

use crate::alias::Instead;
use crate::kernel_files::{Form, Kept, form_of};
use crate::places::{Lookup, cache_folder, environment};

pub(crate) const SUCCESS: c_int = 0;

const INTERNAL_ERROR: c_int = 11;

static CACHE: OnceLock<Cache> = OnceLock::new();

/// NVRTC's own functions; their types match its header, with numbers instead of enumerations.
pub(crate) struct Compiler {
    pub(crate) create: Create,
    pub(crate) compile: Compile,
    ptx: Getter,
    cubin: Getter,
    log: Getter,
    pub(crate) destroy: Destroy,
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
type Size = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> c_int;
type Content = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> c_int;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
type Destroy = unsafe extern "C" fn(*mut nvrtcProgram) -> c_int;

#[derive(Clone, Copy)]
struct Getter {
    size: Size,
    content: Content,
}

/// Kernels read from the folder, kernels compiled by NVRTC, and nanoseconds spent on compiling.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static COMPILED: AtomicU64 = AtomicU64::new(0);
static COMPILING: AtomicU64 = AtomicU64::new(0);

/// Numbers of kernels that a process has used, by origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Kernels read from the folder.
    pub taken: u64,
    /// Kernels compiled by NVRTC.
    pub compiled: u64,
    /// Total compile time of all threads.
    pub compiling: Duration,
}

struct Cache {
    compiler: Compiler,
    kept: Option<Kept>,
    programs: Mutex<HashMap<usize, Program>>,
    loads_cubins: OnceLock<bool>,
}

enum Program {
    Source(Vec<u8>),
    Compiled(Vec<u8>),
}

/// Returns the functions that replace those of `library`, the loaded NVRTC. Empty after the first call.
pub(crate) fn instead_of(library: &str) -> Vec<Instead> {
    // SAFETY: `library` is NVRTC.
    let Ok((compiler, name)) = (unsafe { Compiler::of(library) }) else { return Vec::new() };
    let kept = folder(&environment).map(|folder| Kept::new(folder, name));
    let cache = Cache { compiler, kept, programs: Mutex::default(), loads_cubins: OnceLock::new() };
    if CACHE.set(cache).is_err() {
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

pub(crate) fn compiler() -> Option<&'static Compiler> {
    CACHE.get().map(|cache| &cache.compiler)
}

/// Returns the folder of kernels: `kernels` in Kiln's cache folder, if there is one.
pub fn folder(lookup: &Lookup) -> Option<PathBuf> {
    Some(cache_folder(lookup)?.join("kernels"))
}

/// Returns [`folder`], for callers that write to it.
///
/// # Errors
///
/// Fails if there is no cache folder.
pub fn folder_to_keep() -> std::io::Result<PathBuf> {
    folder(&environment).ok_or_else(|| {
        std::io::Error::new(
            std::io::ErrorKind::NotFound,
            "there is no folder for kernels, since neither XDG_CACHE_HOME nor HOME is an absolute path",
        )
    })
}

/// Returns the numbers of kernels that this process has used so far.
pub fn counts() -> Counts {
    Counts {
        taken: TAKEN.load(Ordering::Relaxed),
        compiled: COMPILED.load(Ordering::Relaxed),
        compiling: Duration::from_nanos(COMPILING.load(Ordering::Relaxed)),
    }
}

/// Describes in one line where kernels are kept, and how many there are.
pub fn describe() -> String {
    let Some(folder) = folder(&environment) else {
        return "compiled anew by every process, since neither XDG_CACHE_HOME nor HOME is an absolute path"
            .to_owned();
    };
    let (mut count, mut bytes) = (0, 0);
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().and_then(form_of).is_some() {
            count += 1;
            bytes += entry.metadata().map_or(0, |file| file.len());
        }
    }
    let mib = bytes as f64 / f64::from(1 << 20);
    format!("{count} compiled kernels ({mib:.1} MiB) are kept in {}", folder.display())
}

impl Compiler {
    /// Looks up the functions and the version of the NVRTC that is loaded as `library`.
    ///
    /// # Safety
    ///
    /// `library` must be the name of NVRTC.
    unsafe fn of(library: &str) -> Result<(Self, String), libloading::Error> {
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: guaranteed by the caller; the types match NVRTC's header, and the numbers outlive the call. The
        // library stays loaded.
        let compiler = unsafe {
            let library = Library::new(library)?;
            library.get::<Version>("nvrtcVersion")?(&mut major, &mut minor);
            let getter = |size: &str, content: &str| -> Result<Getter, libloading::Error> {
                Ok(Getter { size: *library.get::<Size>(size)?, content: *library.get::<Content>(content)? })
            };
            let compiler = Compiler {
                create: *library.get::<Create>("nvrtcCreateProgram")?,
                compile: *library.get::<Compile>("nvrtcCompileProgram")?,
                ptx: getter("nvrtcGetPTXSize", "nvrtcGetPTX")?,
                cubin: getter("nvrtcGetCUBINSize", "nvrtcGetCUBIN")?,
                log: getter("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?,
                destroy: *library.get::<Destroy>("nvrtcDestroyProgram")?,
            };
            std::mem::forget(library);
            compiler
        };
        Ok((compiler, format!("NVRTC {major}.{minor}")))
    }

    /// Returns the log of compiling `program`.
    ///
    /// # Safety
    ///
    /// `program` must be NVRTC's.
    pub(crate) unsafe fn log(&self, program: nvrtcProgram) -> Option<String> {
        // SAFETY: guaranteed by the caller.
        let text = unsafe { self.log.of(program) }?;
        Some(String::from_utf8_lossy(&text).trim_end_matches(['\0', '\n']).to_owned())
    }
}

impl Getter {
    /// Returns NVRTC's output for `program`, if there is one of this kind.
    ///
    /// # Safety
    ///
    /// `program` must be NVRTC's, and compiled.
    unsafe fn of(self, program: nvrtcProgram) -> Option<Vec<u8>> {
        let mut size = 0;
        // SAFETY: guaranteed by the caller; NVRTC writes a number, and then that many bytes.
        unsafe {
            if (self.size)(program, &mut size) != SUCCESS || size == 0 {
                return None;
            }
            let mut content = vec![0_u8; size];
            ((self.content)(program, content.as_mut_ptr().cast()) == SUCCESS).then_some(content)
        }
    }
}

impl Cache {
    fn programs(&self) -> MutexGuard<'_, HashMap<usize, Program>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, kept: &Kept, file: &Path) -> Option<Vec<u8>> {
        let are_refused = self.loads_cubins.get() == Some(&false);
        let cubin = if are_refused { None } else { kept.read(file, Form::Cubin) };
        cubin.filter(|cubin| self.loads(cubin)).or_else(|| kept.read(file, Form::Ptx))
    }

    /// Returns the compiled kernel in the form that the driver loads, and stores it as `file`.
    ///
    /// # Safety
    ///
    /// `program` must be NVRTC's, and compiled.
    unsafe fn compiled(&self, program: nvrtcProgram, file: Option<&(&Kept, PathBuf)>) -> Option<Vec<u8>> {
        let keep = |form, kernel: &[u8]| file.iter().for_each(|(kept, file)| kept.write(file, form, kernel));
        // SAFETY: guaranteed by the caller.
        let (cubin, ptx) = unsafe { (self.compiler.cubin.of(program), self.compiler.ptx.of(program)) };
        if let Some(cubin) = cubin {
            // Stored even if this driver refuses it: folders are copied to other machines.
            keep(Form::Cubin, &cubin);
            if self.loads(&cubin) {
                return Some(cubin);
            }
        }
        let ptx = ptx?;
        keep(Form::Ptx, &ptx);
        Some(ptx)
    }

    /// Returns whether the driver loads cubins. Loads the first one as a test.
    fn loads(&self, cubin: &[u8]) -> bool {
        if let Some(loads) = self.loads_cubins.get() {
            return *loads;
        }
        let mut module = ptr::null_mut();
        // SAFETY: the cubin is complete and contains its own size; the module is unloaded unused. The driver is
        // present, because CubeCL compiles kernels for its GPU.
        let result = unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) };
        match result {
            // SAFETY: the module was loaded just now.
            CUresult::CUDA_SUCCESS => drop(unsafe { sys::cuModuleUnload(module) }),
            CUresult::CUDA_ERROR_NOT_INITIALIZED | CUresult::CUDA_ERROR_INVALID_CONTEXT => return false,
            refused => tracing::debug!("the driver loads no cubins ({refused:?}); it gets PTX"),
        }
        *self.loads_cubins.get_or_init(|| result == CUresult::CUDA_SUCCESS)
    }
}

unsafe extern "C" fn create_program(
    program: *mut nvrtcProgram,
    source: *const c_char,
    name: *const c_char,
    count: c_int,
    headers: *const *const c_char,
    names: *const *const c_char,
) -> c_int {
    let Some(cache) = CACHE.get() else { return INTERNAL_ERROR };
    // SAFETY: guaranteed by NVRTC's caller: null-terminated text, and room for a program.
    unsafe {
        let code = (cache.compiler.create)(program, source, name, count, headers, names);
        // File names do not cover headers that are passed in memory.
        if code == SUCCESS && count == 0 && !source.is_null() {
            let source = CStr::from_ptr(source).to_bytes().to_vec();
            cache.programs().insert(*program as usize, Program::Source(source));
        }
        code
    }
}

/// Replaces `nvrtcCompileProgram`, which is not called for kernels in the folder.
unsafe extern "C" fn compile_program(
    program: nvrtcProgram,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    let Some(cache) = CACHE.get() else { return INTERNAL_ERROR };
    let known = cache.programs().remove(&(program as usize));
    // SAFETY: guaranteed by NVRTC's caller: its program, and `count` options.
    unsafe {
        let Some(Program::Source(source)) = known else {
            return compile(cache, program, count, options);
        };
        let texts: Vec<&[u8]> = (0..usize::try_from(count).unwrap_or(0))
            .map(|index| CStr::from_ptr(*options.add(index)).to_bytes())
            .collect();
        let file = cache.kept.as_ref().map(|kept| (kept, kept.file(&source, &texts)));
        if let Some(kernel) = file.as_ref().and_then(|(kept, file)| cache.read(kept, file)) {
            TAKEN.fetch_add(1, Ordering::Relaxed);
            cache.programs().insert(program as usize, Program::Compiled(kernel));
            return SUCCESS;
        }
        let code = compile(cache, program, count, options);
        if code == SUCCESS
            && let Some(kernel) = cache.compiled(program, file.as_ref())
        {
            cache.programs().insert(program as usize, Program::Compiled(kernel));
        }
        code
    }
}

/// Compiles with NVRTC, and adds to the counts.
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
    // SAFETY: guaranteed by the caller.
    let code = unsafe { (cache.compiler.compile)(program, count, options) };
    COMPILED.fetch_add(1, Ordering::Relaxed);
    let nanos = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
    COMPILING.fetch_add(nanos, Ordering::Relaxed);
    code
}

unsafe extern "C" fn get_ptx_size(program: nvrtcProgram, size: *mut usize) -> c_int {
    let Some(cache) = CACHE.get() else { return INTERNAL_ERROR };
    // SAFETY: guaranteed by NVRTC's caller: its program, and room for a number.
    unsafe {
        if let Some(Program::Compiled(kernel)) = cache.programs().get(&(program as usize)) {
            *size = kernel.len();
            return SUCCESS;
        }
        (cache.compiler.ptx.size)(program, size)
    }
}

unsafe extern "C" fn get_ptx(program: nvrtcProgram, to: *mut c_char) -> c_int {
    let Some(cache) = CACHE.get() else { return INTERNAL_ERROR };
    // SAFETY: guaranteed by NVRTC's caller: its program, and room for the number of bytes reported before.
    unsafe {
        if let Some(Program::Compiled(kernel)) = cache.programs().get(&(program as usize)) {
            ptr::copy_nonoverlapping(kernel.as_ptr(), to.cast(), kernel.len());
            return SUCCESS;
        }
        (cache.compiler.ptx.content)(program, to)
    }
}

unsafe extern "C" fn destroy_program(program: *mut nvrtcProgram) -> c_int {
    let Some(cache) = CACHE.get() else { return INTERNAL_ERROR };
    // SAFETY: guaranteed by NVRTC's caller: its program.
    unsafe {
        cache.programs().remove(&(*program as usize));
        (cache.compiler.destroy)(program)
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
        assert_eq!(place(Some("c"), Some("/h")), Some("/h/.cache/kiln/kernels".into()));
        assert_eq!(place(None, None), None);
    }
}
