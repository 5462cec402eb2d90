//! Read-only queries about a run folder.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::holder::Holder;
use super::lock::{Lock, holder_file};
use super::{CONFIG_FILE, Content, content_of, metrics_of_run};
use crate::error::FolderError;
use crate::error::Result;
use crate::process::ProcessId;
use kiln_checkpoint::{self as checkpoint, Checkpoint};
use kiln_sys::files;

/// Age at which a holder's file means that the holder is gone: a live holder writes it every five seconds.
const SILENCE: Duration = Duration::from_secs(25);

const MAX_BYTES: u64 = 1 << 20;

const TAIL: u64 = 256 * 1024;

/// The state of a run folder.
#[derive(Debug)]
pub enum Standing {
    /// The folder holds no run, for this reason.
    NoRun(String),
    /// A process holds the folder.
    Held(Option<ProcessId>),
    /// The last process that held the folder has released it.
    Ended,
    /// The last process that held the folder was killed: it ended without releasing the folder.
    Killed(ProcessId),
}

/// Returns the state of the folder `out`. Writes nothing.
pub fn standing(out: &Path) -> Result<Standing> {
    match content_of(out, Path::new(""))? {
        Content::Nothing if !out.exists() => return Ok(Standing::NoRun("it is not there".to_owned())),
        Content::Nothing => return Ok(Standing::NoRun("nothing is in it".to_owned())),
        Content::File => return Ok(Standing::NoRun("it is a file".to_owned())),
        Content::Foreign(example) => return Ok(Standing::NoRun(format!("it has {example}"))),
        Content::Unbegun(_) | Content::Unsaved(_) | Content::Run(_) => {}
    }
    let path = holder_file(out);
    let holder = Holder::read(&path);
    match Lock::check_free(out) {
        Ok(()) => {}
        Err(FolderError::Held(..)) => {
            return Ok(Standing::Held(holder.filter(|holder| !holder.ended).map(|holder| holder.process)));
        }
        Err(error) => return Err(error.into()),
    }
    let age = || {
        let written = fs::metadata(&path).and_then(|file| file.modified()).ok()?;
        SystemTime::now().duration_since(written).ok()
    };
    Ok(match holder {
        // From a build that wrote no such file, or a process that has released it.
        None => Standing::Ended,
        Some(holder) if holder.ended => Standing::Ended,
        Some(Holder { process, .. }) => match process.is_gone() {
            Some(true) => Standing::Killed(process),
            Some(false) => Standing::Held(Some(process)),
            // The holder is on another machine, whose locks may be invisible here, but keeps writing the file.
            None if age().is_some_and(|age| age < SILENCE) => Standing::Held(Some(process)),
            None => Standing::Killed(process),
        },
    })
}

/// The progress of a run, read from its folder.
#[derive(Debug, Default)]
pub struct Progress {
    /// Number of steps in the run's configuration.
    pub steps: Option<u64>,
    /// Last step in the log.
    pub logged: Option<u64>,
    /// Loss of the last step in the log.
    pub loss: Option<f64>,
    /// Step of the newest checkpoint.
    pub saved: Option<u64>,
}

/// Reads the progress of the run in `out`. Fields that cannot be read are `None`.
pub fn progress(out: &Path) -> Progress {
    let config =
        files::read(&out.join(CONFIG_FILE), MAX_BYTES).ok().and_then(|text| String::from_utf8(text).ok());
    let config: Option<toml::Table> = config.and_then(|text| toml::from_str(&text).ok());
    let steps = || config.as_ref()?.get("train")?.get("steps")?.as_integer()?.try_into().ok();
    let line = last_step(out);
    let saved = Checkpoint::find_latest(out).ok();
    Progress {
        steps: steps(),
        logged: line.as_ref().and_then(|line| line["step"].as_u64()),
        loss: line.as_ref().and_then(|line| line["loss"].as_f64()),
        saved: saved.and_then(|folder| checkpoint::step_of(folder.file_name()?)),
    }
}

fn last_step(out: &Path) -> Option<Value> {
    let mut file = files::open(&metrics_of_run(out)).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut tail = Vec::new();
    file.take(TAIL).read_to_end(&mut tail).ok()?;
    let lines = String::from_utf8_lossy(&tail);
    let mut lines = lines.lines().rev().filter_map(|line| serde_json::from_str(line).ok());
    lines.find(|line: &Value| line.get("step").is_some() && line.get("val_loss").is_none())
}
