//! A short summary of every run: `/api/runs`.

use serde::Serialize;

use super::watched::{Watched, WatchedRun};
use crate::run::{Metrics, Run, Series};
use crate::status::{Look, State};

/// Number of logged steps whose mean or median represents a varying time.
const RECENT: usize = 20;

pub(super) const ACTIVITIES: [(&str, &str); 6] = [
    ("data", "data_s"),
    ("forward", "forward_s"),
    ("backward", "backward_s"),
    ("optimizer", "optimizer_s"),
    ("other", "other_s"),
    ("waiting", "wait_s"),
];

#[derive(Serialize)]
struct All {
    now: f64,
    runs: Vec<Summary>,
    orders: bool,
    problems: Vec<String>,
}

#[derive(Serialize)]
pub(super) struct Summary {
    id: String,
    folder: String,
    /// `None` if the run's processes have not been asked, or cannot be asked.
    pub(super) state: Option<State>,
    is_bad: bool,
    is_over: bool,
    text: String,
    culprits: Vec<usize>,
    ranks: usize,
    #[serde(flatten)]
    pub(super) progress: Progress,
    /// Times of the first and the last line, in seconds since 1970.
    began: Option<f64>,
    changed: Option<f64>,
    /// Mean seconds of recent steps by activity.
    spent: Vec<(&'static str, f64)>,
    samples: usize,
    events: usize,
    problems: Vec<String>,
}

/// Progress of a run, with the last values of its main metrics.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Progress {
    pub(crate) step: Option<u64>,
    pub(crate) steps: Option<u64>,
    pub(crate) saved: Option<u64>,
    pub(crate) loss: Option<f64>,
    pub(crate) val_loss: Option<f64>,
    best_val_loss: Option<f64>,
    tokens: Option<f64>,
    pub(crate) tokens_per_s: Option<f64>,
    pub(crate) mfu: Option<f64>,
    pub(crate) tflops: Option<f64>,
    pub(crate) peak_bytes: Option<f64>,
    step_s: Option<f64>,
    /// Estimated seconds until the last step is done.
    pub(crate) eta_s: Option<f64>,
}

impl Progress {
    pub(crate) fn new(run: &Run, look: Option<&Look>) -> Progress {
        let metrics = run.metrics();
        let last = |key: &str| Some(metrics.get(key)?.last()?.1);
        let best = |losses: &Series| losses.values().iter().copied().fold(f64::NAN, f64::min);
        let is_over = look.is_some_and(|look| look.state.is_over());
        let checkpoints = run.events().iter().rev().find(|event| event.kind == "checkpoint");
        let saved = look.and_then(|look| look.saved).or(checkpoints.map(|event| event.step));
        // Live ranks report the current step, which is not done yet.
        let ended = look.filter(|_| is_over).and_then(|look| look.step);
        let step = metrics.last_step().max(saved).max(ended);
        let steps = look.and_then(|look| look.steps).or(run.steps());
        Progress {
            step,
            steps,
            saved,
            loss: last("loss"),
            val_loss: last("val_loss"),
            best_val_loss: metrics.get("val_loss").map(best),
            tokens: last("tokens"),
            tokens_per_s: last("tokens_per_s"),
            mfu: last("mfu"),
            tflops: last("tflops"),
            peak_bytes: last("peak_bytes"),
            step_s: recent_mean(metrics, "step_s"),
            eta_s: if is_over { None } else { remaining(metrics, step, steps) },
        }
    }
}

/// Summarises all runs at the time `now`, in seconds since 1970. `failures` lists failed parts of the server.
pub(super) fn runs(watched: &Watched, now: f64, failures: Vec<String>, orders: bool) -> impl Serialize {
    let runs = watched.runs().iter().map(|run| summary(run)).collect();
    All { now, runs, orders, problems: [failures, watched.problems()].concat() }
}

pub(super) fn summary(watched: &WatchedRun) -> Summary {
    let run = watched.read();
    let metrics = run.metrics();
    let time = metrics.get("time").map(|time| time.values()).unwrap_or_default();
    let (look, unknown) = {
        let seen = watched.seen();
        (seen.look.clone(), seen.problem.clone())
    };
    let state = look.as_ref().map(|look| look.state);
    let text = match (&look, unknown) {
        (Some(look), _) => look.text.clone(),
        (None, Some(problem)) => format!("its state is unknown: {problem}"),
        (None, None) => "its processes are being asked".to_owned(),
    };
    Summary {
        id: watched.id.clone(),
        folder: run.folder().display().to_string(),
        state,
        is_bad: state.is_some_and(State::is_bad),
        is_over: state.is_some_and(State::is_over),
        text,
        culprits: look.as_ref().map(|look| look.culprits.clone()).unwrap_or_default(),
        ranks: look.as_ref().map_or(0, |look| look.ranks.len()),
        progress: Progress::new(&run, look.as_deref()),
        began: time.first().copied(),
        changed: time.last().copied(),
        spent: ACTIVITIES
            .iter()
            .filter_map(|(name, key)| Some((*name, recent_mean(metrics, key)?)))
            .collect(),
        samples: run.samples().len(),
        events: run.events().len(),
        problems: run.problems(),
    }
}

pub(super) fn recent_mean(metrics: &Metrics, key: &str) -> Option<f64> {
    let values = metrics.get(key)?.values();
    let recent = values[values.len().saturating_sub(RECENT)..].iter().filter(|value| value.is_finite());
    let (sum, count) = recent.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

fn remaining(metrics: &Metrics, step: Option<u64>, steps: Option<u64>) -> Option<f64> {
    let todo = steps?.saturating_sub(step?) as f64;
    let by_clock = metrics.get("time").and_then(|time| time.growth(RECENT)).filter(|pace| *pace > 0.0);
    Some(todo * by_clock.or_else(|| recent_mean(metrics, "step_s"))?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn progress_reads_files() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.toml"), "[train]\nsteps = 100\n").unwrap();
        let line = |step: u64| {
            let (loss, time) = (5.0 - step as f64 * 0.1, 1000.0 + step as f64 * 0.5);
            format!("{{\"step\":{step},\"loss\":{loss},\"step_s\":0.25,\"time\":{time}}}\n")
        };
        let lines: String = (1..=30).map(line).collect();
        fs::write(folder.path().join("metrics.jsonl"), format!("{lines}{{\"step\":30,\"val_loss\":2.5}}\n"))
            .unwrap();
        let progress = Progress::new(&Run::open(folder.path()).unwrap(), None);
        assert_eq!((progress.step, progress.steps), (Some(30), Some(100)));
        assert_eq!((progress.loss, progress.val_loss), (Some(2.0), Some(2.5)));
        assert_eq!((progress.best_val_loss, progress.step_s), (Some(2.5), Some(0.25)));
        assert_eq!(progress.eta_s, Some(35.0));
    }
}
