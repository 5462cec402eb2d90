//! The best way to run a configuration on a growing number of ranks, with the same sequences per rank.

use std::fmt::Write as _;
use std::path::Path;

use kiln_observe::plot::{Axis, Curve, Curves, Scale, under_each_other};
use serde::Serialize;

use crate::error::Result;
use kiln_plan::{PlanRow, Planned, Target, recommend};
use kiln_train::named;

const MOST: usize = 4096;

/// A range of numbers of ranks: the first, then twice as many each time, up to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    first: usize,
    last: usize,
}

impl Range {
    pub(super) fn first(self) -> usize {
        self.first
    }
}

pub(super) fn parse(text: &str) -> std::result::Result<Range, String> {
    let wrong = || format!("write it as in ranks=8..{MOST}");
    let (first, last) =
        text.strip_prefix("ranks=").and_then(|range| range.split_once("..")).ok_or_else(wrong)?;
    let (first, last) = (first.parse().map_err(|_| wrong())?, last.parse().map_err(|_| wrong())?);
    if first == 0 || last < first || last > MOST {
        return Err(wrong());
    }
    Ok(Range { first, last })
}

#[derive(Debug, Serialize)]
struct Point {
    ranks: usize,
    nodes: usize,
    tokens_per_step: usize,
    best: Option<PlanRow>,
}

/// Returns the sweep as text or JSON, on machines of `per_node` ranks each; draws it to the file `svg`, if given.
pub(super) fn run(
    planned: &Planned<'_>,
    range: Range,
    per_node: usize,
    svg: Option<&Path>,
    json: bool,
) -> Result<String> {
    let base = planned.target;
    let sequences = (planned.config.train.global_batch / base.ranks).max(1);
    let counts = std::iter::successors(Some(range.first), |ranks| Some(ranks * 2));
    let mut points = Vec::new();
    for ranks in counts.take_while(|ranks| *ranks <= range.last) {
        let mut config = planned.config.clone();
        (config.train.ranks, config.train.global_batch) = (ranks, sequences * ranks);
        let one_machine = base.on_host() && base.nodes == 1;
        let nodes = if one_machine { 1 } else { ranks.div_ceil(per_node.max(1)) };
        let target = Target { ranks, nodes, ..base.clone() };
        let tokens_per_step = config.train.global_batch * config.data.seq_len;
        let rows = Planned { config: &config, target: &target, ..*planned }.rows();
        let best = recommend(&rows, "", &target).map(|found| rows[found.row].clone());
        points.push(Point { ranks, nodes, tokens_per_step, best });
    }
    if let Some(path) = svg {
        named::write(path, drawing(&points).as_bytes(), "drawing", |start| start.starts_with(b"<svg"))?;
    }
    Ok(if json {
        serde_json::to_string_pretty(&points).unwrap_or_default()
    } else {
        to_text(&points, sequences)
    })
}

fn to_text(points: &[Point], sequences: usize) -> String {
    let mut text = format!(
        "{sequences} sequences per rank and step; the setup that `kiln plan` recommends for each number of ranks\n\n\
         {:>6} {:>6} {:<21} {:<9} {:<7} {:>6} {:>9} {:>9} {:>9} {:>7} {:>12}\n",
        "ranks",
        "nodes",
        "strategy",
        "recompute",
        "offload",
        "micro",
        "peak GiB",
        "sent GiB",
        "s/step",
        "MFU",
        "tokens/s"
    );
    for Point { ranks, nodes, best, .. } in points {
        let _ = match best {
            None => writeln!(text, "{ranks:>6} {nodes:>6} nothing fits"),
            Some(row) => {
                let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
                let dash = || "-".to_owned();
                writeln!(
                    text,
                    "{ranks:>6} {nodes:>6} {:<21} {:<9} {:<7} {:>6} {:>9.2} {:>9.3} {:>9} {:>7} {:>12}",
                    row.strategy.to_string(),
                    row.recompute.to_string(),
                    if row.offload { "host" } else { "-" },
                    row.micro_batch,
                    gib(row.peak_bytes),
                    gib(row.sent_bytes),
                    row.step_s.map_or_else(dash, |seconds| format!("{seconds:.3}")),
                    row.mfu.map_or_else(dash, |mfu| format!("{:.1}%", 100.0 * mfu)),
                    row.tokens_per_s.map_or_else(dash, |tokens| format!("{tokens:.0}")),
                )
            }
        };
    }
    text
}

/// Returns an SVG drawing of the plots, one below the other, over a common axis.
fn drawing(points: &[Point]) -> String {
    let plot = |title: &str, unit: &str, value: &dyn Fn(&PlanRow) -> Option<f64>| {
        let values =
            points.iter().filter_map(|point| Some((point.ranks as f64, value(point.best.as_ref()?)?)));
        Curves {
            title: title.to_owned(),
            x: Axis { label: "ranks".to_owned(), scale: Scale::PowersOfTwo, has_zero: false },
            y: Axis::from_zero(unit),
            curves: vec![Curve { points: values.collect(), has_marks: true, ..Curve::default() }],
            ..Curves::default()
        }
    };
    let plots = [
        plot("seconds per step", "s", &|row| row.step_s),
        plot("MFU", "%", &|row| row.mfu.map(|mfu| 100.0 * mfu)),
        plot("peak memory of a rank", "GiB", &|row| Some(row.peak_bytes as f64 / f64::from(1 << 30))),
    ];
    let drawn: Vec<_> =
        plots.iter().filter(|plot| !plot.is_empty()).map(|plot| plot.draw(640.0, 240.0)).collect();
    let (title, description) = ("kiln plan --sweep", "The best setup for a growing number of ranks.");
    under_each_other(title, description, &drawn).file("sweep")
}
