//! Finding run folders.

use std::fs;
use std::path::{Path, PathBuf};

use super::RunError;

/// Every run folder has at least one of these files. A run writes `run.json` first.
const MARKS: [&str; 3] = ["run.json", "metrics.jsonl", "config.toml"];

pub(super) fn is_run(path: &Path) -> bool {
    MARKS.iter().any(|mark| path.join(mark).is_file())
}

/// Folders inside a run folder that only the run writes into.
const OWN_FOLDERS: [&str; 6] = [".kiln", "checkpoints", "crash", "debug", "flight", "logs"];

const OWN_ENDINGS: [&str; 3] = ["json", "jsonl", "toml"];

/// Returns the folder of the run that writes, or would write, the file at `path`; `None` for any other file.
/// Follows links, even to files that do not exist yet.
pub fn run_of_file(path: &Path) -> Option<PathBuf> {
    let mut place = path.to_owned();
    // Linux follows at most 40 links.
    for _ in 0..40 {
        let Ok(to) = fs::read_link(&place) else { break };
        place = place.parent()?.join(to);
    }
    let parent = place.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let parent = parent.canonicalize().ok()?;
    let is_named_so = place.extension().is_some_and(|ending| OWN_ENDINGS.iter().any(|own| ending == *own));
    if is_named_so && is_run(&parent) {
        return Some(parent);
    }
    let own = parent.ancestors().find(|folder| {
        let is_own = |name| OWN_FOLDERS.iter().any(|own| name == *own);
        folder.file_name().is_some_and(is_own) && folder.parent().is_some_and(is_run)
    });
    Some(own?.parent()?.to_owned())
}

/// Returns the run folders in `paths`, without duplicates. Each path is a run folder or a folder of run folders.
///
/// # Errors
///
/// If a path is neither.
pub fn find_runs(paths: &[PathBuf]) -> Result<Vec<PathBuf>, RunError> {
    let mut runs: Vec<PathBuf> = Vec::new();
    for path in paths {
        let found = if is_run(path) { vec![path.clone()] } else { runs_in(path)? };
        for run in found {
            if !runs.contains(&run) {
                runs.push(run);
            }
        }
    }
    Ok(runs)
}

fn runs_in(path: &Path) -> Result<Vec<PathBuf>, RunError> {
    let no_run = |why: &str| RunError::NoRun { path: path.to_owned(), why: why.to_owned() };
    if !path.is_dir() {
        return Err(no_run(if path.exists() { "it is a file" } else { "it does not exist" }));
    }
    let entries = fs::read_dir(path).map_err(|source| RunError::Io { path: path.to_owned(), source })?;
    let mut runs: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(|run| is_run(run)).collect();
    runs.sort();
    match runs.is_empty() {
        true => Err(no_run("neither it nor any folder in it has a run.json")),
        false => Ok(runs),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn own_files_are_known_through_links() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let run = root.join("run");
        fs::create_dir_all(run.join(".kiln")).unwrap();
        fs::create_dir_all(run.join("checkpoints/fsdp_cpt1")).unwrap();
        fs::create_dir(run.join("plots")).unwrap();
        fs::write(run.join("run.json"), "{}").unwrap();
        symlink(run.join("samples.jsonl"), root.join("dangling")).unwrap();
        symlink("dangling", root.join("twice")).unwrap();
        for own in
            ["run/run.json", "run/samples.jsonl", "run/.kiln/lock", "run/checkpoints/fsdp_cpt1/x", "twice"]
        {
            assert_eq!(run_of_file(&root.join(own)), Some(run.clone()), "{own}");
        }
        for other in ["run/metrics.csv", "run/plots/a.json", "a.json", "none/a.json"] {
            assert_eq!(run_of_file(&root.join(other)), None, "{other}");
        }
    }
}
