//! What is known of a run besides its configuration and its numbers: its build, its device, its checkpoints.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use kiln_storage::files;
use serde_json::Value;

use crate::run::Run;

/// Longer files of these names are not of ours.
const MOST: u64 = 1 << 20;
/// A manifest names every weight of a model.
const MOST_MANIFEST: u64 = 64 << 20;
/// The version of `run.json` that is known.
const FORMAT: u64 = 1;
const CHECKPOINT: &str = "fsdp_cpt";

/// What is known of a run besides its configuration and its numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Facts {
    /// When it began, in UTC.
    pub(super) created: Option<String>,
    /// Version, commit and features of the program that last went on with it.
    pub(super) build: Option<String>,
    /// What it was computed on.
    pub(super) device: Option<String>,
    /// The machine of rank 0.
    pub(super) host: Option<String>,
    /// Number of ranks.
    pub(super) ranks: Option<u64>,
    /// Ranks as `replicate × shard`.
    pub(super) mesh: Option<String>,
    /// SHA-256 of its training data.
    pub(super) data: Option<String>,
    /// Steps of its checkpoints that are there.
    pub(super) checkpoints: Vec<u64>,
    /// What could not be found out, and why.
    pub(super) missing: Vec<String>,
}

impl Facts {
    /// Those of `run`.
    pub(super) fn of(run: &Run) -> Self {
        let mut facts = Facts::default();
        let folder = run.folder();
        let identity =
            facts.json(&folder.join("run.json"), MOST, Some("its build, device and start are unknown"));
        let said = |json: &Value, key: &str| {
            json.get(key).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
        };
        if let Some(format) =
            identity.get("kiln_run").and_then(Value::as_u64).filter(|format| *format != FORMAT)
        {
            facts.missing.push(format!(
                "run.json is of version {format}, and this build knows {FORMAT}: what else it says may be missing here."
            ));
        }
        facts.created = said(&identity, "created");
        facts.build = said(&identity, "build").or_else(|| said(&identity, "kiln"));
        facts.device = said(&identity, "device");
        let holder = facts.json(&folder.join(".kiln/holder.json"), MOST, None);
        facts.host = said(&holder["process"], "host");
        facts.checkpoints = checkpoints(&folder.join("checkpoints"));
        if let Some(last) = facts.checkpoints.last() {
            let path = folder.join(format!("checkpoints/{CHECKPOINT}{last}/manifest.json"));
            let manifest = facts.json(&path, MOST_MANIFEST, Some("the SHA-256 of its data is unknown"));
            facts.data = said(&manifest["state"], "data_sha256");
            facts.ranks = manifest.get("ranks").and_then(Value::as_u64);
        }
        facts.ranks = run.config().get("train.ranks").and_then(|ranks| ranks.parse().ok()).or(facts.ranks);
        facts.mesh = facts.ranks.and_then(|ranks| mesh(run, ranks));
        facts
    }

    /// The object in a file. If there is none, and `otherwise` says what is unknown then, that is noted.
    fn json(&mut self, path: &Path, most: u64, otherwise: Option<&str>) -> Value {
        let read = files::read(path, most).map_err(|error| match error.kind() {
            ErrorKind::NotFound => "it is not there".to_owned(),
            _ => error.to_string(),
        });
        let read = read.and_then(|text| {
            serde_json::from_slice::<Value>(&text).map_err(|error| format!("it cannot be read ({error})"))
        });
        match (read, otherwise) {
            (Ok(json), _) => json,
            (Err(_), None) => Value::Null,
            (Err(why), Some(otherwise)) => {
                self.missing.push(format!("{}: {why}; {otherwise}.", path.display()));
                Value::Null
            }
        }
    }
}

/// The arrangement of ranks. That of hybrids without a size of their own depends on the machines.
fn mesh(run: &Run, ranks: u64) -> Option<String> {
    let shard = match run.config().get("shard.strategy")?.as_str() {
        "FULL_SHARD" | "SHARD_GRAD_OP" => ranks,
        "NO_SHARD" => 1,
        _ => run.config().get("shard.shard_size")?.parse().ok()?,
    };
    let is_whole = shard > 0 && ranks.is_multiple_of(shard);
    is_whole.then(|| format!("replicate {} × shard {shard}", ranks / shard))
}

/// Steps of the whole checkpoints in `folder`, ascending.
fn checkpoints(folder: &Path) -> Vec<u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let step = |entry: fs::DirEntry| {
        let is_whole = entry.path().join("manifest.json").is_file();
        entry.file_name().to_str()?.strip_prefix(CHECKPOINT)?.parse().ok().filter(|_| is_whole)
    };
    let mut steps: Vec<u64> = entries.filter_map(step).collect();
    steps.sort_unstable();
    steps
}
