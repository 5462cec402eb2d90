//! Loads NVRTC, NVIDIA's compiler for kernels. NVRTC opens `libnvrtc-builtins` by its bare name, without a run path,
//! and fails if the loader does not know its folder. So `libnvrtc-builtins` is loaded first.

use std::ffi::{c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr;

use cudarc::nvrtc::sys;

use crate::kernel_cache::{self, Compiler, SUCCESS};
use crate::libraries::{self, Missing, Wanted};
use crate::places::{Places, environment};

/// The loaded NVRTC library.
#[derive(Clone, Debug)]
pub struct Nvrtc {
    /// Path of its file.
    pub path: PathBuf,
    /// Major and minor version.
    pub version: Option<(u32, u32)>,
}

/// Loads NVRTC under one of the names `files`, best first, with the library that it needs to compile. From then on
/// cudarc and CubeCL compile through [`kernel_cache`].
///
/// # Errors
///
/// The places that were searched, or the reason why the installed NVRTC cannot compile.
pub fn load(files: Vec<&'static str>) -> Result<Nvrtc, Missing> {
    let places = Places::for_libraries(&environment);
    let wanted = Wanted { stem: "nvrtc", files, instead: Some(kernel_cache::instead_of) };
    let path = libraries::load(&wanted, &places)?;
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: the library is loaded, and the numbers outlive the call.
    let status = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    if status.result().is_err() {
        return Ok(Nvrtc { path, version: None });
    }
    let builtins = format!("libnvrtc-builtins.so.{major}.{minor}");
    if !load_builtins(&builtins, &path) {
        let failure = format!("{} (without {builtins}, which belongs next to it)", path.display());
        return Err(Missing {
            names: wanted.files.join(" or "),
            places: places.names_with_loader(),
            failures: vec![failure],
        });
    }
    Ok(Nvrtc { path, version: Some((major.unsigned_abs(), minor.unsigned_abs())) })
}

/// Makes the loader know `builtins` by its bare name, if necessary from the folder of NVRTC's file.
fn load_builtins(builtins: &str, nvrtc: &Path) -> bool {
    let is_known = || libraries::open(Path::new(builtins)).is_ok();
    if is_known() {
        return true;
    }
    let real = nvrtc.canonicalize().ok();
    let folders = [Some(nvrtc), real.as_deref()].into_iter().flatten().filter_map(Path::parent);
    folders.into_iter().any(|folder| libraries::open(&folder.join(builtins)).is_ok()) && is_known()
}

/// Compiles a small kernel, bypassing the cache. The kernel includes CUDA's headers in the folder `headers`, if given.
///
/// # Errors
///
/// NVRTC's log, or a message that NVRTC is not loaded.
pub fn try_compiling(headers: Option<&Path>) -> Result<(), String> {
    let Some(compiler) = kernel_cache::compiler() else {
        return Err("NVRTC is not loaded".to_owned());
    };
    let includes: String = match headers {
        Some(_) => libraries::HEADERS.iter().map(|header| format!("#include <{header}>\n")).collect(),
        None => String::new(),
    };
    let source = format!("{includes}extern \"C\" __global__ void nothing() {{}}\n\0");
    let folders = headers.into_iter().flat_map(|root| [root.to_owned(), root.join("cccl")]);
    let folders = folders.map(|folder| format!("--include-path={}\0", folder.display()));
    // The lowest architecture with all instructions of these headers; a real one, as in CubeCL's requests.
    let options: Vec<_> = ["--gpu-architecture=sm_80\0".to_owned()].into_iter().chain(folders).collect();
    let options: Vec<_> = options.iter().map(|option| option.as_ptr().cast::<c_char>()).collect();
    compile(compiler, &source, &options)
}

/// `options` are null-terminated.
fn compile(compiler: &Compiler, source: &str, options: &[*const c_char]) -> Result<(), String> {
    let mut program = ptr::null_mut();
    // SAFETY: the texts are null-terminated and outlive the calls, and there is room for NVRTC's output.
    unsafe {
        let source = source.as_ptr().cast();
        let created = (compiler.create)(&mut program, source, ptr::null(), 0, ptr::null(), ptr::null());
        if created != SUCCESS {
            return Err(format!("nvrtcCreateProgram returned {created}"));
        }
        let code = (compiler.compile)(program, options.len() as c_int, options.as_ptr());
        let log = compiler.log(program);
        (compiler.destroy)(&mut program);
        if code == SUCCESS { Ok(()) } else { Err(log.unwrap_or_else(|| format!("error {code}"))) }
    }
}
