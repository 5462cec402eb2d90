//! What somebody finds who only looks at a run.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::error::FolderError;
use super::holder::Holder;
use super::lock::{Lock, holder_file};
use super::{CONFIG_FILE, Content, content_of, metrics_of_run};
use crate::checkpoint::{self, Checkpoint};
use crate::error::Result;
use crate::files;
use crate::process::ProcessId;

/// A holder whose file is older than this is gone: it writes it every five seconds.
const SILENCE: Duration = Duration::from_secs(25);

/// Longer files are no configurations.
const MAX_BYTES: u64 = 1 << 20;

/// Bytes at the end of a file of metrics in which its last lines are looked for.
const TAIL: u64 = 256 * 1024;

/// How a run folder stands.
#[derive(Debug)]
pub(crate) enum Standing {
    /// It holds no run, for this reason.
    NoRun(String),
    /// A process holds it.
    Held(Option<ProcessId>),
    /// The last process that held it has let go of it.
    Ended,
    /// The last process that held it has ended without letting go, so it was killed.
    Killed(ProcessId),
}

/// How the folder `out` stands. Writes nothing.
pub(crate) fn standing(out: &Path) -> Result<Standing> {
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
        // Of a build that wrote no such file, or of a process that has let go.
        None => Standing::Ended,
        Some(holder) if holder.ended => Standing::Ended,
        Some(Holder { process, .. }) => match process.is_gone() {
            Some(true) => Standing::Killed(process),
            Some(false) => Standing::Held(Some(process)),
            // On another machine, whose locks may not be seen here, it writes the file again and again.
            None if age().is_some_and(|age| age < SILENCE) => Standing::Held(Some(process)),
            None => Standing::Killed(process),
        },
    })
}

/// How far a run has come, by its folder.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Steps of its configuration.
    pub(crate) steps: Option<u64>,
    /// The last step that it has logged.
    pub(crate) logged: Option<u64>,
    /// The loss of that step.
    pub(crate) loss: Option<f64>,
    /// The step of its newest checkpoint.
    pub(crate) saved: Option<u64>,
}

/// How far the run in `out` has come. What cannot be read is not known.
pub(crate) fn progress(out: &Path) -> Progress {
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

/// The last line of the metrics that is about a step.
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
