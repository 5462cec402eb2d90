//! The changes to a run folder when a run is started or resumed.
//! [`Found::claim`] takes the folder. After loading, [`Claim::begin`] moves aside everything later than the checkpoint.
//! A start that fails in between leaves the earlier run intact.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::HASHES_FILE;
use super::identity::Identity;
use super::lock::{Lock, Patience};
use super::{CONFIG_FILE, Content, Found, SAMPLES_FILE, metrics_of_run};
use crate::error::FolderError;
use crate::error::Result;
use crate::flight;
use crate::metrics::{cut_lines_after, print_line, write_atomic};
use crate::process::launcher::{self, Message};
use crate::run::events::Events;
use crate::run::{RunFolder, RunOptions};
use kiln_checkpoint::{self as checkpoint, HeldFolder};
use kiln_config::CommSection;

const CUT_METRICS: &str = "metrics-superseded.jsonl";

/// Other files that are cut in the same way, with the files that receive the lines. Events are not cut.
const CUT_TOO: [(&str, &str); 2] =
    [(HASHES_FILE, "hashes-superseded.jsonl"), (SAMPLES_FILE, "samples-superseded.jsonl")];

/// A claimed run folder, and rank 0's changes to it when the run begins.
#[derive(Debug)]
pub struct Claim {
    out: PathBuf,
    held: Option<HeldFolder>,
    is_unsaved: bool,
    /// The identity in `run.json`, and the one to write there.
    known: Identity,
    identity: Identity,
    events: Arc<Events>,
}

impl Found {
    /// Takes the folder, or fails if another run holds it. Returns `None` if the folder has changed since it was found.
    pub(in crate::run) fn claim(
        &self,
        options: &RunOptions,
        comm: &CommSection,
        find: impl Fn() -> Result<Found>,
    ) -> Result<Option<(Lock, Claim)>> {
        let is_new = matches!(self.content, Content::Nothing | Content::Unbegun(_));
        let identity = match &self.content {
            Content::Run(Some(known)) | Content::Unsaved(Some(known)) => known.clone(),
            _ if is_new => Identity::new(&self.claimant)?,
            // A run of an older build, whose job is known only once the run has been resumed.
            _ => Identity::new(&self.claimant)?.without_job(),
        };
        // The previous process of a restarted job may need a while to end.
        let time = if self.is_restart { comm.join_timeout() } else { std::time::Duration::ZERO };
        let patience = Patience { time, stop: &options.stop };
        let lock = match Lock::take(&self.out, &identity.id, patience) {
            Ok(lock) => lock,
            // Two starts have found the same free name.
            Err(FolderError::Held(..))
                if matches!(options.out, RunFolder::Next(_)) && is_new && !self.is_still(&find()?) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        if !self.is_still(&find()?) {
            return Ok(None);
        }
        if !matches!(self.content, Content::Run(Some(_)) | Content::Unsaved(Some(_))) {
            identity.write(&self.out)?;
        }
        launcher::send(Message::Run, &identity.id);
        // Created now and not when the first checkpoint is due, which may be hours later.
        let checkpoints = checkpoint::checkpoints_folder(&self.out);
        fs::create_dir_all(&checkpoints).map_err(FolderError::io("create", &checkpoints))?;
        checkpoint::sweep(&checkpoints);
        self.set_flights_aside()?;
        kiln_observe::ask::clear(&self.out);
        let taken = identity.taken_by(&self.claimant);
        let (out, held) = (self.out.clone(), lock.held());
        let is_unsaved = matches!(self.content, Content::Unsaved(_));
        let events = Arc::default();
        Ok(Some((lock, Claim { out, held, is_unsaved, known: identity, identity: taken, events })))
    }

    /// Moves the flight recordings of earlier starts aside, because they may show why the last start ended.
    fn set_flights_aside(&self) -> Result<(), FolderError> {
        let folder = flight::flight_folder(&self.out);
        let names = flight::files_in(&folder);
        if names.is_empty() {
            return Ok(());
        }
        let aside = match self.restarts {
            0 => new_folder(&self.out, "flight-before-resume-", 1)?,
            restarts => new_folder(&self.out, "flight-before-restart-", restarts)?,
        };
        for name in names {
            let to = aside.join(&name);
            fs::rename(folder.join(&name), &to).map_err(FolderError::io("rename to", &to))?;
        }
        let _ = fs::remove_dir(&folder);
        Ok(())
    }
}

impl Claim {
    pub(in crate::run) fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// Records this start on `device` in the folder, and moves aside everything about steps after `step`.
    pub fn begin(&self, config: &str, device: String, step: u64) -> Result<()> {
        self.held.as_ref().map_or(Ok(()), HeldFolder::check)?;
        let checkpoints = checkpoint::checkpoints_folder(&self.out);
        let later = checkpoint::later_than(&checkpoints, step);
        let mut cut = self.out.join(CUT_METRICS);
        if !later.is_empty() {
            let aside = new_folder(&self.out, "superseded-", 1)?;
            checkpoint::move_later(&checkpoints, step, &checkpoint::checkpoints_folder(&aside))?;
            cut = metrics_of_run(&aside);
            let later: Vec<_> = later.iter().map(u64::to_string).collect();
            print_line(&format!(
                "going back to step {step}: checkpoints of later steps ({}) and their metrics are now in {}",
                later.join(", "),
                aside.display()
            ));
        }
        if checkpoint::fix_latest(&checkpoints, step)? {
            print_line(&format!(
                "{} did not name the newest complete checkpoint, that of step {step}, and was corrected; the \
                 last process probably ended before it could write it",
                checkpoints.join("latest").display()
            ));
        }
        let metrics = metrics_of_run(&self.out);
        // A run without a checkpoint has no step that this start continues from, whatever checkpoint it resumes from.
        let last = if self.is_unsaved { 0 } else { step };
        let was_cut = cut_lines_after(&metrics, last, &cut).map_err(FolderError::io("write", &metrics))?;
        if was_cut && self.is_unsaved {
            print_line(&format!(
                "{} holds a run without a complete checkpoint: starting again; its metrics are now in {}",
                self.out.display(),
                cut.display()
            ));
        }
        for (file, beside) in CUT_TOO {
            let path = self.out.join(file);
            let cut = if later.is_empty() { self.out.join(beside) } else { cut.with_file_name(file) };
            cut_lines_after(&path, last, &cut).map_err(FolderError::io("write", &path))?;
        }
        let path = self.out.join(CONFIG_FILE);
        write_atomic(&path, config.as_bytes()).map_err(FolderError::io("write", &path))?;
        // Last, because from here on a restart of this job continues with this folder.
        let identity = self.identity.on_device(device);
        if identity != self.known {
            identity.write(&self.out)?;
        }
        Ok(())
    }
}

fn new_folder(out: &Path, prefix: &str, first: u64) -> Result<PathBuf, FolderError> {
    let mut index = first;
    loop {
        let path = out.join(format!("{prefix}{index}"));
        match fs::create_dir(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => index += 1,
            Err(error) => return Err(FolderError::io("create", &path)(error)),
            Ok(()) => return Ok(path),
        }
    }
}
