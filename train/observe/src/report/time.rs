//! Where the time of steps went.

use super::document::{Block, Cell, Figure, Plot, Table};
use super::numbers::steady;
use super::statistics::significant;
use super::subject::Subject;
use crate::plot::{Bar, Bars};
use crate::run::{Run, Series};

/// What a rank does in a step: the key of its seconds, and its name.
const ACTIVITIES: [(&str, &str); 6] = [
    ("forward_s", "forward"),
    ("backward_s", "backward"),
    ("optimizer_s", "optimizer"),
    ("wait_s", "waiting"),
    ("data_s", "data"),
    ("other_s", "other"),
];

/// A plot and a table of the runs that have recorded their time. Nothing if none has.
pub(super) fn blocks(subjects: &[Subject<'_>]) -> Vec<Block> {
    let timed: Vec<_> = subjects
        .iter()
        .filter_map(|subject| Some((subject.name.clone(), seconds_of(subject.run)?)))
        .collect();
    if timed.is_empty() {
        return Vec::new();
    }
    let milliseconds = |seconds: f64| significant(1e3 * seconds, 3);
    let bar = |(name, seconds): &(String, Vec<f64>)| Bar {
        name: name.clone(),
        values: seconds.iter().map(|one| 1e3 * one).collect(),
        text: milliseconds(seconds.iter().sum()),
    };
    let plot = Plot::Bars(Bars {
        title: "Time of a step on rank 0".to_owned(),
        description:
            "A bar for each run, made of what rank 0 did in a step. The table that follows has the values."
                .to_owned(),
        label: "mean, ms".to_owned(),
        parts: ACTIVITIES.map(|(_, name)| name.to_owned()).to_vec(),
        bars: timed.iter().map(bar).collect(),
    });
    let figure = Figure {
        id: "time",
        caption: "Mean time of a step on rank 0 by what it was doing. Waiting is the time in which it could do \
                  nothing but wait for other ranks: communication that computation does not hide. Time in forward, \
                  backward, and the optimizer is without those waits."
            .to_owned(),
        plot,
    };
    let row = |(name, seconds): &(String, Vec<f64>)| {
        let whole: f64 = seconds.iter().sum();
        let share = |one: &f64| match whole > 0.0 {
            true => format!("{} ({:.1} %)", milliseconds(*one), 100.0 * one / whole),
            false => milliseconds(*one),
        };
        let name = std::iter::once(Cell::Text(name.clone()));
        let parts = seconds.iter().map(|one| Cell::Number(share(one)));
        name.chain(parts).chain([Cell::Number(milliseconds(whole))]).collect()
    };
    let names = ACTIVITIES.iter().map(|(_, name)| (*name).to_owned());
    let table = Table {
        caption: "Mean time of a step on rank 0 in ms, and its share of the step, after the warm-up."
            .to_owned(),
        head: std::iter::once("Run".to_owned()).chain(names).chain(["sum".to_owned()]).collect(),
        rows: timed.iter().map(row).collect(),
    };
    vec![Block::Figure(figure), Block::Table(table)]
}

/// Mean seconds of a step by activity, in the order of [`ACTIVITIES`]: means add up to that of the step. `None`
/// if the run has recorded none.
pub(super) fn seconds_of(run: &Run) -> Option<Vec<f64>> {
    let seconds = ACTIVITIES.map(|(key, _)| run.metrics().get(key).and_then(mean_of));
    seconds.iter().any(Option::is_some).then(|| seconds.iter().map(|mean| mean.unwrap_or(0.0)).collect())
}

/// Share of the time of steps that rank 0 waited for other ranks.
pub(super) fn waits_of(run: &Run) -> Option<f64> {
    let waits = run.metrics().get("wait_s").and_then(mean_of)?;
    let step = run.metrics().get("step_s").and_then(mean_of)?;
    (step > 0.0).then_some(waits / step)
}

fn mean_of(series: &Series) -> Option<f64> {
    let finite: Vec<f64> = steady(series).iter().copied().filter(|value| value.is_finite()).collect();
    (!finite.is_empty()).then(|| finite.iter().sum::<f64>() / finite.len() as f64)
}
