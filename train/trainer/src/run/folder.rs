//! The run folder: its choice, its owner and its content.
//!
//! Only files with Kiln's own names are replaced; files that a run no longer needs are moved aside.

mod claim;
mod holder;
mod identity;
mod lock;
mod look;
mod meeting;

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::{Resume, RunFolder, RunOptions};
use crate::error::{FolderError, Result};
use crate::metrics::is_beside;
use crate::process::launcher;
use kiln_checkpoint::{self as checkpoint, Checkpoint};
use kiln_config::Config;
use kiln_sys::files;

pub use claim::Claim;
pub(super) use lock::Lock;
pub use look::{Progress, Standing, progress, standing};
pub(super) use meeting::Meeting;
pub use meeting::{Waiting, waiting};

use holder::Holder;
use identity::{Claimant, Identity};

const CONFIG_FILE: &str = "config.toml";

const METRICS_FILE: &str = "metrics.jsonl";

const SAMPLES_FILE: &str = "samples.jsonl";

/// Name of the file with the hashes of tensors in a run folder.
pub const HASHES_FILE: &str = "hashes.jsonl";

/// Prefix of the temporary entries of `kiln check` in run folders. Several ranks may check at once.
pub const CHECK_PREFIX: &str = ".kiln-check-";

pub(super) fn samples_of_run(out: &Path) -> PathBuf {
    out.join(SAMPLES_FILE)
}

