use std::path::Path;

use serde_json::Value as Json;

use super::hashes::Compared;
use super::keys::{Effect, KeyDifference};
use super::subject::{Subject, SubjectKind};
use crate::hash::StepPhase;
use kiln_checkpoint::Checkpoint;
use kiln_sys::files;

const MAX_BYTES: u64 = 1 << 20;

/// Recorded facts about a run, apart from its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Version, commit and features of the program.
    pub build: Option<String>,
    pub device: Option<String>,
    data: Option<String>,
}

impl Facts {
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
        // Older builds did not record these keys.
        let said =
            |key| json.get(key).and_then(Json::as_str).filter(|said| !said.is_empty()).map(str::to_owned);
        Some(Facts { build: said("build"), device: said("device"), data: None })
    }

    /// Returns `true` if both runs recorded the same device, or neither recorded one.
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
    (a != b).then(|| format!("{what}: {a} in the first, {b} in the second"))
}

fn other_data(a: &Facts, b: &Facts) -> Option<String> {
    differ("the SHA-256 of the training data", &a.data, &b.data)
}

/// Describes the devices of two runs if both are known and differ.
pub fn other_devices(a: &Facts, b: &Facts) -> Option<String> {
    differ("the device", &a.device, &b.device)
}

/// Returns the likely cause of a difference that begins in `phase`; `keys` are the differing keys.
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
        return format!("the dtype: {a} in the first, {b} in the second, which no key explains");
    }
    if let Some(other) = other_data(a, b) {
        return other;
    }
    if phase == Some(StepPhase::Data) {
        return "the data or its order: no key explains the different tokens; compare the folders of prepared data \
                with `kiln diff`"
            .to_owned();
    }
    let rounding: Vec<_> = differ.iter().filter(|key| key.effect == Effect::Rounding).collect();
    if !rounding.is_empty() {
        let names: Vec<_> = rounding.iter().map(|key| key.describe()).collect();
        return format!(
            "the arrangement of the run: {}. On its own, it can only change rounding; {}",
            names.join(" or "),
            hint(phase)
        );
    }
    match keys {
        Some(_) => format!(
            "unknown: no key explains the difference, and no difference of devices, builds or data is recorded; {}",
            hint(phase)
        ),
        None => format!("unknown: one of the two has no configuration; {}", hint(phase)),
    }
}

fn hint(phase: Option<StepPhase>) -> &'static str {
    match phase {
        Some(StepPhase::Start) => "check how weights are initialised or loaded",
        Some(StepPhase::Data) => "check which samples each rank reads",
        Some(StepPhase::Forward) => {
            "check that weights are gathered correctly, and that no mask or position depends on the rank"
        }
        Some(StepPhase::Loss) => "check the loss and its divisor",
        Some(StepPhase::Backward) => "check the backward pass of the operation there",
        Some(StepPhase::Gradient) => {
            "check whether one of the ranks scales its gradient, counts it twice or does not reduce it"
        }
        Some(StepPhase::Norm) => "check how the norm is summed over the ranks",
        Some(StepPhase::Update) => "check the optimizer",
        None => "repeat both runs with `--hash steps=1-20` to find the module and the phase",
    }
}
