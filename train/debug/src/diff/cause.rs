//! The likely cause of a difference, from the recorded facts about two runs.

use std::path::Path;

use serde_json::Value as Json;

use super::hashes::Compared;
use super::keys::{Effect, KeyDifference};
use super::subject::{Subject, SubjectKind};
use crate::hash::StepPhase;
use kiln_checkpoint::Checkpoint;
use kiln_sys::files;

/// Longer files do not come from a run.
const MAX_BYTES: u64 = 1 << 20;

/// Recorded facts about a run, apart from its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Version, commit and features of the program.
    pub build: Option<String>,
    /// The device that it was computed on.
    pub device: Option<String>,
    /// SHA-256 of the training data.
    data: Option<String>,
}

impl Facts {
    /// Reads the facts about `subject`.
    pub fn of(subject: &Subject) -> Self {
        let facts = match subject.kind {
            SubjectKind::Run => Facts::read(&subject.path.join("run.json")).unwrap_or_default(),
            _ => Facts::default(),
        };
        let checkpoint = subject.model().and_then(|path| Checkpoint::open(&path).ok());
        Facts { data: checkpoint.and_then(|checkpoint| checkpoint.state().data_sha256.clone()), ..facts }
    }

    fn read(path: &Path) -> Option<Self> {
        let json: Json = serde_json::from_slice(&files::read(path, MAX_BYTES).ok()?).ok()?;
        // Older builds did not record it.
        let said =
            |key| json.get(key).and_then(Json::as_str).filter(|said| !said.is_empty()).map(str::to_owned);
        Some(Facts { build: said("build"), device: said("device"), data: None })
    }

    /// Returns `true` if both runs are known to have used the same kind of device.
    pub fn is_on_device_of(&self, other: &Facts) -> bool {
        self.device == other.device
    }
}

/// Describes the builds of two runs if both are known and differ.
pub fn other_builds(a: &Facts, b: &Facts) -> Option<String> {
    differ("the program", &a.build, &b.build)
}

fn differ(what: &str, a: &Option<String>, b: &Option<String>) -> Option<String> {
    let (a, b) = (a.as_ref()?, b.as_ref()?);
    (a != b).then(|| format!("{what}: {a}, and {b} in the second"))
}

fn other_data(a: &Facts, b: &Facts) -> Option<String> {
    differ("the training data, by their SHA-256", &a.data, &b.data)
}

/// Describes the devices of two runs if both are known and differ.
pub fn other_devices(a: &Facts, b: &Facts) -> Option<String> {
    differ("the device", &a.device, &b.device)
}

/// The likely cause of a difference that begins in `phase`. `keys` are the differing keys.
pub fn likely(
    phase: Option<StepPhase>,
    compared: Option<&Compared>,
    keys: Option<&[KeyDifference]>,
    facts: [&Facts; 2],
) -> String {
    let of_numbers = |key: &&KeyDifference| match key.effect {
        Effect::Numbers(from) => phase.is_none_or(|phase| from <= phase),
        _ => false,
    };
    let from = |key: &KeyDifference| match key.effect {
        Effect::Numbers(from) => Some(from),
        _ => None,
    };
    let differ = keys.unwrap_or_default();
    let fitting: Vec<_> = differ.iter().filter(of_numbers).collect();
    // A later step may diverge in its forward pass because of an earlier update.
    let fitting: Vec<_> = match fitting.is_empty() {
        true => differ.iter().filter(|key| from(key).is_some()).collect(),
        false => fitting,
    };
    // A key that takes effect in this phase is more likely than one that would have shown earlier.
    if let Some(nearest) = fitting.iter().filter_map(|key| from(key)).max() {
        let nearest: Vec<_> = fitting.iter().filter(|key| from(key) == Some(nearest)).collect();
        let names: Vec<_> = nearest.iter().map(|key| key.describe()).collect();
        return format!("the configuration: {}", names.join(" or "));
    }
    let [a, b] = facts;
    if let Some(other) = other_devices(a, b).or_else(|| other_builds(a, b)) {
        return other;
    }
    if let Some([a, b]) = compared.and_then(|compared| compared.dtypes.as_ref()).filter(|[a, b]| a != b) {
        return format!("the dtype: {a}, and {b} in the second, which no key explains");
    }
    if let Some(other) = other_data(a, b) {
        return other;
    }
    if phase == Some(StepPhase::Data) {
        return "the data, or their order: no key explains other tokens; compare the folders of prepared data \
                with `kiln diff`"
            .to_owned();
    }
    let rounding: Vec<_> = differ.iter().filter(|key| key.effect == Effect::Rounding).collect();
    if !rounding.is_empty() {
        let names: Vec<_> = rounding.iter().map(|key| key.describe()).collect();
        return format!(
            "the way of the run: {}. By itself that changes rounding at most; {}",
            names.join(" or "),
            hint(phase)
        );
    }
    match keys {
        Some(_) => format!(
            "nothing that is recorded: no key explains it, and the build is the same as far as it is known; {}",
            hint(phase)
        ),
        None => format!("not recorded: one of the two has no configuration; {}", hint(phase)),
    }
}

/// Suggests where to look.
fn hint(phase: Option<StepPhase>) -> &'static str {
    match phase {
        Some(StepPhase::Start) => "look at how weights are drawn or loaded",
        Some(StepPhase::Data) => "look at which samples a rank takes",
        Some(StepPhase::Forward) => {
            "look for weights that were gathered wrongly, and for a mask or a position that goes by rank"
        }
        Some(StepPhase::Loss) => "look at the loss and what it is divided by",
        Some(StepPhase::Backward) => "look at the backward pass of the operation there",
        Some(StepPhase::Gradient) => {
            "look for a gradient that is scaled, counted twice or not reduced on one of the ranks"
        }
        Some(StepPhase::Norm) => "look at how the norm is put together over the ranks",
        Some(StepPhase::Update) => "look at the optimizer",
        None => "`--hash steps=1-20` in both runs would tell the module and the phase",
    }
}