/// Returns the path of the metrics of the run in `out`.
pub fn metrics_of_run(out: &Path) -> PathBuf {
    out.join(METRICS_FILE)
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Content {
    /// Nothing, or only files that a launcher has put there for this run.
    Nothing,
    /// A start that has taken the folder but not begun to train: it failed early or is about to begin.
    Unbegun(Identity),
    /// A run that has begun and has no checkpoint: there is nothing to resume from and no state to lose.
    Unsaved(Option<Identity>),
    Run(Option<Identity>),
    /// Something else; the string names one such entry.
    Foreign(String),
    File,
}

impl Content {
    fn identity(&self) -> Option<&Identity> {
        match self {
            Content::Run(run) | Content::Unsaved(run) => run.as_ref(),
            Content::Unbegun(run) => Some(run),
            Content::Nothing | Content::Foreign(_) | Content::File => None,
        }
    }
}

/// A run folder that this start may use, and the checkpoint to resume from.
#[derive(Debug)]
pub struct Found {
    /// The path as the user named it, links included.
    pub named: PathBuf,
    /// The path that `named` resolved to; changing a link later does not move the run.
    pub out: PathBuf,
    pub resume: Option<PathBuf>,
    content: Content,
    claimant: Claimant,
    restarts: u64,
    is_restart: bool,
}

/// Finds the folder of a run and the checkpoint to resume from. Writes nothing.
pub fn find(config: &Config, options: &RunOptions) -> Result<Found> {
    let restarts = options.job().restarts;
    let claimant = Claimant::new(config, options);
    let restart_of = |content: &Content| match content {
        Content::Run(Some(run)) | Content::Unsaved(Some(run)) | Content::Unbegun(run) if restarts > 0 => {
            run.check_restart_of(&claimant)
        }
        _ => Err("its folder does not record which job started it"),
    };
    let named = match &options.out {
        RunFolder::At(out) => out.clone(),
        RunFolder::Next(name) => match &options.resume {
            Some(Resume::Path(path)) if let Some(run) = run_of_name(name, &run_of(path)) => run,
            _ => {
                let is_restart = |content: &Content| restart_of(content).is_ok();
                next(name, &config.data.path, options.resume.is_some(), is_restart)?
            }
        },
    };
    if let Some((link, target)) = files::dangling_link(&named) {
        return Err(FolderError::Dangling { out: named, link, target }.into());
    }
    let out = resolve(&named);
    let content = content_of(&out, &config.data.path)?;
    if let Some(before) = std::env::var(launcher::RUN).ok()
        && content.identity().is_none_or(|now| now.id != before)
    {
        return Err(FolderError::NotTheSame(out).into());
    }
    let is_restart = restart_of(&content).is_ok();
    let resume = match &options.resume {
        _ if is_restart && Checkpoint::is_in(&out) => Some(Checkpoint::find_latest(&out)?),
        None => None,
        Some(Resume::Latest) => Some(Checkpoint::find_latest(&out)?),
        Some(Resume::Path(path)) => Some(Checkpoint::find(path)?),
    };
    let is_own = |checkpoint: &Path| {
        let folder = checkpoint.parent();
        folder.is_some_and(|folder| is_same(folder, &checkpoint::checkpoints_folder(&out)))
    };
    let goes_on = is_restart || resume.as_deref().is_some_and(is_own);
    match &content {
        Content::File => return Err(FolderError::File(out).into()),
        Content::Nothing | Content::Unbegun(_) => {}
        _ if goes_on => {}
        Content::Unsaved(Some(run)) if run.was_started_as(&claimant) => {}
        Content::Unsaved(run) => {
            Lock::check_free(&out)?;
            let why = match run {
                Some(_) => "and this configuration differs: repeat the run's original command",
                None => "from an older build that did not record its configuration: remove it",
            };
            return Err(FolderError::Unsaved(out, why).into());
        }
        Content::Foreign(example) => return Err(FolderError::Foreign(out, example.clone()).into()),
        Content::Run(_) => {
            Lock::check_free(&out)?;
            return Err(match restart_of(&content) {
                Err(why) if restarts > 0 && resume.is_none() => FolderError::OtherJob(out, why),
                _ => FolderError::Occupied(out),
            }
            .into());
        }
    }
    Ok(Found { named, out, resume, content, claimant, restarts, is_restart })
}

impl Found {
    /// Returns the folder that this start would have used without an earlier run there. `data` is the run's data.
    pub fn earlier(&self, options: &RunOptions, data: &Path) -> Option<PathBuf> {
        let RunFolder::Next(name) = &options.out else { return None };
        let first = numbered(name, 1);
        let is_new = options.resume.is_none() && !self.is_restart && first != self.named;
        let is_run =
            |first: &PathBuf| matches!(content_of(first, data), Ok(Content::Run(_) | Content::Unsaved(_)));
        Some(first).filter(|first| is_new && is_run(first))
    }

    fn is_still(&self, other: &Found) -> bool {
        (&self.out, &self.resume, &self.content) == (&other.out, &other.resume, &other.content)
    }
}

/// Resolves the symbolic links of `out`. A path without links is returned unchanged.
pub(super) fn resolve(out: &Path) -> PathBuf {
    // Without a trailing slash, which would follow the link.
    let bare: PathBuf = out.components().collect();
    if !bare.ancestors().any(Path::is_symlink) {
        return out.to_owned();
    }
    let resolved = bare.ancestors().find_map(|there| {
        let place = if there.as_os_str().is_empty() { Path::new(".") } else { there };
        let rest = bare.strip_prefix(there).ok()?;
        let place = place.canonicalize().ok()?;
        // Joining an empty path would add a trailing slash.
        Some(if rest.as_os_str().is_empty() { place } else { place.join(rest) })
    });
    resolved.unwrap_or_else(|| out.to_owned())
}

/// Returns the folder that a run will most likely use; only [`find`] decides. Writes nothing.
pub(super) fn likely_place(config: &Config, options: &RunOptions) -> Option<PathBuf> {
    match &options.out {
        RunFolder::At(out) => Some(out.clone()),
        RunFolder::Next(name) => next(name, &config.data.path, options.resume.is_some(), |_| false).ok(),
    }
}

/// Returns the run folder that `resume` is, or in which it is a checkpoint. Neither needs to exist.
pub fn run_of(resume: &Path) -> PathBuf {
    // A relative path may start inside the run.
    let absolute = std::path::absolute(resume).unwrap_or_else(|_| resume.to_owned());
    let checkpoints = checkpoint::checkpoints_folder(Path::new(""));
    let run = absolute.parent().filter(|folder| folder.ends_with(&checkpoints)).and_then(Path::parent);
    let as_named = resume.parent().and_then(Path::parent).filter(|run| !run.as_os_str().is_empty());
    run.map_or(resume, |run| as_named.unwrap_or(run)).to_owned()
}

/// Returns whether a process other than this one works in `out`.
fn is_of_another(out: &Path) -> bool {
    let is_this = |holder: &Holder| u32::try_from(holder.process.pid) == Ok(std::process::id());
    Lock::check_free(out).is_err() && !Holder::read(&lock::holder_file(out)).as_ref().is_some_and(is_this)
}

fn run_of_name(name: &str, run: &Path) -> Option<PathBuf> {
    let mut folders = (1..).map(|index| numbered(name, index)).take_while(|folder| folder.exists());
    folders.find(|folder| is_same(folder, run))
}

fn is_same(a: &Path, b: &Path) -> bool {
    let place = |path: &Path| match path.as_os_str().is_empty() {
        true => Path::new(".").canonicalize(),
        false => path.canonicalize(),
    };
    match (place(a), place(b)) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    }
}

