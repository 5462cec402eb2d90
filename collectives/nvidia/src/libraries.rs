//! Loads NVIDIA's libraries so that cudarc and CubeCL find them. The loader does not know the folders of CUDA toolkits
//! and Python packages. If no name works, this module loads the library by its path; then the loader knows its soname,
//! which is one of the names that cudarc and CubeCL ask for.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::alias::{self, Instead};
use crate::places::{Places, reason};

/// Headers of CubeCL's kernels, relative to the folder `include`; the last may be in `include/cccl`.
pub const HEADERS: [&str; 5] =
    ["cuda_runtime.h", "cuda_bf16.h", "mma.h", "cooperative_groups.h", "cuda/barrier"];

/// A library to look for.
pub struct Wanted {
    /// The name that cudarc asks for, such as `nvrtc`.
    pub stem: &'static str,
    /// File names, best first.
    pub files: Vec<&'static str>,
    /// Returns functions that replace the library's own. Called with the soname of the loaded library.
    pub instead: Option<fn(&str) -> Vec<Instead>>,
}

/// A library that was not found.
pub struct Missing {
    /// Names that its file may have.
    pub names: String,
    /// Places that were searched.
    pub places: String,
    /// Files that were found, and why they are unusable.
    pub failures: Vec<String>,
}

/// Loads a library for good, so that cudarc and CubeCL find it; returns its path.
pub fn load(wanted: &Wanted, places: &Places) -> Result<PathBuf, Missing> {
    let asked = cudarc::get_lib_name_candidates(wanted.stem);
    let mut failures = Vec::new();
    // First cudarc's names, then others that the loader may know. If functions are to be replaced, cudarc's names come
    // last, because a requested name cannot be given to another library.
    let (files, names) = (wanted.files.iter().copied(), asked.iter().map(String::as_str));
    let by_name: Vec<_> = match wanted.instead {
        None => names.chain(files).collect(),
        Some(_) => files.chain(names).collect(),
    };
    let by_path = places.files(&wanted.files);
    let by_name = by_name.into_iter().map(|name| (PathBuf::from(name), false));
    for (name, exists) in by_name.chain(by_path.map(|path| (path, true))) {
        if let Err(error) = open(&name) {
            if exists {
                failures.push(error);
            }
            continue;
        }
        match make_known(wanted, &asked) {
            Ok(()) => return Ok(loaded_from(wanted.stem).unwrap_or(name)),
            Err(error) => failures.push(error),
        }
    }
    let (names, places) = (wanted.files.join(" or "), places.names_with_loader());
    Err(Missing { names, places, failures })
}

/// Makes a loaded library available under one of the names that cudarc asks for.
fn make_known(wanted: &Wanted, asked: &[String]) -> Result<(), String> {
    let is_known = || asked.iter().any(|name| open(Path::new(name)).is_ok());
    let Some(alias) = asked.first() else { return Ok(()) };
    let loaded = wanted.files.iter().find(|file| open(Path::new(file)).is_ok());
    if let (Some(file), Some(instead)) = (loaded, wanted.instead) {
        let instead = instead(file);
        if !instead.is_empty()
            && let Err(error) = alias::give(file, alias, &instead)
        {
            tracing::debug!("{file} is used unchanged: {error}");
        }
    }
    if is_known() {
        return Ok(());
    }
    if let Some(file) = loaded {
        alias::give(file, alias, &[]).map_err(|error| {
            format!("{file} ({error}; make a link named {alias} to it in a folder of LD_LIBRARY_PATH)")
        })?;
    }
    match is_known() {
        true => Ok(()),
        false => Err(format!("the soname of the library is none of {}", wanted.files.join(", "))),
    }
}

pub(crate) fn open(name: &Path) -> Result<(), String> {
    // SAFETY: this runs the initialisers of NVIDIA's libraries, as cudarc and CubeCL would.
    match unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            std::mem::forget(library);
            Ok(())
        }
        Err(error) => Err(reason(&error)),
    }
}

/// Returns the file of a loaded library, from `/proc/self/maps`.
pub fn loaded_from(stem: &str) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let prefix = format!("lib{stem}.so");
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let is_it =
        |path: &&Path| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(&prefix));
    paths.find(is_it).map(Path::to_owned)
}
