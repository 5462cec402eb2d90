//! How the code of the workspace hangs together: no file uses one that uses it back, directly or
//! around a corner, retired words stay retired, and documents name files that there are. These are the
//! rules of CONTRIBUTING.md that a program can check.

mod modules;
mod way;
mod words;

use std::fs;
use std::path::{Path, PathBuf};

use modules::Crate;

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

fn is_rust(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
}

/// `path` from the root of the workspace.
fn from_root(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

#[test]
fn no_file_uses_one_that_uses_it_back() {
    let circles: Vec<_> = crates().iter().flat_map(|start| Crate::read(start).circles(&root())).collect();
    assert!(circles.is_empty(), "{} circles of files:\n{}", circles.len(), circles.join("\n"));
}

#[test]
fn retired_words_stay_retired() {
    let mut found = Vec::new();
    for path in words::CRATES.iter().flat_map(|name| find(&root().join(name), &is_rust)) {
        let identifiers = words::identifiers(&path);
        let file = from_root(&path);
        for (word, now) in words::RETIRED {
            if identifiers.contains(word) && !words::EXCEPTIONS.contains(&(word, file.as_str())) {
                found.push(format!("{file}: {word}, say {now}"));
            }
        }
    }
    assert!(found.is_empty(), "retired words:\n{}", found.join("\n"));
}

#[test]
fn documents_name_files_that_there_are() {
    let is_document = |path: &Path| path.extension().is_some_and(|extension| extension == "md");
    let documents = ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"].map(|name| root().join(name));
    let documents = documents.into_iter().chain(find(&root().join("docs"), &is_document));
    let folders = ["benches/", "collectives/", "configs/", "docs/", "model/", "shard/", "train/"];
    let mut missing = Vec::new();
    for document in documents {
        let text = fs::read_to_string(&document).unwrap();
        for line in text.lines() {
            // What is in backticks and looks like a path of ours: no blanks, no places to fill in.
            for code in line.split('`').skip(1).step_by(2) {
                let is_path = folders.iter().any(|folder| code.starts_with(folder))
                    && !code.contains([' ', '<', '*', '|']);
                if is_path && !root().join(code).exists() {
                    missing.push(format!("{}: {code}", from_root(&document)));
                }
            }
        }
    }
    assert!(missing.is_empty(), "no such files:\n{}", missing.join("\n"));
}

/// A crate of one's own takes what was built here only if it is built alike.
#[test]
fn the_template_crate_is_built_like_the_workspace() {
    let own = fs::read_to_string(root().join("examples/own-crate/Cargo.toml")).unwrap();
    let workspace = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let profile = &own[own.find("[profile.release]").expect("its profile")..];
    assert!(workspace.contains(profile.trim_end()), "its [profile.release] is not that of the workspace");
    let burn = own.lines().find(|line| line.starts_with("burn = ")).expect("its burn");
    let shared = workspace.lines().find(|line| line.starts_with("burn = ")).expect("the workspace's burn");
    let features = |line: &str| line.replace(", \"autodiff\"", "");
    assert_eq!(features(burn), features(shared), "its burn is not that of the workspace");
}
