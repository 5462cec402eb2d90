//! A comparison of runs: `/api/comparison`.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use kiln_sys::files;
use kiln_sys::words::number_of;
use serde::Serialize;
use serde_json::Value;

use super::summary::ACTIVITIES;
use super::watched::WatchedRun;
use crate::run::{Metrics, Run, Series};

/// Speeds exclude the first tenth of a run's logged steps, and at least one step, as the warm-up.
const WARM_UP: usize = 10;

const MOST: u64 = 1 << 20;
/// A manifest names every weight of a model.
const MOST_MANIFEST: u64 = 64 << 20;
const FORMAT: u64 = 1;
const CHECKPOINT: &str = "fsdp_cpt";

/// Configuration keys that place the work without changing its result.
const PLACEMENT: [&str; 6] =
    ["shard.", "train.ranks", "train.micro_batch", "comm.", "device.", "checkpoint."];
const REPORTING: [&str; 3] = ["log.", "sample.", "eval."];

#[derive(Serialize)]
struct Answer {
    runs: Vec<Compared>,
    /// True if the runs shard their state differently; losses are then compared with the first run.
    is_spread: bool,
    /// Other keys in which the runs differ, which may explain different losses.
    other_keys: Vec<String>,
    /// Properties in which the runs differ, which may explain different speeds and bits.
    differences: Vec<&'static str>,
}

