//! The numbers of a run over its steps: `/api/series` and `/api/keys`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::reduce::{Reduced, last_until, reduce};
use super::super::watched::WatchedRun;
use crate::run::Series;

/// What of a run's numbers is asked for.
#[derive(Debug)]
pub(in super::super) struct SeriesQuery {
    /// Such as `loss`.
    pub(in super::super) keys: Vec<String>,
    /// What the curves are drawn over: a key such as `tokens` or `time`. Steps without one.
    pub(in super::super) over: Option<String>,
    /// The first and the last step.
    pub(in super::super) steps: (u64, u64),
    /// Points of each curve at most.
    pub(in super::super) points: usize,
    /// Whether the axis of steps is logarithmic.
    pub(in super::super) is_log: bool,
}

#[derive(Serialize)]
struct Answer {
    run: String,
    last_step: Option<u64>,
    series: BTreeMap<String, Curve>,
}

#[derive(Serialize)]
struct Curve {
    #[serde(flatten)]
    reduced: Reduced,
    /// Where each step lies on the axis.
    #[serde(skip_serializing_if = "Option::is_none")]
    over: Option<Vec<Option<f64>>>,
}

/// The curves of a run. Keys that it does not have are left out.
pub(in super::super) fn series(watched: &WatchedRun, query: &SeriesQuery) -> impl Serialize {
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
    Answer { run: watched.id.clone(), last_step: run.metrics().last_step(), series }
}

fn place(over: Option<&Series>, step: u64) -> Option<f64> {
    last_until(over?, step).filter(|place| place.is_finite())
}

#[derive(Serialize)]
struct Keys {
    run: String,
    keys: Vec<String>,
}

/// The names of all numbers of a run.
pub(in super::super) fn keys(watched: &WatchedRun) -> impl Serialize {
    let run = watched.read();
    Keys { run: watched.id.clone(), keys: run.metrics().iter().map(|(key, _)| key.to_owned()).collect() }
}
