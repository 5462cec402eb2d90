//! Checks the structure of the workspace's code: no file or module uses one that uses it back, directly or
//! indirectly, documents name existing files, and every test runs somewhere.

mod every_test;
mod modules;

use std::fs;
use std::path::{Path, PathBuf};

use modules::Crate;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Returns the libraries and binaries of the workspace, by their root files.
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

/// Returns the files below `folder` that `wanted` accepts; hidden folders and build outputs are skipped.
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

/// Returns `path` relative to the root of the workspace.
fn from_root(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

#[test]
fn files_and_modules_have_no_circles() {
    let circles: Vec<_> = crates().iter().flat_map(|start| Crate::read(start).circles(&root())).collect();
    assert!(circles.is_empty(), "{} circles:\n{}", circles.len(), circles.join("\n"));
}

#[test]
fn documents_name_existing_files() {
    let is_document = |path: &Path| path.extension().is_some_and(|extension| extension == "md");
    let documents = ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"].map(|name| root().join(name));
    let documents = documents.into_iter().chain(find(&root().join("docs"), &is_document));
    let folders = ["benches/", "collectives/", "configs/", "docs/", "model/", "shard/", "train/"];
    let mut missing = Vec::new();
    for document in documents {
        let text = fs::read_to_string(&document).unwrap();
        for line in text.lines() {
            // Text in backticks that looks like one of our paths: no blanks, no placeholders.
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

/// Returns the packages of the workspace.
fn packages() -> Vec<PathBuf> {
    let root = root();
    let workspace = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let members =
        workspace.split_once("members = [").and_then(|(_, rest)| rest.split_once(']')).expect("members").0;
    members
        .lines()
        .filter_map(|line| Some(root.join(line.trim().strip_prefix('"')?.split_once('"')?.0)))
        .collect()
}

#[test]
fn every_test_is_run_or_says_how() {
    let mut wrong = Vec::new();
    for package in packages() {
        let (run, left_out) = every_test::of_package(&package);
        let name = |test: &every_test::Test| format!("{}: {}", from_root(&package), test.name);
        wrong.extend(left_out.iter().map(|test| format!("{}: its target has test = false", name(test))));
        wrong.extend(run.iter().filter_map(|test| {
            let reason = test.ignored.as_ref().filter(|reason| !every_test::says_how(reason, &root()))?;
            Some(format!("{}: #[ignore = \"{reason}\"] has no command that runs it", name(test)))
        }));
    }
    assert!(wrong.is_empty(), "{} tests are not run:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn the_list_of_a_step_is_read() {
    let text = "    Finished `release` profile\n     Running unittests src/lib.rs (target/release/deps/kiln_shard-0f)\n\
                a::tests::one: test\n\n1 test, 0 benchmarks\n     Running `tests/cli/main.rs` (/t/deps/cli-ab12)\n\
                two: test\nthree: benchmark\n";
    let expected = [("cli", "two"), ("kiln_shard", "a::tests::one")];
    let expected = expected.map(|(target, name)| (target.to_owned(), name.to_owned()));
    assert_eq!(every_test::listed(text).into_iter().collect::<Vec<_>>(), expected);
}

/// Uses the lists of all steps of `.ci/run` in the file that `KILN_TESTS_LISTED` names.
#[test]
#[ignore = "needs the lists of tests that the steps run: .ci/run"]
fn every_test_is_in_a_step() {
    let file = std::env::var("KILN_TESTS_LISTED").expect("KILN_TESTS_LISTED names the file");
    let listed = every_test::listed(&fs::read_to_string(file).unwrap());
    let tests: Vec<_> = packages().iter().flat_map(|package| every_test::of_package(package).0).collect();
    let is_missing = |test: &&every_test::Test| {
        test.ignored.is_none() && !listed.contains(&(test.target.clone(), test.name.clone()))
    };
    let missing: Vec<_> =
        tests.iter().filter(is_missing).map(|test| format!("{}: {}", test.target, test.name)).collect();
    assert!(missing.is_empty(), "{} tests in no step of .ci/run:\n{}", missing.len(), missing.join("\n"));
}
