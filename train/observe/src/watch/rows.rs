//! Ranks as the rows of a table.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use kiln_process::words::in_ranges;

use super::subject::Gauges;
use super::text::{bytes, clean};
use crate::status::{Look, RankLook};

/// A rank as a row.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Row {
    pub rank: usize,
    /// Why the rank says nothing, if it does not.
    pub silent: Option<String>,
    pub step: Option<u64>,
    pub doing: String,
    /// Of the collective that it is in, or else of its last one.
    pub unit: String,
    /// The collective that it is in.
    pub collective: Option<String>,
    /// Seconds in the collective, or else in what it is doing.
    pub seconds: f64,
    pub waits_for: Vec<usize>,
    pub memory: Option<u64>,
    pub peak: Option<u64>,
    pub gauges: Gauges,
    pub is_culprit: bool,
}

/// A column of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Column {
    #[default]
    Rank,
    Step,
    Doing,
    Scope,
    Collective,
    Seconds,
    WaitsFor,
    Memory,
    Peak,
    Cpu,
    Gpu,
    Celsius,
}

impl Column {
    pub(super) const ALL: [Column; 12] = [
        Column::Rank,
        Column::Step,
        Column::Doing,
        Column::Scope,
        Column::Collective,
        Column::Seconds,
        Column::WaitsFor,
        Column::Memory,
        Column::Peak,
        Column::Cpu,
        Column::Gpu,
        Column::Celsius,
    ];

    /// What stands above it.
    pub(super) fn title(self) -> &'static str {
        match self {
            Column::Rank => "rank",
            Column::Step => "step",
            Column::Doing => "doing",
            Column::Scope => "unit",
            Column::Collective => "collective",
            Column::Seconds => "for",
            Column::WaitsFor => "awaits",
            Column::Memory => "mem",
            Column::Peak => "peak",
            Column::Cpu => "cpu",
            Column::Gpu => "gpu",
            Column::Celsius => "°C",
        }
    }

    /// The least number of screen columns, and the number with which nothing usual is cut.
    pub(super) fn widths(self) -> (usize, usize) {
        match self {
            Column::Rank => (5, 5),
            Column::Step => (5, 8),
            Column::Doing => (9, 14),
            Column::Scope => (9, 20),
            Column::Collective => (14, 16),
            Column::Seconds => (6, 8),
            Column::WaitsFor => (7, 24),
            Column::Memory | Column::Peak => (5, 7),
            Column::Cpu => (4, 6),
            Column::Gpu => (4, 5),
            Column::Celsius => (3, 4),
        }
    }

    /// Whether it has numbers, whose ends stand below each other.
    pub(super) fn is_number(self) -> bool {
        !matches!(self, Column::Doing | Column::Scope | Column::Collective | Column::WaitsFor)
    }

    /// What stands in it.
    pub(super) fn text(self, row: &Row) -> String {
        let dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let percent = |share: Option<f64>| dash(share.map(|share| format!("{:.0}%", 100.0 * share)));
        match self {
            Column::Rank => row.rank.to_string(),
            Column::Step => match row.step {
                Some(0) => "start".to_owned(),
                step => dash(step.map(|step| step.to_string())),
            },
            Column::Doing => row.doing.clone(),
            Column::Scope => row.unit.clone(),
            Column::Collective => dash(row.collective.clone()),
            Column::Seconds => seconds(row.seconds),
            Column::WaitsFor => match &row.waits_for[..] {
                [] => "-".to_owned(),
                ranks => in_ranges(ranks),
            },
            Column::Memory => dash(row.memory.map(bytes)),
            Column::Peak => dash(row.peak.map(bytes)),
            Column::Cpu => percent(row.gauges.cpu),
            Column::Gpu => percent(row.gauges.gpu),
            Column::Celsius => dash(row.gauges.celsius.map(|celsius| format!("{celsius:.0}"))),
        }
    }

    /// Whether any of the rows has something in it.
    pub(super) fn is_known(self, rows: &[Row]) -> bool {
        match self {
            Column::Gpu => rows.iter().any(|row| row.gauges.gpu.is_some()),
            Column::Celsius => rows.iter().any(|row| row.gauges.celsius.is_some()),
            _ => true,
        }
    }

    /// The order of two rows: of text as in the alphabet, of numbers the largest first, of ranks and steps the
    /// smallest first.
    fn order(self, a: &Row, b: &Row) -> Ordering {
        let largest = |a: Option<f64>, b: Option<f64>| {
            let key = |value: Option<f64>| value.unwrap_or(f64::NEG_INFINITY);
            key(b).total_cmp(&key(a))
        };
        match self {
            Column::Rank => a.rank.cmp(&b.rank),
            Column::Step => a.step.cmp(&b.step),
            Column::Doing => a.doing.cmp(&b.doing),
            Column::Scope => a.unit.cmp(&b.unit),
            Column::Collective => a.collective.cmp(&b.collective),
            Column::Seconds => b.seconds.total_cmp(&a.seconds),
            Column::WaitsFor => b.waits_for.cmp(&a.waits_for),
            Column::Memory => b.memory.cmp(&a.memory),
            Column::Peak => b.peak.cmp(&a.peak),
            Column::Cpu => largest(a.gauges.cpu, b.gauges.cpu),
            Column::Gpu => largest(a.gauges.gpu, b.gauges.gpu),
            Column::Celsius => largest(a.gauges.celsius, b.gauges.celsius),
        }
    }
}

