//! Finding and loading NVIDIA's libraries.
//!
//! cudarc and CubeCL ask the loader by name. The loader knows `LD_LIBRARY_PATH` and the system's folders,
//! but not those of the CUDA toolkit or of Python packages. So a library is first asked for by name, as
//! they will; failing that, it is looked for in the other folders and loaded from there by its path. From
//! then on the loader knows it by the name that it has inside, which is one of those that they ask for.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::alias::{self, Instead};

/// Headers that CubeCL's kernels include, in `include`; the last also in `include/cccl`.
pub(super) const HEADERS: [&str; 5] =
    ["cuda_runtime.h", "cuda_bf16.h", "mma.h", "cooperative_groups.h", "cuda/barrier"];

/// A library to look for.
pub(super) struct Wanted {
    /// What cudarc asks for, as in `nvrtc`.
    pub(super) stem: &'static str,
    /// File names, the best first.
    pub(super) files: Vec<&'static str>,
    /// What cudarc and CubeCL are to find in place of its own functions, once it is loaded by this name.
    pub(super) instead: Option<fn(&str) -> Vec<Instead>>,
}

/// A library that is loaded, for as long as the process lives.
pub(super) struct Found {
    /// Where it is.
    pub(super) path: PathBuf,
}

/// What was looked for in vain.
pub(super) struct Missing {
    /// Names of its file.
    pub(super) names: String,
    /// Where it was looked for.
    pub(super) places: String,
    /// What was found, and why it is of no use.
    pub(super) failures: Vec<String>,
}

/// Places to look in, besides where the loader does.
pub(super) struct Places {
    /// What each is called, and its folders.
    places: Vec<(String, Vec<PathBuf>)>,
}

/// Where Linux distributions, WSL and Google's containers have the driver's libraries, if the loader does
/// not know of them.
const DRIVER_FOLDERS: [&str; 2] = ["/usr/lib/wsl/lib", "/usr/local/nvidia/lib64"];

/// Where the toolkit is if `CUDA_PATH` does not say.
const TOOLKITS: [&str; 2] = ["/usr/local/cuda", "/opt/cuda"];

/// Folders of a toolkit that have its libraries.
const TOOLKIT_LIBRARIES: [&str; 3] = ["lib64", "lib", "targets/x86_64-linux/lib"];

/// Looks a variable up, such as `std::env::var_os`.
pub(super) type Lookup<'a> = dyn Fn(&str) -> Option<PathBuf> + 'a;