/// A run in the comparison. Unrecorded values are `None`.
#[derive(Serialize)]
struct Compared {
    id: String,
    loss: Option<At>,
    val_loss: Option<At>,
    best_val_loss: Option<At>,
    tokens: Option<f64>,
    seconds: Option<f64>,
    tokens_per_s: Option<Spread>,
    step_s: Option<Spread>,
    mfu: Option<Spread>,
    tflops: Option<Spread>,
    peak_bytes: Option<f64>,
    skipped: Option<f64>,
    restarts: Option<usize>,
    checkpoints: Vec<u64>,
    /// Mean seconds of a step on rank 0, in the order of [`ACTIVITIES`].
    spent: Option<Vec<(&'static str, f64)>>,
    waits: Option<f64>,
    strategy: Option<String>,
    mesh: Option<String>,
    ranks: Option<u64>,
    /// Comparison of training losses with those of the first run.
    losses: Option<String>,
    dtypes: Option<String>,
    seed: Option<String>,
    created: Option<String>,
    /// Version, commit and features of the program that last resumed the run.
    build: Option<String>,
    device: Option<String>,
    host: Option<String>,
    data: Option<String>,
    missing: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct At {
    step: u64,
    /// `null` in JSON if it is not finite.
    value: f64,
}

impl From<(u64, f64)> for At {
    fn from((step, value): (u64, f64)) -> Self {
        At { step, value }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Spread {
    lower: f64,
    median: f64,
    upper: f64,
}

impl Spread {
    fn new(values: &[f64]) -> Option<Self> {
        let mut values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let at = |share: f64| {
            let place = share * last as f64;
            let (below, above) = (values[place.floor() as usize], values[place.ceil() as usize]);
            below + (above - below) * place.fract()
        };
        Some(Spread { lower: at(0.25), median: at(0.5), upper: at(0.75) })
    }
}

pub(super) fn comparison(watched: &[Arc<WatchedRun>]) -> impl Serialize {
    let runs: Vec<_> = watched.iter().map(|one| one.read()).collect();
    let mut compared: Vec<_> = watched.iter().zip(&runs).map(|(one, run)| compared(&one.id, run)).collect();
    let keys = differing_keys(&runs);
    let is_of = |key: &str, names: &[&str]| names.iter().any(|name| key.starts_with(name));
    let is_spread = keys.iter().any(|key| is_of(key, &["shard.strategy", "shard.shard_size", "train.ranks"]));
    if is_spread {
        for (one, run) in compared.iter_mut().zip(&runs).skip(1) {
            one.losses = Some(losses(&runs[0], run));
        }
    }
    let differs = |value: fn(&Compared) -> Option<&String>| {
        let mut known = compared.iter().filter_map(value);
        known.next().is_some_and(|first| known.any(|other| other != first))
    };
    let differences = [
        ("build of the program", differs(|run| run.build.as_ref())),
        ("device", differs(|run| run.device.as_ref())),
        ("training data", differs(|run| run.data.as_ref())),
    ];
    Answer {
        is_spread,
        other_keys: keys
            .into_iter()
            .filter(|key| is_spread && !is_of(key, &PLACEMENT) && !is_of(key, &REPORTING))
            .collect(),
        differences: differences.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect(),
        runs: compared,
    }
}

fn differing_keys<R: std::ops::Deref<Target = Run>>(runs: &[R]) -> Vec<String> {
    let configs: Vec<_> = runs.iter().map(|run| run.config()).filter(|config| !config.is_empty()).collect();
    let mut keys: Vec<&String> = configs.iter().flat_map(|config| config.keys()).collect();
    keys.sort();
    keys.dedup();
    let differs = |key: &&String| configs.iter().any(|config| config.get(*key) != configs[0].get(*key));
    keys.into_iter().filter(differs).cloned().collect()
}

fn compared(id: &str, run: &Run) -> Compared {
    let metrics = run.metrics();
    let key = |key: &str| run.config().get(key).cloned();
    let last = |key: &str| metrics.get(key)?.last().map(At::from);
    let finite = |key: &str| metrics.get(key).map(finite).filter(|values| !values.is_empty());
    let most = |key: &str| finite(key)?.into_iter().map(|(_, value)| value).max_by(f64::total_cmp);
    let spread = |key: &str| Spread::new(steady(metrics.get(key)?));
    let best = finite("val_loss").and_then(|losses| losses.into_iter().min_by(|a, b| a.1.total_cmp(&b.1)));
    let spent = spent(metrics);
    let has_events = !run.events().is_empty();
    let mut one = Compared {
        id: id.to_owned(),
        loss: last("loss"),
        val_loss: last("val_loss"),
        best_val_loss: best.map(At::from),
        tokens: finite("tokens").and_then(|tokens| tokens.last().map(|(_, tokens)| *tokens)),
        seconds: metrics.get("time").and_then(|time| {
            let (first, last) = (time.values().first()?, time.values().last()?);
            Some(last - first).filter(|seconds| seconds.is_finite() && *seconds >= 0.0)
        }),
        tokens_per_s: spread("tokens_per_s"),
        step_s: spread("step_s"),
        mfu: spread("mfu"),
        tflops: spread("tflops"),
        peak_bytes: most("peak_bytes"),
        skipped: most("skipped").or(metrics.get("loss").map(|_| 0.0)),
        restarts: has_events.then(|| run.events().iter().filter(|event| event.kind == "resume").count()),
        checkpoints: checkpoints(&run.folder().join("checkpoints")),
        waits: mean(metrics, "wait_s").zip(mean(metrics, "step_s")).map(|(waits, step)| waits / step),
        spent,
        strategy: key("shard.strategy"),
        mesh: None,
        ranks: key("train.ranks").and_then(|ranks| ranks.parse().ok()),
        losses: None,
        dtypes: key("precision.compute")
            .zip(key("precision.reduce"))
            .map(|(compute, reduce)| format!("{compute}, reductions {reduce}")),
        seed: key("train.seed"),
        created: None,
        build: None,
        device: None,
        host: None,
        data: None,
        missing: run.problems(),
    };
    one.read_facts(run);
    one.mesh = one.ranks.and_then(|ranks| mesh(run, ranks));
    one.note_gaps(run);
    one
}

impl Compared {
    fn read_facts(&mut self, run: &Run) {
        let folder = run.folder();
        let (identity, problem) = json(&folder.join("run.json"), MOST);
        self.missing
            .extend(problem.map(|problem| format!("{problem}; its build, device and start are unknown.")));
        let text = |json: &Value, key: &str| {
            json.get(key).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
        };
        if let Some(format) = identity.get("kiln_run").and_then(Value::as_u64)
            && format != FORMAT
        {
            self.missing.push(format!(
                "run.json has version {format}, and this build reads {FORMAT}: some facts may be missing."
            ));
        }
        self.created = text(&identity, "created");
        self.build = text(&identity, "build").or_else(|| text(&identity, "kiln"));
        self.device = text(&identity, "device");
        self.host = text(&json(&folder.join(".kiln/holder.json"), MOST).0["process"], "host");
        if let Some(last) = self.checkpoints.last() {
            let path = folder.join(format!("checkpoints/{CHECKPOINT}{last}/manifest.json"));
            let (manifest, problem) = json(&path, MOST_MANIFEST);
            self.missing
                .extend(problem.map(|problem| format!("{problem}; the SHA-256 of its data is unknown.")));
            self.data = text(&manifest["state"], "data_sha256");
            self.ranks = self.ranks.or(manifest.get("ranks").and_then(Value::as_u64));
        }
    }

    fn note_gaps(&mut self, run: &Run) {
        let metrics = run.metrics();
        let mut note = |text: &str| self.missing.push(text.to_owned());
        let Some(loss) = metrics.get("loss") else {
            return note("No training step is recorded.");
        };
        if let Some((done, steps)) = metrics.last_step().zip(run.steps()).filter(|(done, steps)| done < steps)
        {
            note(&format!("The run is not complete: it is recorded up to step {done} of {steps}."));
        }
        let gaps = loss.values().iter().filter(|value| !value.is_finite()).count();
        if gaps > 0 {
            let steps = number_of(gaps, "logged step");
            note(&format!("The training loss is not finite at {steps}: the curve has gaps there."));
        }
        if self.val_loss.is_none() {
            note("No validation loss is recorded.");
        }
        if self.spent.is_none() {
            note("No breakdown of step times is recorded.");
        }
        if self.restarts.is_none() {
            note("There is no events.jsonl, so restarts are unknown.");
        }
        let superseded = superseded(run.folder());
        if !superseded.is_empty() {
            note(&format!(
                "Steps that were repeated after a restart are shown once, with their last values; the earlier lines \
                 are in {}.",
                superseded.join(", ")
            ));
        }
    }
}

fn finite(series: &Series) -> Vec<(u64, f64)> {
    let values = series.steps().iter().copied().zip(series.values().iter().copied());
    values.filter(|(_, value)| value.is_finite()).collect()
}

fn steady(series: &Series) -> &[f64] {
    match series.values() {
        values @ ([] | [_]) => values,
        values => &values[values.len().div_ceil(WARM_UP)..],
    }
}

fn mean(metrics: &Metrics, key: &str) -> Option<f64> {
    let finite: Vec<f64> =
        steady(metrics.get(key)?).iter().copied().filter(|value| value.is_finite()).collect();
    (!finite.is_empty()).then(|| finite.iter().sum::<f64>() / finite.len() as f64)
}

fn spent(metrics: &Metrics) -> Option<Vec<(&'static str, f64)>> {
    let means = ACTIVITIES.map(|(name, key)| (name, mean(metrics, key)));
    let is_recorded = means.iter().any(|(_, mean)| mean.is_some());
    is_recorded.then(|| means.into_iter().map(|(name, mean)| (name, mean.unwrap_or(0.0))).collect())
}

fn json(path: &Path, most: u64) -> (Value, Option<String>) {
    let read = files::read(path, most).map_err(|error| match error.kind() {
        ErrorKind::NotFound => "the file is missing".to_owned(),
        _ => error.to_string(),
    });
    let read = read.and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string()));
    match read {
        Ok(json) => (json, None),
        Err(why) => (Value::Null, Some(format!("{}: {why}", path.display()))),
    }
}

/// Describes the mesh of `ranks` ranks. `None` for hybrid strategies without `shard.shard_size`.
fn mesh(run: &Run, ranks: u64) -> Option<String> {
    let shard = match run.config().get("shard.strategy")?.as_str() {
        "FULL_SHARD" | "SHARD_GRAD_OP" => ranks,
        "NO_SHARD" => 1,
        _ => run.config().get("shard.shard_size")?.parse().ok()?,
    };
    let is_whole = shard > 0 && ranks.is_multiple_of(shard);
    is_whole.then(|| format!("replicate {} × shard {shard}", ranks / shard))
}

fn checkpoints(folder: &Path) -> Vec<u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let step = |entry: fs::DirEntry| {
        let is_complete = entry.path().join("manifest.json").is_file();
        entry.file_name().to_str()?.strip_prefix(CHECKPOINT)?.parse().ok().filter(|_| is_complete)
    };
    let mut steps: Vec<u64> = entries.filter_map(step).collect();
    steps.sort_unstable();
    steps
}

/// Returns files with lines that were replaced when the run resumed from an earlier step.
fn superseded(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let names =
        names.filter(|name| name.starts_with("superseded-")).map(|name| format!("{name}/metrics.jsonl"));
    let mut names: Vec<_> = ["metrics-superseded.jsonl".to_owned()].into_iter().chain(names).collect();
    names.retain(|name| folder.join(name).is_file());
    names.sort();
    names
}

fn losses(first: &Run, other: &Run) -> String {
    let (Some(one), Some(two)) = (first.metrics().get("loss"), other.metrics().get("loss")) else {
        return "not recorded".to_owned();
    };
    let pairs = one.steps().iter().zip(one.values());
    let pairs: Vec<_> = pairs.filter_map(|(step, one)| Some((*step, *one, two.at(*step)?))).collect();
    let Some((last, _, _)) = pairs.last() else { return "both have logged no common step".to_owned() };
    let differing: Vec<_> = pairs.iter().filter(|(_, one, two)| one.to_bits() != two.to_bits()).collect();
    let Some(&&(from, ..)) = differing.first() else {
        return format!(
            "the same bits at {} that both have logged, up to step {last}",
            number_of(pairs.len(), "step")
        );
    };
    let (finite, gaps): (Vec<_>, Vec<_>) =
        differing.into_iter().partition(|(_, one, two)| one.is_finite() && two.is_finite());
    let gaps = match gaps.len() {
        0 => String::new(),
        count => format!("; one of the two is not finite at {}", number_of(count, "step")),
    };
    let relative = finite.iter().map(|(_, one, two)| (one - two).abs() / one.abs().max(f64::MIN_POSITIVE));
    let by = match relative.fold(0.0, f64::max) {
        0.0 => String::new(),
        most => format!(" by at most {most:.1e} relative"),
    };
    format!("differs from step {from} on{by}{gaps}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_values() {
        let spread = Spread::new(&[4.0, 1.0, f64::NAN, 3.0, 2.0, 5.0]);
        assert_eq!(spread, Some(Spread { lower: 2.0, median: 3.0, upper: 4.0 }));
        assert_eq!(Spread::new(&[1.0, 2.0]), Some(Spread { lower: 1.25, median: 1.5, upper: 1.75 }));
        assert_eq!(Spread::new(&[f64::INFINITY]), None);
    }
}
