//! The report of what `kiln bench strategies` has measured.

use serde::Serialize;

use super::document::{Block, Cell, Document, Figure, Plot, Table};
use super::numbers::mebibytes;
use super::statistics::{count, significant};
use super::text::quoted;
use crate::plot::{Bar, Bars};

/// What was measured, and how.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Strategies {
    /// Parameters of the model.
    pub parameters: u64,
    /// Ranks.
    pub ranks: u64,
    /// Sequences of a step.
    pub global_batch: u64,
    /// Tokens of a sequence.
    pub seq_len: u64,
    /// Seed of weights.
    pub seed: u64,
    /// Steps measured per strategy and round; one more warms up.
    pub steps: u64,
    /// Rounds, in which strategies alternate.
    pub rounds: u64,
    /// Version, commit and features of the program.
    pub program: String,
    /// What was computed on.
    pub device: String,
    /// Further facts: a name and a value each.
    pub facts: Vec<(String, String)>,
    /// The words of the command.
    pub command: Vec<String>,
    /// The strategies.
    pub rows: Vec<StrategyRow>,
}

/// Figures of one way to train; counts and bytes are of a rank and step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StrategyRow {
    /// Its name.
    pub strategy: String,
    /// Arrangement of the ranks.
    pub mesh: String,
    /// Tokens per second of all ranks, median over rounds.
    pub tokens_per_s: f64,
    /// The slowest and the fastest round.
    #[serde(skip)]
    pub tokens_per_s_range: (f64, f64),
    /// `tokens_per_s` over that of the first strategy, median of the ratios within rounds.
    pub relative_speed: f64,
    /// The most bytes a rank held.
    pub peak_bytes: u64,
    /// Bytes a rank sent.
    pub sent_bytes: u64,
    /// Gathers of weights.
    pub gathers: u64,
    /// Reductions of gradients.
    pub reductions: u64,
    /// Share of a step that a rank waited for communication, median over rounds.
    pub wait_share: f64,
}

/// What a report of `measured` says.
pub fn of_strategies(measured: &Strategies) -> Document {
    let Strategies { parameters, ranks, global_batch, seq_len, steps, rounds, .. } = measured;
    let first = measured.rows.first().map_or("the first", |row| row.strategy.as_str());
    let introduction = format!(
        "Every sharding strategy of Kiln on the same work: a decoder of {} million parameters, {ranks} ranks, {} \
         sequences of {} tokens per optimizer step. Bytes and counts are of one rank and one step.",
        significant(*parameters as f64 / 1e6, 4),
        count(*global_batch),
        count(*seq_len)
    );
    let mut blocks = vec![
        Block::Text(introduction),
        Block::Section("Results".to_owned()),
        Block::Table(results(measured, first)),
    ];
    let mut section = |title: &str, figures: Vec<Figure>| {
        blocks.push(Block::Section(title.to_owned()));
        blocks.extend(figures.into_iter().map(Block::Figure));
    };
    section("Throughput and memory", vec![throughput(measured), memory(measured)]);
    section("Communication", vec![sent(measured), waits(measured)]);
    blocks.push(Block::Section("Environment".to_owned()));
    blocks.push(Block::Table(environment(measured)));
    blocks.push(Block::Section("Method, and how to repeat it".to_owned()));
    blocks.push(Block::List(vec![
        format!(
            "In each of {rounds} rounds, every strategy trains {} and {steps} more that are measured; the \
             strategies take turns, so that a machine that speeds up or slows down does so for all of them.",
            "one step that is not measured, as a warm-up,"
        ),
        "Tokens are made up, and no data is read. A step is forward, backward, reduction, clipping and update."
            .to_owned(),
        format!(
            "Throughput and waiting are medians over rounds. Relative speed is the throughput over that of {first} \
             in the same round, the median of the rounds; it may differ from the ratio of the medians."
        ),
        "Peak memory is the most that any rank held at once. Bytes sent, gathers and reductions are counted by the \
         recorder of collectives of rank 0. Waiting is the share of the measured time in which rank 0 could do \
         nothing but wait for communication: what computation does not hide."
            .to_owned(),
    ]));
    let command: Vec<_> = measured.command.iter().map(|word| quoted(word)).collect();
    blocks.push(Block::Text("The command:".to_owned()));
    blocks.push(Block::Lines(command.join(" ")));
    Document { title: "Sharding strategies".to_owned(), blocks }
}