/// The variables of this process.
pub(super) fn environment(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

impl Places {
    /// Where the driver's library may be.
    pub(super) fn of_driver() -> Self {
        let place = |folder: &str| (folder.to_owned(), vec![PathBuf::from(folder)]);
        Places { places: DRIVER_FOLDERS.into_iter().map(place).collect() }
    }

    /// Where the other libraries may be.
    pub(super) fn of_libraries(lookup: &Lookup) -> Self {
        Self::new(lookup, &TOOLKIT_LIBRARIES, "lib")
    }

    /// Folders that may have a folder `include` with CUDA's headers.
    pub(super) fn of_headers(lookup: &Lookup) -> Self {
        Self::new(lookup, &["", "targets/x86_64-linux"], "")
    }

    /// `in_toolkit` are folders of a toolkit, `in_package` is the folder of a Python package.
    fn new(lookup: &Lookup, in_toolkit: &[&str], in_package: &str) -> Self {
        let toolkit = |root: &Path| in_toolkit.iter().map(|folder| below(root, folder)).collect();
        let named = |name: &str, folders: &dyn Fn(&Path) -> Vec<PathBuf>| match lookup(name) {
            Some(root) => (format!("{name}={}", root.display()), folders(&root)),
            None => (format!("{name} (not set)"), Vec::new()),
        };
        let packages = |site: &Path| -> Vec<PathBuf> {
            children(&site.join("nvidia")).map(|package| below(&package, in_package)).collect()
        };
        let installed = |root: &Path| sites(root).flat_map(|site| packages(&site)).collect();
        let conda = |root: &Path| [toolkit(root), installed(root)].concat();
        let path = |value: &Path| std::env::split_paths(value).flat_map(|p| packages(&p)).collect();

        let mut places = vec![named("CUDA_PATH", &toolkit)];
        places.extend(TOOLKITS.map(|root| (root.to_owned(), toolkit(Path::new(root)))));
        places.push(named("VIRTUAL_ENV", &installed));
        places.push(named("CONDA_PREFIX", &conda));
        places.push(named("PYTHONPATH", &path));
        let user = lookup("HOME").map(|home| installed(&home.join(".local")));
        places.push(("Python's packages in ~/.local".to_owned(), user.unwrap_or_default()));
        places.extend(
            ["/usr/local", "/usr"].map(|root| (root.to_owned(), installed(Path::new(root)))),
        );
        Places { places }
    }

    /// All folders, in order.
    pub(super) fn folders(&self) -> impl Iterator<Item = &Path> {
        self.places.iter().flat_map(|(_, folders)| folders).map(PathBuf::as_path)
    }

    /// What the places are called.
    pub(super) fn names(&self) -> String {
        let names: Vec<_> = self.places.iter().map(|(name, _)| name.as_str()).collect();
        names.join(", ")
    }
}

/// A folder in a folder, or that folder itself if the name is empty.
fn below(root: &Path, folder: &str) -> PathBuf {
    if folder.is_empty() { root.to_owned() } else { root.join(folder) }
}

/// Folders that hold the packages of the Pythons under a root.
fn sites(root: &Path) -> impl Iterator<Item = PathBuf> {
    let is_python = |folder: &PathBuf| {
        folder.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python3"))
    };
    let pythons = children(&root.join("lib")).filter(is_python);
    pythons.flat_map(|python| ["site-packages", "dist-packages"].map(|site| python.join(site)))
}

/// What is in a folder, by name; nothing if it cannot be read.
fn children(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths.into_iter()
}

/// Loads a library so that cudarc and CubeCL will find it.
pub(super) fn load(wanted: &Wanted, places: &Places) -> Result<Found, Missing> {
    let asked = cudarc::get_lib_name_candidates(wanted.stem);
    let mut failures = Vec::new();
    // As cudarc will, and then by the other names that the loader may know. A name by which a library has been
    // asked for is taken: where functions of ours are to be found first, cudarc's names come last.
    let (files, names) = (wanted.files.iter().copied(), asked.iter().map(String::as_str));
    let by_name: Vec<_> = match wanted.instead {
        None => names.chain(files).collect(),
        Some(_) => files.chain(names).collect(),
    };
    let by_path = places.folders().flat_map(|folder| {
        wanted.files.iter().map(|file| folder.join(file)).filter(|path| path.exists())
    });
    let by_name = by_name.into_iter().map(|name| (PathBuf::from(name), false));
    for (name, exists) in by_name.chain(by_path.map(|path| (path, true))) {
        if let Err(error) = open(&name) {
            // That a name is unknown to the loader is the rule; that a file cannot be loaded is not.
            if exists {
                failures.push(error);
            }
            continue;
        }
        match make_known(wanted, &asked) {
            Ok(()) => return Ok(Found { path: loaded_from(wanted.stem).unwrap_or(name) }),
            Err(error) => failures.push(error),
        }
    }
    let loader = match environment("LD_LIBRARY_PATH") {
        Some(path) => format!("the loader's folders (LD_LIBRARY_PATH={})", path.display()),
        None => "the loader's folders (LD_LIBRARY_PATH is not set)".to_owned(),
    };
    let places = [loader, places.names()].into_iter().filter(|place| !place.is_empty());
    Err(Missing {
        names: wanted.files.join(" or "),
        places: places.collect::<Vec<_>>().join(", "),
        failures,
    })
}

/// Makes sure that a library which is loaded is found under one of the names that cudarc asks for.
fn make_known(wanted: &Wanted, asked: &[String]) -> Result<(), String> {
    let is_known = || asked.iter().any(|name| open(Path::new(name)).is_ok());
    let Some(alias) = asked.first() else { return Ok(()) };
    let loaded = wanted.files.iter().find(|file| open(Path::new(file)).is_ok());
    if let (Some(file), Some(instead)) = (loaded, wanted.instead) {
        let instead = instead(file);
        if !instead.is_empty()
            && let Err(error) = alias::give(file, alias, &instead)
        {
            tracing::debug!("{file} is used as it is: {error}");
        }
    }
    if is_known() {
        return Ok(());
    }
    if let Some(file) = loaded {
        alias::give(file, alias, &[]).map_err(|error| {
            format!(
                "{file} ({error}; make a link named {alias} to it in a folder of LD_LIBRARY_PATH)"
            )
        })?;
    }
    match is_known() {
        true => Ok(()),
        false => Err(format!("a library that calls itself none of {}", wanted.files.join(", "))),
    }
}

/// Loads a library for the rest of the process's life.
fn open(name: &Path) -> Result<(), String> {
    // SAFETY: this runs the initialisers of libraries by NVIDIA, as cudarc and CubeCL would.
    match unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            std::mem::forget(library);
            Ok(())
        }
        Err(error) => Err(reason(&error)),
    }
}

/// The loader's words, which name the file.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// The file that a loaded library came from, as the kernel knows it.
pub(super) fn loaded_from(stem: &str) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let prefix = format!("lib{stem}.so");
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let is_it = |path: &&Path| {
        path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(&prefix))
    };
    paths.find(is_it).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::Places;

    /// Every variable leads to the folders that its kind of installation has, in the order in which
    /// they are told.
    #[test]
    fn variables_lead_to_folders() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        let site = "lib/python3.12/site-packages";
        let folders = [
            "cuda/lib64".to_owned(),
            format!("venv/{site}/nvidia/cuda_nvrtc/lib"),
            "conda/lib".to_owned(),
            format!("conda/{site}/nvidia/nccl/lib"),
            "path/nvidia/cu13/lib".to_owned(),
            format!("home/.local/{site}/nvidia/cublas/lib"),
        ];
        folders.iter().for_each(|f| fs::create_dir_all(root.join(f)).expect("a folder"));
        let lookup = |name: &str| -> Option<PathBuf> {
            let folder = match name {
                "CUDA_PATH" => "cuda",
                "VIRTUAL_ENV" => "venv",
                "CONDA_PREFIX" => "conda",
                "PYTHONPATH" => {
                    return std::env::join_paths([Path::new("/none"), &root.join("path")])
                        .ok()
                        .map(PathBuf::from);
                }
                "HOME" => "home",
                _ => return None,
            };
            Some(root.join(folder))
        };
        let places = Places::of_libraries(&lookup);
        let found: Vec<_> = places.folders().filter_map(|f| f.strip_prefix(root).ok()).collect();
        let found: Vec<_> = found.iter().filter(|f| root.join(f).is_dir()).collect();
        assert_eq!(
            found,
            folders.iter().map(Path::new).collect::<Vec<_>>().iter().collect::<Vec<_>>()
        );

        let headers = Places::of_headers(&lookup);
        assert!(headers.folders().any(|folder| folder == root.join("cuda")));
        assert!(headers.folders().any(|folder| folder == root.join("path/nvidia/cu13")));

        let none = Places::of_libraries(&|_| None);
        assert!(
            none.names().starts_with("CUDA_PATH (not set), /usr/local/cuda, "),
            "{}",
            none.names()
        );
    }
}
