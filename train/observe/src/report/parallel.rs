//! Runs that differ in how their state is spread: speed, memory, and whether their losses are the same.

use kiln_process::words::number_of;

use super::config;
use super::document::{Block, Cell, Figure, Plot, Table};
use super::numbers::mebibytes;
use super::statistics::{count, significant};
use super::subject::Subject;
use super::time;
use crate::plot::{Bar, Bars};
use crate::run::Run;

/// Keys that say how the work is spread and not what is computed.
const SPREAD: [&str; 6] = ["shard.", "train.ranks", "train.micro_batch", "comm.", "device.", "checkpoint."];
/// Keys without which losses are the same all the same.
const REPORTS: [&str; 3] = ["log.", "sample.", "eval."];

/// The comparison, if the runs differ in their strategy or number of ranks.
pub(super) fn blocks(subjects: &[Subject<'_>]) -> Vec<Block> {
    let (different, _) = config::compare(subjects);
    let differs = |key: &str| different.iter().any(|(one, _)| one == key);
    if !differs("shard.strategy") && !differs("train.ranks") && !differs("shard.shard_size") {
        return Vec::new();
    }
    let is_of = |key: &str, names: &[&str]| names.iter().any(|name| key.starts_with(name));
    let others: Vec<_> = different
        .iter()
        .map(|(key, _)| key.as_str())
        .filter(|key| !is_of(key, &SPREAD) && !is_of(key, &REPORTS))
        .collect();
    let first = &subjects[0];
    let mut text = format!(
        "The runs differ in how their state is spread over ranks. Relative speed and losses are compared with {}.",
        first.name
    );
    if !others.is_empty() {
        text += &format!(
            " Some of them also differ in {}, so that their losses need not be the same.",
            others.join(", ")
        );
    }
    let speed = |subject: &Subject<'_>| subject.numbers.tokens_per_s.map(|spread| spread.median);
    let row = |subject: &Subject<'_>| {
        let key = |key: &str| Cell::text(subject.run.config().get(key).cloned());
        let relative = speed(subject).zip(speed(first)).map(|(one, first)| format!("{:.2}", one / first));
        vec![
            Cell::Text(subject.name.clone()),
            key("shard.strategy"),
            Cell::number(subject.facts.ranks.map(|ranks| ranks.to_string())),
            Cell::text(subject.facts.mesh.clone()),
            Cell::number(speed(subject).map(|speed| significant(speed, 4))),
            Cell::number(relative),
            Cell::number(subject.numbers.peak_bytes.map(mebibytes)),
            Cell::number(time::waits_of(subject.run).map(|share| format!("{:.1}", 100.0 * share))),
            Cell::Text(losses(first.run, subject.run)),
        ]
    };
    let head = [
        "Run",
        "Strategy",
        "Ranks",
        "Mesh",
        "Tokens/s",
        "Relative",
        "Peak memory of a rank (MiB)",
        "Waiting (%)",
        "Training loss",
    ];
    let table = Table {
        caption:
            "Strategies and ranks: median throughput of all ranks, the most memory of a rank, the share of a \
                  step in which rank 0 waited for others, and how the logged training losses compare."
                .to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows: subjects.iter().map(row).collect(),
    };
    let bar = |subject: &Subject<'_>| {
        let strategy = subject.run.config().get("shard.strategy").map_or("?", String::as_str);
        let ranks = subject.facts.ranks.map_or_else(String::new, |ranks| format!(" × {ranks}"));
        let speed = speed(subject)?;
        Some(Bar { name: format!("{strategy}{ranks}"), values: vec![speed], text: significant(speed, 4) })
    };
    let bars = Bars {
        title: "Throughput by strategy and ranks".to_owned(),
        description:
            "A bar for each run, in their order: median tokens per second. The values stand at the bars."
                .to_owned(),
        label: "tokens/s".to_owned(),
        parts: Vec::new(),
        bars: subjects.iter().filter_map(bar).collect(),
    };
    let mut blocks = vec![Block::Text(text), Block::Table(table)];
    if !bars.is_empty() {
        let caption =
            "Median throughput of each run, named by its strategy and its number of ranks.".to_owned();
        blocks.push(Block::Figure(Figure { id: "strategies", caption, plot: Plot::Bars(bars) }));
    }
    blocks
}

/// How the losses of two runs compare at the steps that both have logged.
fn losses(first: &Run, other: &Run) -> String {
    let (Some(one), Some(two)) = (first.metrics().get("loss"), other.metrics().get("loss")) else {
        return "not recorded".to_owned();
    };
    if std::ptr::eq(first, other) {
        return "the reference".to_owned();
    }
    let pairs = one.steps().iter().zip(one.values());
    let pairs: Vec<_> = pairs.filter_map(|(step, one)| Some((*step, *one, two.at(*step)?))).collect();
    let Some((last, _, _)) = pairs.last() else { return "no step that both have logged".to_owned() };
    let Some(parted) = pairs.iter().position(|(_, one, two)| one.to_bits() != two.to_bits()) else {
        let steps = count(pairs.len() as u64);
        return format!("the same bits at all {steps} steps that both have logged, to step {}", count(*last));
    };
    let relative = |(_, one, two): &(u64, f64, f64)| (one - two).abs() / one.abs().max(f64::MIN_POSITIVE);
    let most = pairs.iter().map(relative).filter(|one| one.is_finite()).fold(0.0, f64::max);
    let is_gap = |(_, one, two): &&(u64, f64, f64)| !(one.is_finite() && two.is_finite());
    let gaps = pairs.iter().filter(|pair| pair.1.to_bits() != pair.2.to_bits()).filter(is_gap).count();
    let by = match (gaps, most > 0.0) {
        (0, _) => format!("by at most {} relative", significant(most, 2)),
        (_, false) => format!("where one of the two is not finite ({})", number_of(gaps as u64, "step")),
        (_, true) => format!(
            "by at most {} relative where both are finite; one of the two is not at {}",
            significant(most, 2),
            number_of(gaps as u64, "step")
        ),
    };
    format!("differs from step {} on, {by}", count(pairs[parted].0))
}
