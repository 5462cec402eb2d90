//! Finds folders with NVIDIA's libraries and headers that the system's loader does not search.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders to search, in addition to those of the system's loader.
pub struct Places {
    places: Vec<(String, Vec<PathBuf>)>,
}

/// Folders of the driver's libraries on WSL and in containers.
const DRIVER_FOLDERS: [&str; 2] = ["/usr/lib/wsl/lib", MOUNTED];

/// The folder where Google's containers and others mount NVIDIA's libraries.
const MOUNTED: &str = "/usr/local/nvidia/lib64";

const TOOLKITS: [&str; 2] = ["/usr/local/cuda", "/opt/cuda"];

const TOOLKIT_LIBRARIES: [&str; 3] = ["lib64", "lib", "targets/x86_64-linux/lib"];

/// Looks up an environment variable.
pub type Lookup<'a> = dyn Fn(&str) -> Option<PathBuf> + 'a;

/// Looks up an environment variable of this process; an empty one counts as unset.
pub fn environment(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

impl Places {
    /// Folders that may have the driver's library.
    pub fn for_driver() -> Self {
        let place = |folder: &str| (folder.to_owned(), vec![PathBuf::from(folder)]);
        Places { places: DRIVER_FOLDERS.into_iter().map(place).collect() }
    }

    /// Folders that may have the libraries of the CUDA toolkit.
    pub fn for_libraries(lookup: &Lookup) -> Self {
        Self::new(lookup, &TOOLKIT_LIBRARIES, "lib", &["CUDA_PATH"]).with_mounted()
    }

    /// Folders that may have NCCL.
    pub fn for_nccl(lookup: &Lookup) -> Self {
        Self::new(lookup, &TOOLKIT_LIBRARIES, "lib", &["NCCL_HOME", "CUDA_PATH", "CUDA_HOME"]).with_mounted()
    }

    /// Folders that may have a folder `include` with CUDA's headers.
    pub fn for_headers(lookup: &Lookup) -> Self {
        Self::new(lookup, &["", "targets/x86_64-linux"], "", &["CUDA_PATH"])
    }

    /// `in_toolkit`, `in_package`: folders in a toolkit or Python package. `toolkits`: variables with toolkit paths.
    fn new(lookup: &Lookup, in_toolkit: &[&str], in_package: &str, toolkits: &[&str]) -> Self {
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

        let mut places: Vec<_> = toolkits.iter().map(|name| named(name, &toolkit)).collect();
        places.extend(TOOLKITS.map(|root| (root.to_owned(), toolkit(Path::new(root)))));
        places.push(on_path(lookup, "nvcc", &toolkit));
        places.push(named("VIRTUAL_ENV", &installed));
        places.push(named("CONDA_PREFIX", &conda));
        places.push(named("PYTHONPATH", &path));
        let user = lookup("HOME").map(|home| installed(&home.join(".local")));
        places.push(on_path(lookup, "python3", &installed));
        places.push(("Python's packages in ~/.local".to_owned(), user.unwrap_or_default()));
        places.extend(["/usr/local", "/usr"].map(|root| (root.to_owned(), installed(Path::new(root)))));
        Places { places }
    }

    fn with_mounted(mut self) -> Self {
        self.places.push((MOUNTED.to_owned(), vec![PathBuf::from(MOUNTED)]));
        self
    }

    /// All folders, in order.
    pub fn folders(&self) -> impl Iterator<Item = &Path> {
        self.places.iter().flat_map(|(_, folders)| folders).map(PathBuf::as_path)
    }

    /// Returns existing files with one of `names`, from the best place first.
    pub fn files(&self, names: &[&str]) -> impl Iterator<Item = PathBuf> {
        let files = self.folders().flat_map(|folder| names.iter().map(|name| folder.join(name)));
        files.filter(|path| path.exists())
    }

    /// Display names of the places.
    pub fn names(&self) -> String {
        let names: Vec<_> = self.places.iter().map(|(name, _)| name.as_str()).collect();
        names.join(", ")
    }

    /// Returns the folders of the system's loader, followed by [`Places::names`].
    pub fn names_with_loader(&self) -> String {
        let loader = match environment("LD_LIBRARY_PATH") {
            Some(path) => format!("the loader's folders (LD_LIBRARY_PATH={})", path.display()),
            None => "the loader's folders (LD_LIBRARY_PATH is not set)".to_owned(),
        };
        format!("{loader}, {}", self.names())
    }
}

/// Returns the place of the installation whose `program` is first on PATH: `folders(root)` for the folder `root` above
/// its `bin`, and likewise for each link target. The `python3` of a virtual environment may link to a link.
fn on_path(
    lookup: &Lookup,
    program: &str,
    folders: &dyn Fn(&Path) -> Vec<PathBuf>,
) -> (String, Vec<PathBuf>) {
    let path = lookup("PATH").unwrap_or_default();
    let Some(found) = std::env::split_paths(&path).map(|bin| bin.join(program)).find(|file| file.is_file())
    else {
        return (format!("{program} (not on PATH)"), Vec::new());
    };
    let mut roots: Vec<PathBuf> = Vec::new();
    let mut file = Some(found.clone());
    while let Some(at) = file.filter(|_| roots.len() < LINKS) {
        roots.extend(at.parent().and_then(Path::parent).map(Path::to_owned));
        file = fs::read_link(&at).ok().and_then(|link| Some(at.parent()?.join(link)));
    }
    roots.dedup();
    (found.display().to_string(), roots.iter().flat_map(|root| folders(root)).collect())
}

const LINKS: usize = 8;

/// Returns `root` itself if `folder` is empty.
fn below(root: &Path, folder: &str) -> PathBuf {
    if folder.is_empty() { root.to_owned() } else { root.join(folder) }
}

fn sites(root: &Path) -> impl Iterator<Item = PathBuf> {
    let is_python = |folder: &PathBuf| {
        folder.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python3"))
    };
    let pythons = children(&root.join("lib")).filter(is_python);
    pythons.flat_map(|python| ["site-packages", "dist-packages"].map(|site| python.join(site)))
}

fn children(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths.into_iter()
}

/// Returns the loader's reason why a library could not be loaded, which names the file.
#[cfg(feature = "cuda")]
pub fn reason(error: &libloading::Error) -> String {
    use std::error::Error;

    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns Kiln's cache folder, if known: `$XDG_CACHE_HOME/kiln` or `~/.cache/kiln` (XDG Base Directory Specification).
pub fn cache_folder(lookup: &Lookup) -> Option<PathBuf> {
    let absolute = |path: &PathBuf| path.is_absolute();
    let base = lookup("XDG_CACHE_HOME").filter(absolute);
    let base = base.or_else(|| Some(lookup("HOME").filter(absolute)?.join(".cache")))?;
    Some(base.join("kiln"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every variable leads to the folders of its kind of installation, in the documented order.
    #[test]
    fn variables_lead_to_folders() {
        let root = std::env::temp_dir().join(format!("kiln-nvidia-{}", std::process::id()));
        let root = root.as_path();
        let site = "lib/python3.12/site-packages";
        let folders = [
            "nccl/lib".to_owned(),
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
                "NCCL_HOME" => "nccl",
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
        let found = |places: Places| -> Vec<PathBuf> {
            let inside = places.folders().filter_map(|folder| folder.strip_prefix(root).ok());
            inside.filter(|folder| root.join(folder).is_dir()).map(Path::to_owned).collect()
        };
        let expected: Vec<PathBuf> = folders.iter().map(PathBuf::from).collect();
        assert_eq!(found(Places::for_nccl(&lookup)), expected);
        assert_eq!(found(Places::for_libraries(&lookup)), expected[1..]);

        let file = |folder: &str| {
            let folder = root.join(folder);
            fs::create_dir_all(&folder).expect("a folder");
            fs::write(folder.join("libnccl.so.2"), b"").expect("a file");
            folder.join("libnccl.so.2")
        };
        let files = [file("nccl/lib"), file(&format!("conda/{site}/nvidia/nccl/lib"))];
        file("venv/lib/perl5/site-packages/nvidia/nccl/lib");
        let names = ["libnccl.so.2", "libnccl.so"];
        let places = Places::for_nccl(&lookup);
        let inside = places.files(&names).filter(|file| file.starts_with(root));
        assert_eq!(inside.collect::<Vec<_>>(), files);

        let headers = Places::for_headers(&lookup);
        assert!(headers.folders().any(|folder| folder == root.join("cuda")));
        assert!(headers.folders().any(|folder| folder == root.join("path/nvidia/cu13")));

        let venv = root.join("opt/venv");
        fs::create_dir_all(venv.join("bin")).expect("a folder");
        fs::create_dir_all(root.join("usr/bin")).expect("a folder");
        fs::write(venv.join("bin/python3"), b"").expect("a file");
        std::os::unix::fs::symlink("../../opt/venv/bin/python3", root.join("usr/bin/python3"))
            .expect("a link");
        let expected = file(&format!("opt/venv/{site}/nvidia/nccl/lib"));
        let on_path = |name: &str| (name == "PATH").then(|| root.join("usr/bin"));
        let files = |places: Places| places.files(&names).find(|file| file.ends_with("libnccl.so.2"));
        let found = files(Places::for_nccl(&on_path)).expect("NCCL");
        assert_eq!(found.canonicalize().expect("a file"), expected.canonicalize().expect("a file"));

        let none = Places::for_libraries(&|_| None);
        assert!(none.names().starts_with("CUDA_PATH (not set), /usr/local/cuda, "), "{}", none.names());
        fs::remove_dir_all(root).expect("the folder");
    }
}
