//! What a run has written and what has happened to it: `/api/samples` and `/api/events`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::watched::WatchedRun;
use crate::run::{Event, Sample};

/// Texts and events that are sent at most: the last ones.
const MOST: usize = 500;

/// Characters of a text that are sent at most.
const MOST_CHARACTERS: usize = 8000;

#[derive(Serialize)]
struct Samples {
    run: String,
    total: usize,
    samples: Vec<Sample>,
}

#[derive(Serialize)]
struct Events {
    run: String,
    total: usize,
    /// How many of all events there are of each kind.
    kinds: BTreeMap<String, usize>,
    events: Vec<Event>,
    problems: Vec<String>,
}

/// The last texts of a run, the newest first.
pub(in super::super) fn samples(watched: &WatchedRun) -> impl Serialize {
    let run = watched.read();
    let cut = |sample: &Sample| Sample {
        step: sample.step,
        prompt: shortened(&sample.prompt),
        text: shortened(&sample.text),
    };
    let samples = run.samples().iter().rev().take(MOST).map(cut).collect();
    Samples { run: watched.id.clone(), total: run.samples().len(), samples }
}

/// The last events of a run, the newest first, and what of its folder cannot be read.
pub(in super::super) fn events(watched: &WatchedRun) -> impl Serialize {
    let run = watched.read();
    let cut = |event: &Event| Event { text: shortened(&event.text), ..event.clone() };
    let events = run.events().iter().rev().take(MOST).map(cut).collect();
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    run.events().iter().for_each(|event| *kinds.entry(event.kind.clone()).or_default() += 1);
    Events { run: watched.id.clone(), total: run.events().len(), kinds, events, problems: run.problems() }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MOST_CHARACTERS) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text.to_owned(),
    }
}
