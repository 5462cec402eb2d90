//! Details of a run: metrics, configuration, samples, events and ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value, json};

use super::reduce::{Reduced, last_until, reduce};
use super::watched::WatchedRun;
use crate::run::{Event, Sample, Series};

#[derive(Debug)]
pub(super) struct SeriesQuery {
    pub(super) keys: Vec<String>,
    /// Key on the horizontal axis, such as `tokens` or `time`; `None` for steps.
    pub(super) over: Option<String>,
    pub(super) steps: (u64, u64),
    pub(super) points: usize,
    pub(super) is_log: bool,
}

#[derive(Serialize)]
struct Curves {
    run: String,
    last_step: Option<u64>,
    series: BTreeMap<String, Curve>,
}

#[derive(Serialize)]
struct Curve {
    #[serde(flatten)]
    reduced: Reduced,
    #[serde(skip_serializing_if = "Option::is_none")]
    over: Option<Vec<Option<f64>>>,
}

/// Answers `/api/series`. Unknown keys are skipped.
pub(super) fn series(watched: &WatchedRun, query: &SeriesQuery) -> impl Serialize {
    let run = watched.read();
    let over = query.over.as_ref().map(|key| run.metrics().get(key));
    let curve = |key: &String| {
        let series = run.metrics().get(key)?;
        let (from, to) = query.steps;
        let reduced = reduce(series, from, to, query.points, query.is_log);
        let over = over.map(|over| reduced.steps.iter().map(|step| place(over, *step)).collect());
        Some((key.clone(), Curve { reduced, over }))
    };
    let series = query.keys.iter().filter_map(curve).collect();
    Curves { run: watched.id.clone(), last_step: run.metrics().last_step(), series }
}

/// All curves of a run. Curves with the same steps share an axis.
#[derive(Default, Serialize)]
struct AllCurves {
    last_step: Option<u64>,
    axes: Vec<Axis>,
    series: BTreeMap<String, OnAxis>,
}

#[derive(Serialize)]
struct Axis {
    steps: Vec<u64>,
    tokens: Vec<Option<f64>>,
    time: Vec<Option<f64>>,
}

#[derive(Serialize)]
struct OnAxis {
    axis: usize,
    last: Option<(u64, Option<f64>)>,
    mean: Vec<Option<f64>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    low: Vec<Option<f64>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    high: Vec<Option<f64>>,
}

/// Returns all curves of a run, with at most `points` points each, for a report.
pub(super) fn all_series(watched: &WatchedRun, points: usize) -> impl Serialize {
    let run = watched.read();
    let metrics = run.metrics();
    let mut all = AllCurves { last_step: metrics.last_step(), ..AllCurves::default() };
    for (key, series) in metrics.iter() {
        let Reduced { last, steps, mean, low, high, .. } = reduce(series, 0, u64::MAX, points, false);
        let axis = all.axes.iter().position(|axis| axis.steps == steps).unwrap_or_else(|| {
            let on = |key| steps.iter().map(|step| place(metrics.get(key), *step)).collect();
            let (tokens, time) = (on("tokens"), on("time"));
            all.axes.push(Axis { steps, tokens, time });
            all.axes.len() - 1
        });
        all.series.insert(key.to_owned(), OnAxis { axis, last, mean, low, high });
    }
    all
}

fn place(over: Option<&Series>, step: u64) -> Option<f64> {
    last_until(over?, step).filter(|place| place.is_finite())
}

/// Answers `/api/keys`: the names of all metrics of a run.
pub(super) fn keys(watched: &WatchedRun) -> Value {
    let keys: Vec<String> = watched.read().metrics().iter().map(|(key, _)| key.to_owned()).collect();
    json!({ "run": watched.id, "keys": keys })
}

/// Answers `/api/config`: every configuration key with its value in each run, or `null`.
pub(super) fn config(watched: &[Arc<WatchedRun>]) -> Value {
    let configs: Vec<_> = watched.iter().map(|run| run.read().config().clone()).collect();
    let keys: BTreeSet<&String> = configs.iter().flat_map(|config| config.keys()).collect();
    let row = |key: &String| {
        let values: Vec<_> = configs.iter().map(|config| config.get(key)).collect();
        let differs = values.windows(2).any(|pair| pair[0] != pair[1]);
        json!({ "key": key, "values": values, "differs": differs })
    };
    let keys: Vec<_> = keys.into_iter().map(row).collect();
    json!({ "runs": watched.iter().map(|run| &run.id).collect::<Vec<_>>(), "keys": keys })
}

/// Maximum number of samples and events sent, newest first.
const MOST: usize = 500;

const MOST_CHARACTERS: usize = 8000;

/// Answers `/api/samples`.
pub(super) fn samples(watched: &WatchedRun) -> Value {
    let run = watched.read();
    let cut = |sample: &Sample| Sample {
        step: sample.step,
        prompt: shortened(&sample.prompt),
        text: shortened(&sample.text),
    };
    let samples: Vec<_> = run.samples().iter().rev().take(MOST).map(cut).collect();
    json!({ "run": watched.id, "total": run.samples().len(), "samples": samples })
}

/// Answers `/api/events`: the last events, counts by kind, and unreadable files.
pub(super) fn events(watched: &WatchedRun) -> Value {
    let run = watched.read();
    let cut = |event: &Event| Event { text: shortened(&event.text), ..event.clone() };
    let events: Vec<_> = run.events().iter().rev().take(MOST).map(cut).collect();
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    run.events().iter().for_each(|event| *kinds.entry(&event.kind).or_default() += 1);
    let (total, problems) = (run.events().len(), run.problems());
    json!({ "run": watched.id, "total": total, "kinds": kinds, "events": events, "problems": problems })
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MOST_CHARACTERS) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text.to_owned(),
    }
}

/// Answers `/api/look`: the last known state of a run, or the reason why it is unknown.
pub(super) fn look(watched: &WatchedRun) -> Value {
    let seen = watched.seen();
    json!({ "run": watched.id, "look": seen.look.as_deref(), "problem": seen.problem })
}
