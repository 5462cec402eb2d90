//! The page at one moment, as a file: a report.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value, json, to_value};

use super::answers;
use super::document::inlined;
use super::watched::{TimelinesAt, Watched, WatchedRun};
use crate::run::Run;
use crate::status::LookAt;

/// Maximum number of points of a curve.
const POINTS: usize = 800;

/// Runs at one moment.
pub(crate) struct Snapshot {
    watched: Watched,
}

impl Snapshot {
    /// Reads the runs that `paths` name, run folders or folders of run folders, and asks their processes.
    pub(crate) fn new(paths: Vec<PathBuf>, look_at: LookAt, timelines_at: Option<TimelinesAt>) -> Self {
        let watched = Watched::new(paths, look_at, timelines_at);
        watched.read_folders();
        for run in watched.runs() {
            run.want_timelines();
        }
        watched.ask_processes();
        Snapshot { watched }
    }

    /// Returns the page of the runs with all its data, made by the version `program`. The same runs make the
    /// same page.
    ///
    /// # Errors
    ///
    /// If an answer cannot be written as JSON.
    pub(crate) fn page(&self, program: &str) -> serde_json::Result<String> {
        let runs = self.watched.runs();
        // The time of the newest line, because a report has no other "now".
        let now = runs
            .iter()
            .filter_map(|run| Some(run.read().metrics().get("time")?.last()?.1))
            .fold(0.0, f64::max);
        let answers = json!({
            "/api/runs": to_value(answers::runs(&self.watched, now, Vec::new(), false))?,
            "/api/config": to_value(answers::config(&runs))?,
            "/api/comparison": to_value(answers::comparison(&runs))?,
        });
        let of_runs: Result<BTreeMap<_, _>, _> =
            runs.iter().map(|run| Ok((run.id.clone(), of_run(run)?))).collect();
        inlined(&json!({ "program": program, "answers": answers, "runs": of_runs? }))
    }

    /// Calls `with` with every run and its name on the page.
    pub(crate) fn each(&self, mut with: impl FnMut(&str, &Run)) {
        self.watched.runs().iter().for_each(|run| with(&run.id, &run.read()));
    }
}

/// Returns the answers about one run.
fn of_run(run: &Arc<WatchedRun>) -> serde_json::Result<Value> {
    Ok(json!({
        "/api/series": to_value(answers::all_series(run, POINTS))?,
        "/api/keys": to_value(answers::keys(run))?,
        "/api/samples": to_value(answers::samples(run))?,
        "/api/events": to_value(answers::events(run))?,
        "/api/look": to_value(answers::look(run))?,
        "/api/timeline": to_value(answers::timeline(run))?,
    }))
}

/// Returns the page of the measurements of `kiln bench strategies`.
///
/// # Errors
///
/// If `measured` cannot be written as JSON.
pub(crate) fn page_of_strategies(measured: &impl Serialize, program: &str) -> serde_json::Result<String> {
    inlined(&json!({ "program": program, "answers": { "/api/strategies": to_value(measured)? } }))
}
