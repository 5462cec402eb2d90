//! The last step of every rank: `/api/timeline`.
//!
//! Names are sent once, and times as whole microseconds since the step began on the first rank: a step of 64 ranks has
//! some ten thousand spans.

use std::collections::HashMap;

use kiln_collectives::{Record, Span, StepTimeline};
use serde::Serialize;

use super::super::watched::WatchedRun;

#[derive(Default, Serialize)]
struct Answer {
    run: String,
    /// Why there is no timeline.
    problem: Option<String>,
    step: Option<u64>,
    /// Microseconds from the first beginning to the last end.
    length: u64,
    names: Vec<String>,
    ranks: Vec<Rank>,
}

#[derive(Serialize)]
struct Rank {
    rank: usize,
    node: String,
    step: u64,
    start: u64,
    end: u64,
    /// Activity and module (indices of names; -1 for none), start, end, bytes held at the end, and what it waited for
    /// (an index of names; -1 if it did not wait).
    spans: Vec<(usize, isize, u64, u64, u64, isize)>,
    /// Operation, module and phase (indices of names), start, end, bytes that were sent.
    calls: Vec<(usize, usize, usize, u64, u64, u64)>,
}

/// Names by their index.
#[derive(Default)]
struct Names {
    all: Vec<String>,
    places: HashMap<String, usize>,
}

impl Names {
    fn index(&mut self, name: &str) -> usize {
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        self.all.push(name.to_owned());
        self.places.insert(name.to_owned(), self.all.len() - 1);
        self.all.len() - 1
    }

    fn index_if(&mut self, name: Option<&str>) -> isize {
        name.map_or(-1, |name| self.index(name).try_into().unwrap_or(-1))
    }
}

/// The last whole step of every rank of a run, as it was told last.
pub(in super::super) fn timeline(watched: &WatchedRun) -> impl Serialize {
    let timelines = watched.seen().timelines.clone();
    let run = watched.id.clone();
    match timelines.as_deref() {
        None => Answer { run, problem: Some("no rank has been asked yet".to_owned()), ..Answer::default() },
        Some(Err(problem)) => Answer { run, problem: Some(problem.clone()), ..Answer::default() },
        Some(Ok(timelines)) if timelines.is_empty() => {
            let problem =
                "no rank that can be reached from here has ended a step since it was started".to_owned();
            Answer { run, problem: Some(problem), ..Answer::default() }
        }
        Some(Ok(timelines)) => answer(run, timelines),
    }
}

fn answer(run: String, timelines: &[StepTimeline]) -> Answer {
    let mut names = Names::default();
    // Clocks of machines have nothing in common: on each, the first rank begins at 0.
    let mut zeros: HashMap<&str, f64> = HashMap::new();
    for timeline in timelines {
        let begin = timeline.created + timeline.start;
        let zero = zeros.entry(&timeline.node).or_insert(begin);
        *zero = zero.min(begin);
    }
    let mut ranks: Vec<Rank> = Vec::with_capacity(timelines.len());
    for timeline in timelines {
        let shift = timeline.created - zeros.get(timeline.node.as_str()).copied().unwrap_or_default();
        ranks.push(rank(timeline, shift, &mut names));
    }
    ranks.sort_by_key(|rank| rank.rank);
    Answer {
        run,
        problem: None,
        step: ranks.iter().map(|rank| rank.step).max(),
        length: ranks.iter().map(|rank| rank.end).max().unwrap_or_default(),
        names: names.all,
        ranks,
    }
}

fn rank(timeline: &StepTimeline, shift: f64, names: &mut Names) -> Rank {
    let at = |time: f64| ((time + shift) * 1e6).max(0.0).round() as u64;
    let records = timeline.records.iter();
    let records: HashMap<_, _> = records.map(|call| ((&*call.group, call.sequence), call)).collect();
    let mut spans = Vec::with_capacity(timeline.spans.len());
    for span in &timeline.spans {
        let waits_for = awaited(span, &records);
        spans.push((
            names.index(&span.activity),
            names.index_if(span.unit.as_deref()),
            at(span.start),
            at(span.end),
            span.bytes,
            names.index_if(waits_for.as_deref()),
        ));
    }
    let mut calls = Vec::with_capacity(timeline.records.len());
    for record in &timeline.records {
        let Some(begin) = record.started.or(record.enqueued) else { continue };
        let end = record.finished.map_or(timeline.end, |end| end.as_secs_f64());
        calls.push((
            names.index(&record.operation.to_string()),
            names.index(&record.label.scope),
            names.index(&record.label.phase.to_string()),
            at(begin.as_secs_f64()),
            at(end),
            record.bytes_sent,
        ));
    }
    let (start, end) = (at(timeline.start), at(timeline.end));
    Rank { rank: timeline.rank, node: timeline.node.clone(), step: timeline.step, start, end, spans, calls }
}

/// The collective that a span waited for, in words.
fn awaited(span: &Span, records: &HashMap<(&str, u64), &Record>) -> Option<String> {
    let (group, sequence) = span.waits_for.as_ref()?;
    Some(match records.get(&(group.as_str(), *sequence)) {
        Some(call) => format!("{} {}", call.operation, call.label.scope),
        None => format!("call {sequence} of group {group}"),
    })
}