fn results(measured: &Strategies, first: &str) -> Table {
    let row = |row: &StrategyRow| {
        let (slowest, fastest) = row.tokens_per_s_range;
        let speed = |value: f64| significant(value, 4);
        vec![
            Cell::Text(row.strategy.clone()),
            Cell::Text(row.mesh.clone()),
            Cell::Number(format!("{} [{}, {}]", speed(row.tokens_per_s), speed(slowest), speed(fastest))),
            Cell::Number(format!("{:.2}", row.relative_speed)),
            Cell::Number(mebibytes(row.peak_bytes as f64)),
            Cell::Number(mebibytes(row.sent_bytes as f64)),
            Cell::Number(count(row.gathers)),
            Cell::Number(count(row.reductions)),
            Cell::Number(format!("{:.1}", 100.0 * row.wait_share)),
        ]
    };
    let head = [
        "Strategy",
        "Mesh",
        "Tokens/s",
        "Relative",
        "Peak memory (MiB)",
        "Sent (MiB)",
        "Gathers",
        "Reductions",
        "Waiting (%)",
    ];
    Table {
        caption: format!(
            "Strategies: median throughput of all ranks with the slowest and the fastest round, speed relative to \
             {first}, and of a rank: the most memory, and per step the bytes sent, the collectives, and the share \
             of time that it waited."
        ),
        head: head.map(str::to_owned).to_vec(),
        rows: measured.rows.iter().map(row).collect(),
    }
}

fn throughput(measured: &Strategies) -> Figure {
    bars(measured, "throughput", "Throughput", "tokens/s, all ranks", |row| {
        (row.tokens_per_s, format!("{} ({:.2}×)", significant(row.tokens_per_s, 4), row.relative_speed))
    })
}

fn memory(measured: &Strategies) -> Figure {
    bars(measured, "peak-memory", "Peak memory of a rank", "MiB", |row| {
        (row.peak_bytes as f64 / f64::from(1 << 20), mebibytes(row.peak_bytes as f64))
    })
}

fn sent(measured: &Strategies) -> Figure {
    bars(measured, "sent-bytes", "Bytes that a rank sends in a step", "MiB", |row| {
        (row.sent_bytes as f64 / f64::from(1 << 20), mebibytes(row.sent_bytes as f64))
    })
}

fn waits(measured: &Strategies) -> Figure {
    bars(measured, "exposed", "Communication that is not hidden", "% of a step", |row| {
        (100.0 * row.wait_share, format!("{:.1} %", 100.0 * row.wait_share))
    })
}

fn bars(
    measured: &Strategies,
    id: &'static str,
    title: &str,
    label: &str,
    value: impl Fn(&StrategyRow) -> (f64, String),
) -> Figure {
    let bar = |row: &StrategyRow| {
        let (value, text) = value(row);
        Bar { name: row.strategy.clone(), values: vec![value], text }
    };
    let plot = Plot::Bars(Bars {
        title: title.to_owned(),
        description: format!("{title} ({label}), a bar for each strategy, with its value at its end."),
        label: label.to_owned(),
        parts: Vec::new(),
        bars: measured.rows.iter().map(bar).collect(),
    });
    Figure { id, caption: format!("{title}, by strategy. The values are in table 1."), plot }
}

fn environment(measured: &Strategies) -> Table {
    let mut facts = vec![
        ("Program".to_owned(), measured.program.clone()),
        ("Device".to_owned(), measured.device.clone()),
        ("Seed".to_owned(), measured.seed.to_string()),
    ];
    facts.extend(measured.facts.clone());
    Table {
        caption: "What was measured with.".to_owned(),
        head: vec![String::new(), "Value".to_owned()],
        rows: facts.into_iter().map(|(name, value)| vec![Cell::Text(name), Cell::Text(value)]).collect(),
    }
}
