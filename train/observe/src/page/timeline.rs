//! The last step that most ranks have reported: `/api/timeline`.
//!
//! A step of 64 ranks has some ten thousand spans, so each name is sent once, and times are whole microseconds.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use kiln_collectives::{Record, Span, StepTimeline};
use kiln_sys::words::number_of;
use serde::Serialize;

use super::watched::WatchedRun;

#[derive(Default, Serialize)]
struct Answer {
    run: String,
    problem: Option<String>,
    step: Option<u64>,
    note: Option<String>,
    /// Microseconds from the first start to the last end.
    length: u64,
    names: Vec<String>,
    ranks: Vec<Rank>,
}

#[derive(Serialize)]
struct Rank {
    rank: usize,
    node: String,
    start: u64,
    end: u64,
    /// Activity, module, start, end, bytes held at the end, and awaited collective. Names are indices, or -1.
    spans: Vec<(usize, isize, u64, u64, u64, isize)>,
    /// Operation, module, phase (indices of names), start, end, bytes sent.
    calls: Vec<(usize, usize, usize, u64, u64, u64)>,
}

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

/// Returns the last complete step that most ranks have reported, without ranks that reported another step.
pub(super) fn timeline(watched: &WatchedRun) -> impl Serialize {
    let (timelines, look) = {
        let seen = watched.seen();
        (seen.timelines.clone(), seen.look.clone())
    };
    let run = watched.id.clone();
    match timelines.as_deref() {
        None => Answer { run, problem: Some("no rank has been asked yet".to_owned()), ..Answer::default() },
        Some(Err(problem)) => Answer { run, problem: Some(problem.clone()), ..Answer::default() },
        Some(Ok(timelines)) if timelines.is_empty() => {
            let problem =
                "no rank that can be reached from here has completed a step since its start".to_owned();
            Answer { run, problem: Some(problem), ..Answer::default() }
        }
        Some(Ok(timelines)) => {
            let mut answer = answer(run, timelines);
            // Replaces the launcher's node name, such as node0, with the machine's name, which other views show.
            for process in look.iter().flat_map(|look| &look.processes) {
                let ranks = answer.ranks.iter_mut().filter(|rank| process.ranks.contains(&rank.rank));
                ranks.for_each(|rank| rank.node.clone_from(&process.host));
            }
            answer
        }
    }
}

fn answer(run: String, timelines: &[StepTimeline]) -> Answer {
    let mut names = Names::default();
    let step = common_step(timelines);
    let (shown, others): (Vec<_>, Vec<_>) = timelines.iter().partition(|one| Some(one.step) == step);
    let note = (!others.is_empty()).then(|| left_out(&others));
    // Clocks of machines are unrelated, so the first rank of each machine starts at 0.
    let mut zeros: HashMap<&str, f64> = HashMap::new();
    for timeline in &shown {
        let begin = timeline.created + timeline.start;
        let zero = zeros.entry(&timeline.node).or_insert(begin);
        *zero = zero.min(begin);
    }
    let mut ranks: Vec<Rank> = Vec::with_capacity(shown.len());
    for timeline in shown {
        let shift = timeline.created - zeros.get(timeline.node.as_str()).copied().unwrap_or_default();
        ranks.push(rank(timeline, shift, &mut names));
    }
    ranks.sort_by_key(|rank| rank.rank);
    Answer {
        run,
        problem: None,
        step,
        note,
        length: ranks.iter().map(|rank| rank.end).max().unwrap_or_default(),
        names: names.all,
        ranks,
    }
}

/// Returns the most common step, or the lowest of several. Ranks are asked one after another, so some are ahead.
fn common_step(timelines: &[StepTimeline]) -> Option<u64> {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    timelines.iter().for_each(|timeline| *counts.entry(timeline.step).or_default() += 1);
    counts.into_iter().max_by_key(|(step, count)| (*count, Reverse(*step))).map(|(step, _)| step)
}

fn left_out(others: &[&StepTimeline]) -> String {
    format!("without {}, which reported another step", number_of(others.len(), "rank"))
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
            names.index_if(span.module.as_deref()),
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
    Rank { rank: timeline.rank, node: timeline.node.clone(), start, end, spans, calls }
}

fn awaited(span: &Span, records: &HashMap<(&str, u64), &Record>) -> Option<String> {
    let (group, sequence) = span.waits_for.as_ref()?;
    Some(match records.get(&(group.as_str(), *sequence)) {
        Some(call) => format!("{} {}", call.operation, call.label.scope),
        None => format!("call {sequence} of group {group}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(rank: usize, step: u64, created: f64) -> StepTimeline {
        let (node, spans, records) = ("a".to_owned(), Vec::new(), Vec::new());
        StepTimeline { rank, node, step, start: 1.0, end: 1.5, created, spans, records }
    }

    #[test]
    fn steps_of_ranks_are_not_mixed() {
        let told = answer(
            "one".to_owned(),
            &[timeline(0, 8, 20.5), timeline(2, 7, 20.25), timeline(1, 7, 20.0), timeline(3, 9, 21.0)],
        );
        let ranks: Vec<_> = told.ranks.iter().map(|rank| (rank.rank, rank.start, rank.end)).collect();
        assert_eq!(ranks, [(1, 0, 500_000), (2, 250_000, 750_000)]);
        assert_eq!((told.step, told.length), (Some(7), 750_000));
        assert_eq!(told.note.unwrap(), "without 2 ranks, which reported another step");
        let tie = answer("one".to_owned(), &[timeline(0, 8, 20.0), timeline(1, 7, 20.0)]);
        assert_eq!((tie.step, tie.ranks.len(), tie.ranks[0].rank), (Some(7), 1, 1));
        assert_eq!(answer("one".to_owned(), &[timeline(0, 7, 20.0)]).note, None);
    }
}
