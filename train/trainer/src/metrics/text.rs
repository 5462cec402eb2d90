//! A step in one line: in logs, and at the bottom of a terminal.

use std::time::Duration;

use crate::process::output::gauge;
use kiln_sys::words::{flops_per_s, size};

#[derive(Clone, Debug)]
pub(super) struct StepLine {
    pub(super) step: u64,
    pub(super) steps: u64,
    pub(super) loss: f64,
    pub(super) trend: char,
    pub(super) grad_norm: f64,
    pub(super) tokens_per_s: f64,
    /// Share of the device's peak FLOP/s; if it is unknown, a terminal shows FLOP/s.
    pub(super) mfu: Option<f64>,
    pub(super) flops: f64,
    pub(super) peak_bytes: u64,
    /// Share of the step spent waiting for other ranks; `None` for a single rank.
    pub(super) wait: Option<f64>,
    pub(super) left: Duration,
}

/// Columns of the gauge on a wide terminal, and the minimum for a useful gauge.
const GAUGE: usize = 24;
const NARROW_GAUGE: usize = 8;

/// The gauge's width in columns is a multiple of this number.
const STEP: usize = 4;

const BETWEEN: &str = " | ";

impl StepLine {
    pub(super) fn head(step: u64, steps: u64) -> String {
        let width = steps.to_string().len().max(5);
        format!("step {step:>width$}/{steps}")
    }

    /// Returns the line in a log: at most 100 columns, aligned from step to step.
    pub(super) fn in_log(&self) -> String {
        let mut parts = vec![
            format!("loss {:>7.4}", self.loss),
            format!("norm {:>5.2}", self.grad_norm),
            format!("{:>4} tok/s", short(self.tokens_per_s)),
        ];
        parts.extend(self.mfu.map(|mfu| match mfu * 100.0 {
            percent if percent < 9.5 => format!("mfu {percent:.1}%"),
            percent => format!("mfu {percent:>3.0}%"),
        }));
        parts.extend(self.wait.map(|wait| format!("wait {:>2.0}%", wait * 100.0)));
        parts.extend((self.peak_bytes > 0).then(|| format!("{:>8}", size(self.peak_bytes))));
        parts.push(format!("eta {}", clock(self.left)));
        format!("{}{BETWEEN}{}", Self::head(self.step, self.steps), parts.join("  "))
    }

    /// Returns the line on a terminal of `columns` columns; without room, values that change least are omitted first.
    pub(super) fn on_terminal(&self, activity: Option<&str>, columns: usize) -> String {
        let wait = self.wait.map(|wait| format!("wait {:.0}%", wait * 100.0));
        let speed = match self.mfu {
            Some(mfu) => format!("mfu {:.0}%", mfu * 100.0),
            None => flops_per_s(self.flops),
        };
        let memory = (self.peak_bytes > 0).then(|| size(self.peak_bytes));
        // From left to right; the parts with the highest rank are omitted first.
        let parts = [
            (0, Some(format!("{}/{}", self.step, self.steps))),
            (0, Some(format!("loss {:.4} {}", self.loss, self.trend))),
            (2, Some(format!("{} tok/s", short(self.tokens_per_s)))),
            (3, Some(speed)),
            (4, wait),
            (5, memory),
            (1, Some(format!("eta {}", clock(self.left)))),
            (0, activity.map(str::to_owned)),
        ];
        let parts: Vec<_> = parts.into_iter().filter_map(|(rank, part)| Some((rank, part?))).collect();
        let text = |most: u8| {
            let kept = parts.iter().filter(|(rank, _)| *rank <= most).map(|(_, part)| part.as_str());
            kept.collect::<Vec<_>>().join(BETWEEN)
        };
        fit(columns, self.step, self.steps, (0..=5).rev().map(text))
    }
}

pub(super) fn before_steps(done: u64, steps: u64, activity: &str, columns: usize) -> String {
    fit(columns, done, steps, std::iter::once(format!("{done}/{steps}{BETWEEN}{activity}")))
}

/// Returns a gauge and the first of `texts` that fits after it; if none fits, the last text, truncated.
fn fit(columns: usize, done: u64, of: u64, texts: impl Iterator<Item = String>) -> String {
    let mut last = String::new();
    for text in texts {
        let room = columns.saturating_sub(text.chars().count() + 1);
        if room >= NARROW_GAUGE {
            // The gauge has only a few sizes, so that it does not move with every digit.
            let size = room.min(GAUGE) / STEP * STEP;
            return format!("{} {text}", gauge(done, of, size));
        }
        last = text;
    }
    last.chars().take(columns).collect()
}

fn short(value: f64) -> String {
    match value {
        value if value >= 1e7 => format!("{:.0}M", value / 1e6),
        value if value >= 1e6 => format!("{:.1}M", value / 1e6),
        value if value >= 1e4 => format!("{:.0}k", value / 1e3),
        value if value >= 1e3 => format!("{:.1}k", value / 1e3),
        value => format!("{value:.0}"),
    }
}

pub(super) fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64, steps: u64, wait: Option<f64>) -> StepLine {
        StepLine {
            step,
            steps,
            loss: 3.224_51,
            trend: '\u{2193}',
            grad_norm: 0.837,
            tokens_per_s: 8314.2,
            mfu: Some(0.351),
            flops: 12.34e9,
            peak_bytes: 129_394_278,
            wait,
            left: Duration::from_secs(148),
        }
    }

    #[test]
    fn lines_of_a_log_stand_below_each_other() {
        let early = StepLine {
            loss: 11.7512,
            grad_norm: 12.5,
            tokens_per_s: 161.0,
            mfu: Some(0.007),
            left: Duration::from_secs(40_000),
            ..line(1, 400, Some(0.312))
        };
        let lines = [early.in_log(), line(400, 400, Some(0.04)).in_log(), line(400, 400, None).in_log()];
        let unknown = StepLine { mfu: None, ..line(20, 400, None) }.in_log();
        let longest = StepLine { step: 100_000, steps: 100_000, ..early.clone() }.in_log();
        assert!(longest.chars().count() <= 100, "{longest}");
        insta::assert_snapshot!(format!("{}\n{unknown}", lines.join("\n")));
    }

    #[test]
    fn a_terminal_shows_what_it_has_room_for() {
        let shown = |columns| {
            let line = line(12_340, 100_000, Some(0.04)).on_terminal(None, columns);
            assert!(line.chars().count() <= columns, "{columns}: {line}");
            line
        };
        let mut all: Vec<_> = [200, 120, 100, 80, 60, 40, 12].into_iter().map(shown).collect();
        all.push(line(20, 400, None).on_terminal(Some("evaluating 3/12"), 100));
        all.push(before_steps(0, 400, "the first step", 80));
        insta::assert_snapshot!(all.join("\n"));
    }
}
