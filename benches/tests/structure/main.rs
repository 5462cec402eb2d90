//! How the code of the workspace hangs together: no file uses one that uses it back, directly or
//! around a corner, no file is too long, and retired words stay retired. These are the rules of
//! CONTRIBUTING.md that a program can check.

mod modules;
mod way;

use std::fs;
use std::path::{Path, PathBuf};

use modules::Crate;

/// Lines that a file may have.
const MOST_LINES: usize = 450;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The libraries and binaries of the workspace, by the file that each begins with.
fn crates() -> Vec<PathBuf> {
    let root = root();
    let manifests = find(&root, &|path| path.file_name().is_some_and(|name| name == "Cargo.toml"));
    let folders = manifests.iter().filter_map(|path| path.parent());
    let mut starts: Vec<_> = folders
        .flat_map(|folder| {
            let bins = fs::read_dir(folder.join("src/bin")).into_iter().flatten().flatten();
            let bins = bins.map(|bin| bin.path().join("main.rs"));
            ["src/lib.rs", "src/main.rs"].map(|start| folder.join(start)).into_iter().chain(bins)
        })
        .filter(|start| start.is_file())
        .collect();
    starts.sort();
    starts
}

/// Files below `folder` that `wanted` accepts; hidden folders and build outputs are passed over.
fn find(folder: &Path, wanted: &dyn Fn(&Path) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if path.is_dir() {
            if !name.starts_with('.') && !["target", "runs", "fixtures"].contains(&&*name) {
                found.extend(find(&path, wanted));
            }
        } else if wanted(&path) {
            found.push(path);
        }
    }
    found
}

#[test]
fn no_file_uses_one_that_uses_it_back() {
    let circles: Vec<_> =
        crates().iter().flat_map(|start| Crate::read(start).circles(&root())).collect();
    assert!(circles.is_empty(), "{} circles of files:\n{}", circles.len(), circles.join("\n"));
}

#[test]
fn no_file_is_too_long() {
    let is_rust = |path: &Path| path.extension().is_some_and(|extension| extension == "rs");
    let long: Vec<_> = find(&root(), &is_rust)
        .into_iter()
        .map(|path| (fs::read_to_string(&path).unwrap().lines().count(), path))
        .filter(|(lines, _)| *lines > MOST_LINES)
        .map(|(lines, path)| format!("{}: {lines} lines", path.display()))
        .collect();
    assert!(long.is_empty(), "more than {MOST_LINES} lines:\n{}", long.join("\n"));
}
