//! The final numbers of a run.

use super::facts::Facts;
use super::statistics::{Spread, count, significant};
use crate::run::{Run, Series};

/// Of the logged steps of a run, this part is passed over at the start where speeds are measured; one at least.
const WARM_UP: usize = 10;

/// The final numbers of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Numbers {
    /// How the run stands.
    pub(super) state: String,
    /// Last optimizer step of which there is a line.
    pub(super) last_step: Option<u64>,
    /// Steps that its configuration asks for.
    pub(super) steps: Option<u64>,
    /// Training loss of the last logged step, which need not be finite.
    pub(super) loss: Option<(u64, f64)>,
    /// The lowest validation loss, and the step after which it was measured.
    pub(super) best_validation: Option<(u64, f64)>,
    /// The last validation loss, which need not be finite.
    pub(super) last_validation: Option<(u64, f64)>,
    /// Tokens trained on.
    pub(super) tokens: Option<f64>,
    /// Seconds from the first line of metrics to the last.
    pub(super) seconds: Option<f64>,
    /// Tokens per second of all ranks.
    pub(super) tokens_per_s: Option<Spread>,
    /// Seconds of a step.
    pub(super) step_s: Option<Spread>,
    /// Model FLOP/s over the device's peak.
    pub(super) mfu: Option<Spread>,
    /// Model TFLOP/s of all ranks.
    pub(super) tflops: Option<Spread>,
    /// The most bytes that a rank held.
    pub(super) peak_bytes: Option<f64>,
    /// Steps whose update was left out.
    pub(super) skipped: Option<f64>,
    /// How often it went on after a stop.
    pub(super) resumes: Option<usize>,
}

impl Numbers {
    /// Those of `run`.
    pub(super) fn of(run: &Run) -> Self {
        let metrics = run.metrics();
        let last = |key: &str| metrics.get(key).and_then(Series::last);
        let steady = |key: &str| Spread::of(steady(metrics.get(key)?).iter().copied());
        let most = |key: &str| {
            let values = metrics.get(key)?.values().iter().copied().filter(|value| value.is_finite());
            values.max_by(f64::total_cmp)
        };
        let best = metrics.get("val_loss").and_then(|series| {
            let finite = series.steps().iter().zip(series.values()).filter(|(_, value)| value.is_finite());
            finite.min_by(|a, b| a.1.total_cmp(b.1)).map(|(step, value)| (*step, *value))
        });
        let is_told = !run.events().is_empty();
        let resumes = run.events().iter().filter(|event| event.kind == "resume").count();
        Numbers {
            state: state(run),
            last_step: metrics.last_step(),
            steps: run.steps(),
            loss: last("loss"),
            best_validation: best,
            last_validation: last("val_loss"),
            tokens: metrics.get("tokens").and_then(last_finite),
            seconds: metrics.get("time").and_then(|time| {
                let (first, last) = (time.values().first()?, time.values().last()?);
                Some(last - first).filter(|seconds| seconds.is_finite() && *seconds >= 0.0)
            }),
            tokens_per_s: steady("tokens_per_s"),
            step_s: steady("step_s"),
            mfu: steady("mfu"),
            tflops: steady("tflops"),
            peak_bytes: most("peak_bytes"),
            skipped: most("skipped").or(metrics.get("loss").map(|_| 0.0)),
            resumes: is_told.then_some(resumes),
        }
    }

    /// Names and values, as a report shows them.
    pub(super) fn rows(&self, facts: &Facts) -> Vec<(&'static str, Option<String>)> {
        let at = |found: Option<(u64, f64)>| {
            found.map(|(step, value)| format!("{} (step {})", significant(value, 5), count(step)))
        };
        let spread = |spread: Option<Spread>, factor: f64, digits: usize| {
            let shown = |value: f64| significant(factor * value, digits);
            spread.map(|s| format!("{} [{}, {}]", shown(s.median), shown(s.lower), shown(s.upper)))
        };
        let checkpoints = match facts.checkpoints.last() {
            None => "none".to_owned(),
            Some(last) => format!("{} (last of step {})", facts.checkpoints.len(), count(*last)),
        };
        vec![
            ("State", Some(self.state.clone())),
            ("Training loss, last logged step (nats per token)", at(self.loss)),
            ("Best validation loss (nats per token)", at(self.best_validation)),
            ("Last validation loss (nats per token)", at(self.last_validation)),
            ("Tokens trained on", self.tokens.map(|tokens| count(tokens as u64))),
            ("Time from first to last log line", self.seconds.map(duration)),
            ("Throughput (tokens/s, all ranks)", spread(self.tokens_per_s, 1.0, 4)),
            ("Step time (ms)", spread(self.step_s, 1e3, 4)),
            ("MFU (%)", spread(self.mfu, 100.0, 3)),
            ("Model TFLOP/s, all ranks", spread(self.tflops, 1.0, 3)),
            ("Peak memory of a rank (MiB)", self.peak_bytes.map(mebibytes)),
            ("Steps without an update", self.skipped.map(|steps| count(steps as u64))),
            ("Restarts", self.resumes.map(|resumes| resumes.to_string())),
            ("Checkpoints in the folder", Some(checkpoints)),
        ]
    }
}

/// Bytes, in MiB.
pub(super) fn mebibytes(bytes: f64) -> String {
    significant(bytes / f64::from(1 << 20), 4)
}

/// How the run stands, by its events, or else by its steps.
fn state(run: &Run) -> String {
    let done = run.metrics().last_step().unwrap_or(0);
    let of = match run.steps() {
        Some(steps) => format!("step {} of {}", count(done), count(steps)),
        None => format!("step {}", count(done)),
    };
    let last = run
        .events()
        .iter()
        .rev()
        .find(|event| ["start", "resume", "stop", "end", "failure"].contains(&event.kind.as_str()));
    match last.map(|event| event.kind.as_str()) {
        Some("end") => format!("complete, {of}"),
        Some("stop") => format!("stopped at {of}"),
        Some("failure") => format!("failed after {of}"),
        _ if run.steps().is_some_and(|steps| done >= steps) => format!("complete, {of}"),
        _ => format!("not complete, {of}"),
    }
}

fn last_finite(series: &Series) -> Option<f64> {
    series.values().iter().copied().rev().find(|value| value.is_finite())
}

/// The values of a series without those of its warm-up.
pub(super) fn steady(series: &Series) -> &[f64] {
    &series.values()[warm_up(series.values().len())..]
}

/// How many of so many logged steps are passed over at the start.
pub(super) fn warm_up(logged: usize) -> usize {
    match logged {
        0 | 1 => 0,
        logged => logged.div_ceil(WARM_UP),
    }
}

/// Seconds, as people say them.
fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{} s", significant(seconds, 3)),
        60..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole / 60 % 60),
    }
}
