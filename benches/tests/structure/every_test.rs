//! The tests of the workspace, as found in its sources: checks that no target omits any, that ignored tests
//! state how to run them, and that the steps of `.ci/run` run all others.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use syn::{Attribute, Item};

/// A function with `#[test]`.
pub struct Test {
    /// Its target, as the name of the program that Cargo builds.
    pub target: String,
    /// Its name in the target, including its modules.
    pub name: String,
    /// The reason of `#[ignore]`, empty if it has none; `None` if the test is not ignored.
    pub ignored: Option<String>,
}

/// A library, a program or a file of tests of a package.
struct Target {
    name: String,
    start: PathBuf,
    /// True if Cargo runs its functions with `#[test]`.
    is_tested: bool,
    /// True if it has its own `main`, for which `#[test]` has no effect.
    has_main: bool,
}

/// Returns the tests of the package in `folder`, and those of targets that Cargo is configured not to test.
pub fn of_package(folder: &Path) -> (Vec<Test>, Vec<Test>) {
    let (mut run, mut left_out) = (Vec::new(), Vec::new());
    for target in targets(folder).into_iter().filter(|target| !target.has_main) {
        let mut tests = Vec::new();
        let beside = target.start.parent().unwrap().to_owned();
        read_file(&target.start, &beside, "", &mut |name, ignored| {
            tests.push(Test { target: target.name.clone(), name, ignored });
        });
        if target.is_tested { &mut run } else { &mut left_out }.extend(tests);
    }
    (run, left_out)
}

/// Returns the targets of a package that Cargo discovers automatically.
fn targets(folder: &Path) -> Vec<Target> {
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    let value = |section: &str, key: &str| {
        let line = section.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
        line.map(|value| value.trim_matches('"').to_owned())
    };
    let sections: Vec<&str> = manifest.split("\n[").map(|section| section.trim_start_matches('[')).collect();
    let package = sections.iter().find(|section| section.starts_with("package]")).expect("a package");
    let package = value(package, "name").expect("a name").replace('-', "_");
    let target = |kind: &str, name: &str, start: PathBuf| {
        let is_it = |section: &&&str| {
            let rest = section.strip_prefix(kind).is_some_and(|rest| rest.starts_with(']'));
            rest && value(section, "name").is_none_or(|given| given == name)
        };
        let section = sections.iter().find(is_it).copied().unwrap_or_default();
        Target {
            name: name.replace('-', "_"),
            start,
            is_tested: value(section, "test").as_deref() != Some("false"),
            has_main: value(section, "harness").as_deref() == Some("false"),
        }
    };
    let mut targets = vec![target("lib", &package, folder.join("src/lib.rs"))];
    for (kind, place) in [("bin", "src/bin"), ("test", "tests")] {
        for entry in fs::read_dir(folder.join(place)).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let start = if path.is_dir() { path.join("main.rs") } else { path };
            targets.push(target(kind, &name, start));
        }
    }
    targets
        .retain(|target| target.start.is_file() && target.start.extension().is_some_and(|end| end == "rs"));
    targets
}

/// Passes the tests in `file` and its modules to `found`. The files of its modules are in `children`.
fn read_file(file: &Path, children: &Path, module: &str, found: &mut impl FnMut(String, Option<String>)) {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    read_items(&parsed.items, file, children, module, found);
}

fn read_items(
    items: &[Item],
    file: &Path,
    children: &Path,
    module: &str,
    found: &mut impl FnMut(String, Option<String>),
) {
    let within =
        |name: &syn::Ident| if module.is_empty() { name.to_string() } else { format!("{module}::{name}") };
    for item in items {
        match item {
            Item::Fn(function) if has(&function.attrs, "test") => {
                let ignored = has(&function.attrs, "ignore");
                let reason = ignored.then(|| text_of(&function.attrs, "ignore").unwrap_or_default());
                found(within(&function.sig.ident), reason);
            }
            Item::Mod(inner) => {
                let (name, below) = (within(&inner.ident), children.join(inner.ident.to_string()));
                if let Some((_, items)) = &inner.content {
                    read_items(items, file, &below, &name, found);
                    continue;
                }
                let given = text_of(&inner.attrs, "path").map(|given| file.parent().unwrap().join(given));
                let usual = [below.with_extension("rs"), below.join("mod.rs")];
                let place = given.clone().into_iter().chain(usual).find(|place| place.is_file());
                let place = place.unwrap_or_else(|| panic!("no file of {name}"));
                // A file with an explicit path has its modules next to it.
                let below = given.map_or(below, |given| given.parent().unwrap().to_owned());
                read_file(&place, &below, &name, found);
            }
            _ => {}
        }
    }
}

fn has(attrs: &[Attribute], name: &str) -> bool {
    attrs.iter().any(|attribute| attribute.path().is_ident(name))
}

/// Returns the text of `#[name = "…"]`.
fn text_of(attrs: &[Attribute], name: &str) -> Option<String> {
    let attribute = attrs.iter().find(|attribute| attribute.path().is_ident(name))?;
    match &attribute.meta.require_name_value().ok()?.value {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}

/// Returns true if the reason of an ignored test contains a command that runs it, or names the tests that
/// start it as a program.
pub fn says_how(reason: &str, root: &Path) -> bool {
    let is_script = |word: &str| word.contains('/') && root.join(word.trim_end_matches([',', '.'])).is_file();
    reason.contains("cargo test ") || reason.starts_with("a program for ") || reason.split(' ').any(is_script)
}

/// Returns the targets and names of the tests in `text`, the output of `cargo test … -- --list`, with the
/// names of the programs in between.
pub fn listed(text: &str) -> BTreeSet<(String, String)> {
    let mut tests = BTreeSet::new();
    let mut target = String::new();
    for line in text.lines() {
        if let Some((_, program)) =
            line.trim_start().strip_prefix("Running ").and_then(|line| line.rsplit_once('('))
        {
            let file = program.trim_end_matches(')').rsplit('/').next().unwrap_or_default();
            target = file.rsplit_once('-').map_or(file, |(name, _)| name).to_owned();
        } else if let Some(name) = line.strip_suffix(": test") {
            tests.insert((target.clone(), name.to_owned()));
        }
    }
    tests
}
