//! Curves of runs: loss, gradient norm, learning rate, throughput; and the memory of their ranks.

use std::collections::BTreeSet;

use super::document::{Block, Cell, Figure, Plot, Table};
use super::numbers::mebibytes;
use super::statistics::{count, significant};
use super::subject::Subject;
use crate::plot::{Axis, Bar, Bars, Curve, Curves, smoothed};
use crate::run::Series;

/// Points of a curve in a plot: more than its pixels can show.
const POINTS: usize = 500;
/// Rows of the table beside a plot.
const ROWS: usize = 8;
/// The average over a noisy curve is over this part of its points.
const SMOOTH: usize = 20;

/// Over how many of so many values the average of a curve goes.
fn window(values: usize) -> f64 {
    (values / SMOOTH).max(1) as f64
}

/// How a series of the metrics is shown.
struct Shown {
    id: &'static str,
    key: &'static str,
    title: &'static str,
    y: Axis,
    /// What the caption says of the values.
    caption: &'static str,
    /// Whether the average is shown over the values.
    is_smoothed: bool,
    digits: usize,
}

/// Training and validation loss.
pub(super) fn loss(subjects: &[Subject<'_>]) -> Vec<Block> {
    let mut blocks = curves(
        subjects,
        &Shown {
            id: "loss",
            key: "loss",
            title: "Training loss",
            y: Axis::linear("nats per token"),
            caption: "Training loss of the global batch: pale as logged, strong its moving average.",
            is_smoothed: true,
            digits: 5,
        },
    );
    blocks.extend(curves(
        subjects,
        &Shown {
            id: "validation-loss",
            key: "val_loss",
            title: "Validation loss",
            y: Axis::linear("nats per token"),
            caption: "Mean loss over the validation tokens.",
            is_smoothed: false,
            digits: 5,
        },
    ));
    blocks.extend(curves(
        subjects,
        &Shown {
            id: "answer-loss",
            key: "answer_loss",
            title: "Loss of answers",
            y: Axis::linear("nats per token"),
            caption: "Mean loss over the tokens of the answers of eval.prompts.",
            is_smoothed: false,
            digits: 5,
        },
    ));
    blocks
}

/// Gradient norm and learning rate.
pub(super) fn optimization(subjects: &[Subject<'_>]) -> Vec<Block> {
    let mut blocks = curves(
        subjects,
        &Shown {
            id: "gradient-norm",
            key: "grad_norm",
            title: "Gradient norm",
            y: Axis::log("2-norm before clipping"),
            caption: "2-norm of the whole gradient before clipping: pale as logged, strong its moving average; \
                      logarithmic axis.",
            is_smoothed: true,
            digits: 4,
        },
    );
    blocks.extend(curves(
        subjects,
        &Shown {
            id: "learning-rate",
            key: "lr",
            title: "Learning rate",
            y: Axis::linear("learning rate"),
            caption: "Learning rate of the schedule.",
            is_smoothed: false,
            digits: 3,
        },
    ));
    blocks
}

/// Throughput over the steps, and the most memory of a rank.
pub(super) fn speed(subjects: &[Subject<'_>]) -> Vec<Block> {
    let mut blocks = curves(
        subjects,
        &Shown {
            id: "throughput",
            key: "tokens_per_s",
            title: "Throughput",
            y: Axis::from_zero("tokens/s"),
            caption: "Tokens per second of all ranks together: pale as logged, strong its moving average.",
            is_smoothed: true,
            digits: 4,
        },
    );
    let bar = |subject: &Subject<'_>| {
        let bytes = subject.numbers.peak_bytes?;
        let name = subject.name.clone();
        Some(Bar { name, values: vec![bytes / f64::from(1 << 20)], text: mebibytes(bytes) })
    };
    let bars = Bars {
        title: "Peak memory of a rank".to_owned(),
        description: "A bar for each run: the most bytes that a rank held. The values stand at the bars."
            .to_owned(),
        label: "MiB".to_owned(),
        parts: Vec::new(),
        bars: subjects.iter().filter_map(bar).collect(),
    };
    if !bars.is_empty() {
        blocks.push(Block::Figure(Figure {
            id: "peak-memory",
            caption: "The most memory that any rank held at once, of the memory that it computes with: weights, \
                      gradients, optimizer state, activations and buffers. The values are in the table of results."
                .to_owned(),
            plot: Plot::Bars(bars),
        }));
    }
    blocks
}

/// A plot of one series of all runs, and a table of some of its values. Nothing if no run has it.
fn curves(subjects: &[Subject<'_>], shown: &Shown) -> Vec<Block> {
    let mut curves = Vec::new();
    let mut table = Vec::new();
    for (index, subject) in subjects.iter().enumerate() {
        let Some(series) = subject.run.metrics().get(shown.key) else { continue };
        let strong = match shown.is_smoothed {
            true => smoothed(series.values(), window(series.values().len())),
            false => series.values().to_vec(),
        };
        let curve = |points, is_faint| Curve {
            name: subject.name.clone(),
            series: index,
            points,
            is_faint,
            has_marks: !shown.is_smoothed && series.values().len() <= 60,
        };
        if shown.is_smoothed {
            let points = series.points(0, u64::MAX, POINTS);
            let points = points.steps.iter().zip(&points.values);
            let points = points.map(|(step, value)| (*step as f64, value.unwrap_or(f64::NAN)));
            curves.push(curve(points.collect(), true));
        }
        curves.push(curve(thinned(series, &strong), false));
        table.push((subject.name.clone(), series.steps(), strong));
    }
    // What is pale lies below all that is strong.
    curves.sort_by_key(|curve| !curve.is_faint);
    let Some(last) = table.iter().filter_map(|(_, steps, _)| steps.last().copied()).max() else {
        return Vec::new();
    };
    let names: Vec<_> = table.iter().map(|(name, _, _)| name.as_str()).collect();
    let plot = Curves {
        title: shown.title.to_owned(),
        description: format!(
            "{} over optimizer steps 1 to {last}, a curve for each of: {}. A table of values follows.",
            shown.title,
            names.join(", ")
        ),
        x: Axis::linear("optimizer step"),
        y: shown.y.clone(),
        curves,
    };
    let mut blocks = Vec::new();
    if !plot.is_empty() {
        let plot = Plot::Curves(plot);
        blocks.push(Block::Figure(Figure { id: shown.id, caption: shown.caption.to_owned(), plot }));
    }
    let unit =
        if shown.y.label == shown.title.to_lowercase() { "" } else { &format!(" ({})", shown.y.label) };
    let what = if shown.is_smoothed { ", moving average" } else { "" };
    blocks.push(Block::Table(Table {
        caption: format!("{}{unit}{what}, at the step or the last logged one before it.", shown.title),
        head: std::iter::once("Step".to_owned()).chain(names.iter().map(|name| (*name).to_owned())).collect(),
        rows: rows(&table, shown.digits),
    }));
    blocks
}

/// About [`POINTS`] of the values, evenly, with the first and the last.
fn thinned(series: &Series, values: &[f64]) -> Vec<(f64, f64)> {
    let stride = values.len().div_ceil(POINTS).max(1);
    let last = values.len().saturating_sub(1);
    let kept = (0..values.len()).filter(|index| index.is_multiple_of(stride) || *index == last);
    kept.map(|index| (series.steps()[index] as f64, values[index])).collect()
}

/// Rows of logged steps that are about evenly apart, down to the last.
fn rows(columns: &[(String, &[u64], Vec<f64>)], digits: usize) -> Vec<Vec<Cell>> {
    let logged: BTreeSet<u64> = columns.iter().flat_map(|(_, steps, _)| steps.iter().copied()).collect();
    let logged: Vec<u64> = logged.into_iter().collect();
    let mut chosen: Vec<u64> =
        (1..=ROWS).map(|row| logged[(logged.len() * row).div_ceil(ROWS) - 1]).collect();
    chosen.dedup();
    let mut before = None;
    let row = |step: u64| {
        let value = |(_, steps, values): &(String, &[u64], Vec<f64>)| {
            let index = steps.partition_point(|one| *one <= step).checked_sub(1)?;
            before.is_none_or(|before| steps[index] > before).then(|| significant(values[index], digits))
        };
        let cells: Vec<_> = columns.iter().map(|column| Cell::number(value(column))).collect();
        before = Some(step);
        std::iter::once(Cell::Number(count(step))).chain(cells).collect()
    };
    chosen.into_iter().map(row).collect()
}
