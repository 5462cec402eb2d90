//! The configurations of runs beside each other: `/api/config`.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::Serialize;

use super::super::watched::WatchedRun;

#[derive(Serialize)]
struct Answer {
    runs: Vec<String>,
    keys: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    key: String,
    /// The value of each run; `null` where a run has none.
    values: Vec<Option<String>>,
    differs: bool,
}

/// Every key of the configurations with its value in each of the runs.
pub(in super::super) fn config(watched: &[Arc<WatchedRun>]) -> impl Serialize {
    let configs: Vec<_> = watched.iter().map(|run| run.read().config().clone()).collect();
    let keys: BTreeSet<&String> = configs.iter().flat_map(|config| config.keys()).collect();
    let row = |key: &String| {
        let values: Vec<_> = configs.iter().map(|config| config.get(key).cloned()).collect();
        let differs = values.windows(2).any(|pair| pair[0] != pair[1]);
        Row { key: key.clone(), values, differs }
    };
    let keys = keys.into_iter().map(row).collect();
    Answer { runs: watched.iter().map(|run| run.id.clone()).collect(), keys }
}
