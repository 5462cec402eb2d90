//! Asks git which commit this is, for `kiln --version`, and has the program linked for a fixed address.
//!
//! It asks git again when what the program is made of has changed, and the crate is compiled anew in any case: a
//! commit alone compiles nothing. So a program says "modified" if it was built before its changes were
//! committed, as it was.

use std::env;
use std::path::Path;
use std::process::Command;

/// What the program is made of, in the root of the repository.
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

/// For builds outside a repository: what to say.
const VARIABLE: &str = "KILN_COMMIT";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let target = |of: &str| env::var(format!("CARGO_CFG_TARGET_{of}")).unwrap_or_default();
    if target("OS") == "linux" && target("ENV") == "gnu" {
        // Code without optimisation calls by tables, which the loader would fill in at every start for an address that
        // it chooses: two fifths of the time of a short command.
        println!("cargo::rustc-link-arg-bin=kiln=-no-pie");
    }
    let crate_folder = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
    let root = Path::new(&crate_folder).join("../..");
    // A path that is not there would make Cargo compile this crate every time.
    for path in SOURCES.iter().map(|source| root.join(source)).filter(|path| path.exists()) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let given = env::var(VARIABLE).ok().filter(|commit| !commit.trim().is_empty());
    let commit = given.or_else(|| commit(&root)).unwrap_or_default();
    println!("cargo::rustc-env={VARIABLE}={}", commit.trim());
}

/// The commit of the repository at `root`, and whether its sources differ. `None` in a tarball, which may lie
/// within somebody else's repository, and without git.
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

/// What git says; it locks nothing, since others may be at work in the repository.
fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let mut git = Command::new("git");
    let output = git.arg("--no-optional-locks").arg("-C").arg(root).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8(output.stdout).ok())?
}