fn numbered(name: &str, index: u64) -> PathBuf {
    match index {
        1 => Path::new("runs").join(name),
        index => Path::new("runs").join(format!("{name}-{index}")),
    }
}

/// Returns the first of `runs/<name>`, `runs/<name>-2`, … that is free for a new run.
/// A restarted job gets its own run; a resumed run gets the last active interrupted run, or else the last run.
fn next(name: &str, data: &Path, resume: bool, is_restart: impl Fn(&Content) -> bool) -> Result<PathBuf> {
    let folder = |index| numbered(name, index);
    let (mut index, mut runs, mut last_restart) = (1, Vec::new(), None);
    loop {
        match content_of(&folder(index), data)? {
            Content::Nothing => break,
            found if is_restart(&found) => last_restart = Some(folder(index)),
            Content::Run(_) | Content::Unsaved(_) => runs.push(folder(index)),
            _ => {}
        }
        index += 1;
    }
    let free = folder(index);
    if last_restart.is_some() || !resume {
        return Ok(last_restart.unwrap_or(free));
    }
    let is_interrupted = |out: &&PathBuf| {
        let progress = progress(out);
        progress.saved.is_some() && progress.saved < progress.steps && !is_of_another(out)
    };
    let last_active =
        |out: &&PathBuf| fs::metadata(metrics_of_run(out)).and_then(|file| file.modified()).ok();
    let interrupted = runs.iter().filter(is_interrupted).max_by_key(last_active);
    Ok(interrupted.or(runs.last()).cloned().unwrap_or_else(|| folder(1)))
}

/// Returns whether `out` has content that is not a run of Kiln, so nothing may be written there.
pub fn is_foreign(out: &Path) -> bool {
    files::dangling_link(out).is_some()
        || matches!(content_of(out, Path::new("")), Ok(Content::Foreign(_) | Content::File))
}

/// Returns the content of `out`, apart from the run's `data`, which may be prepared inside it.
fn content_of(out: &Path, data: &Path) -> Result<Content, FolderError> {
    if !out.is_dir() {
        return Ok(if out.exists() { Content::File } else { Content::Nothing });
    }
    // An unreadable folder of checkpoints does not count as a missing one.
    let checkpoints = checkpoint::checkpoints_folder(out);
    match fs::read_dir(&checkpoints) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(FolderError::io("list", &checkpoints)(error));
        }
        _ => {}
    }
    let has_checkpoint = || Checkpoint::is_in(out);
    if let Some(identity) = Identity::read(out)? {
        return Ok(match () {
            () if has_checkpoint() => Content::Run(Some(identity)),
            () if metrics_of_run(out).exists() => Content::Unsaved(Some(identity)),
            () => Content::Unbegun(identity),
        });
    }
    // Builds without `run.json` left these files.
    let has = |name: &Path| out.join(name).exists();
    let checkpoints = checkpoint::checkpoints_folder(Path::new(""));
    if has(Path::new(CONFIG_FILE)) && (has(Path::new(METRICS_FILE)) || has(&checkpoints)) {
        return Ok(if has_checkpoint() { Content::Run(None) } else { Content::Unsaved(None) });
    }
    let entries = fs::read_dir(out).map_err(FolderError::io("list", out))?.flatten();
    let foreign = entries.filter(|entry| {
        let (path, name) = (entry.path(), entry.file_name());
        // Kiln's own entries include an unfinished identity file, and the folder of locks unless it is a link.
        let is_ours = (name == lock::FOLDER && path.is_dir() && !path.is_symlink())
            || is_beside(&name, identity::FILE)
            || name.as_encoded_bytes().starts_with(CHECK_PREFIX.as_bytes());
        !is_ours && !is_of_file_system(&name) && !kiln_launch::is_log_folder(&path) && !is_same(&path, data)
    });
    let first = foreign.map(|entry| entry.file_name().to_string_lossy().into_owned()).min();
    Ok(first.map_or(Content::Nothing, Content::Foreign))
}