/// Seconds in six columns.
fn seconds(seconds: f64) -> String {
    match seconds {
        _ if seconds < 0.1 => format!("{:.0}ms", 1000.0 * seconds),
        _ if seconds < 1000.0 => format!("{seconds:.1}s"),
        _ => format!("{:.0}min", seconds / 60.0),
    }
}

/// The ranks of a look, in the order of `column`.
pub(super) fn rows(
    look: &Look,
    gauges: &BTreeMap<usize, Gauges>,
    column: Column,
    is_reversed: bool,
) -> Vec<Row> {
    let row = |rank: &RankLook| Row {
        rank: rank.rank,
        silent: rank.silent.as_deref().map(clean),
        step: rank.step,
        doing: rank.activity.as_ref().map_or_else(String::new, |activity| clean(&activity.name)),
        unit: rank.pending.as_ref().or(rank.last.as_ref()).map_or_else(String::new, |call| clean(&call.unit)),
        collective: rank.pending.as_ref().map(|call| call.operation.to_string()),
        seconds: match (&rank.pending, &rank.activity) {
            (Some(call), _) => call.seconds,
            (None, Some(activity)) => activity.seconds,
            (None, None) => 0.0,
        },
        waits_for: rank.waits_for.clone(),
        memory: rank.bytes,
        peak: rank.peak_bytes,
        gauges: gauges.get(&rank.rank).copied().unwrap_or_default(),
        is_culprit: look.culprits.contains(&rank.rank),
    };
    let mut rows: Vec<Row> = look.ranks.iter().map(row).collect();
    rows.sort_by(|a, b| {
        let order = column.order(a, b);
        if is_reversed { order.reverse() } else { order }
    });
    rows
}

/// What ranks are doing, the most common first: such as `61 in all_gather, 2 in data loading, 1 silent`.
pub(super) fn census(rows: &[Row]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for row in rows {
        let what = match (&row.silent, &row.collective) {
            (Some(_), _) => "silent".to_owned(),
            (None, Some(collective)) => format!("in {collective}"),
            (None, None) if row.doing.is_empty() => "idle".to_owned(),
            (None, None) => format!("in {}", row.doing),
        };
        *counts.entry(what).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let words = counts.into_iter().map(|(what, count)| format!("{count} {what}"));
    words.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_and_counted() {
        let row = |rank, seconds, memory, collective: Option<&str>| Row {
            rank,
            seconds,
            memory,
            collective: collective.map(str::to_owned),
            doing: "forward".to_owned(),
            ..Row::default()
        };
        let rows =
            [row(0, 1.0, None, None), row(1, 5.0, Some(7), Some("barrier")), row(2, 0.5, Some(9), None)];
        let by = |column: Column| {
            let mut rows = rows.to_vec();
            rows.sort_by(|a, b| column.order(a, b));
            rows.iter().map(|row| row.rank).collect::<Vec<_>>()
        };
        assert_eq!(
            (by(Column::Rank), by(Column::Seconds), by(Column::Memory)),
            (vec![0, 1, 2], vec![1, 0, 2], vec![2, 1, 0])
        );
        assert_eq!(census(&rows), "2 in forward, 1 in barrier");
        assert_eq!([0.0042, 0.25, 14.2, 7200.0].map(seconds), ["4ms", "0.2s", "14.2s", "120min"]);
        let texts: Vec<_> = Column::ALL.iter().map(|column| column.text(&rows[1])).collect();
        assert_eq!(texts, ["1", "-", "forward", "", "barrier", "5.0s", "-", "7B", "-", "-", "-", "-"]);
    }
}
