//! Embeds the git commit, for `kiln --version`, and links the program at a fixed address.
//!
//! The script runs again only if one of the [`SOURCES`] has changed, which recompiles the crate anyway, so a mere
//! commit recompiles nothing. Therefore a program built from uncommitted changes reports "modified" even after
//! they are committed.

use std::env;
use std::path::Path;
use std::process::Command;

/// Sources of the program, relative to the root of the repository.
const SOURCES: [&str; 13] = [
    "Cargo.lock",
    "Cargo.toml",
    ".patches",
    "collectives/src",
    "model/src",
    "shard/src",
    "train/checkpoint",
    "train/data",
    "train/kiln/Cargo.toml",
    "train/kiln/src",
    "train/launch",
    "train/observe",
    "train/sys",
];

/// Environment variable with the commit, for builds outside a repository.
const VARIABLE: &str = "KILN_COMMIT";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let target = |of: &str| env::var(format!("CARGO_CFG_TARGET_{of}")).unwrap_or_default();
    if target("OS") == "linux" && target("ENV") == "gnu" {
        // A position-independent executable would call unoptimised code through tables that the loader fills in at
        // every start, which takes two fifths of the time of a short command.
        println!("cargo::rustc-link-arg-bin=kiln=-no-pie");
    }
    let crate_folder = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
    let root = Path::new(&crate_folder).join("../..");
    // Cargo would compile this crate every time if a path did not exist.
    for path in SOURCES.iter().map(|source| root.join(source)).filter(|path| path.exists()) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let given = env::var(VARIABLE).ok().filter(|commit| !commit.trim().is_empty());
    let commit = given.or_else(|| commit(&root)).unwrap_or_default();
    println!("cargo::rustc-env={VARIABLE}={}", commit.trim());
}

/// Returns the commit of the repository at `root`, marked as modified if its sources differ. Returns `None`
/// without git, and in an unpacked tarball, even inside another repository.
fn commit(root: &Path) -> Option<String> {
    let top = git(root, &["rev-parse", "--show-toplevel"])?;
    if Path::new(top.trim_end()).canonicalize().ok()? != root.canonicalize().ok()? {
        return None;
    }
    let commit = git(root, &["rev-parse", "--short=12", "HEAD"])?;
    let status = [&["status", "--porcelain", "--"][..], &SOURCES].concat();
    let modified = if git(root, &status)?.is_empty() { "" } else { ", modified" };
    Some(format!("{}{modified}", commit.trim_end()))
}

/// Returns the output of a git command, which runs without locks because other git commands may be running.
fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let mut git = Command::new("git");
    let output = git.arg("--no-optional-locks").arg("-C").arg(root).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8(output.stdout).ok())?
}