fn is_of_file_system(name: &OsStr) -> bool {
    // NFS renames a file to this when it is removed while open.
    let is_removed = name.as_encoded_bytes().starts_with(b".nfs");
    is_removed || name == "lost+found" || name == ".git"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_belongs_to_its_run() {
        let run_of = |path: &str| run_of(Path::new(path));
        let here = std::env::current_dir().unwrap();
        for path in ["runs/a", "runs/a/checkpoints/fsdp_cpt3"] {
            assert_eq!(run_of(path), Path::new("runs/a"), "{path}");
        }
        assert_eq!(run_of("checkpoints/fsdp_cpt3"), here);
        assert_eq!(run_of("/r/checkpoints/latest"), Path::new("/r"));
        assert_eq!(run_of("elsewhere/fsdp_cpt3"), Path::new("elsewhere/fsdp_cpt3"));
    }

    #[test]
    fn what_is_a_run_and_what_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let content = |files: &[&str]| {
            let out = tempfile::tempdir_in(folder.path()).unwrap();
            for file in files {
                let path = out.path().join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
            content_of(out.path(), &out.path().join("data")).unwrap()
        };
        let foreign = |name: &str| Content::Foreign(name.to_owned());
        let content_of = |out: &Path| content_of(out, Path::new("")).unwrap();
        assert_eq!(content_of(&folder.path().join("new")), Content::Nothing);
        assert_eq!(content(&[]), Content::Nothing);
        assert_eq!(content(&["logs/rank_0.restart_0.stdout.log", ".kiln/lock"]), Content::Nothing);
        assert_eq!(content(&["logs/rank_0.restart_0.stdout.log", "logs/mine"]), foreign("logs"));
        assert_eq!(content(&[".run.json.kiln-17-0"]), Content::Nothing);
        assert_eq!(content(&[".kiln-check-Rb6lOY/file"]), Content::Nothing);
        assert_eq!(content(&["data/train.bin"]), Content::Nothing);
        assert_eq!(content(&["data.old/train.bin", "data/train.bin"]), foreign("data.old"));
        assert_eq!(content(&["flight/black_box"]), foreign("flight"));
        assert_eq!(content(&["config.toml"]), foreign("config.toml"));
        assert_eq!(content(&["run.json"]), foreign("run.json"));
        assert_eq!(content(&["config.toml", "metrics.jsonl"]), Content::Unsaved(None));
        assert_eq!(content(&["config.toml", "checkpoints/latest"]), Content::Unsaved(None));
        let manifest = "checkpoints/fsdp_cpt1/manifest.json";
        assert_eq!(content(&["config.toml", manifest]), Content::Run(None));
        assert_eq!(content(&["lost+found/#1", ".git/config", ".nfs000001"]), Content::Nothing);
        assert_eq!(content(&["lost+found/#1", ".gitignore"]), foreign(".gitignore"));
        let linked = folder.path().join("linked");
        fs::create_dir(&linked).unwrap();
        std::os::unix::fs::symlink(folder.path(), linked.join(".kiln")).unwrap();
        assert_eq!(content_of(&linked), foreign(".kiln"));
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(content_of(&file), Content::File);
        assert!(is_foreign(&file) && !is_foreign(&folder.path().join("new")));
    }
}
