//! What a run reports: `metrics.jsonl` for programs, lines or a progress bar for people.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use crate::lines::Lines;

pub use crate::process::output::say;

/// One logged training step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Optimizer step, from 1.
    pub step: u64,
    /// Sum of the losses of all tokens of all ranks over their number, in nats.
    pub loss: f64,
    /// 2-norm of the gradient before clipping; the value that clipping used.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Tokens of the step over its time.
    pub tokens_per_s: f64,
    /// Tokens trained on since the start of the run.
    pub tokens: u64,
    /// Model FLOP/s over the device's peak.
    pub mfu: f64,
    /// The most bytes any rank has held since the start, of the memory that it computes with: see
    /// [`Engine::peak_bytes`](kiln_shard::Engine::peak_bytes).
    pub peak_bytes: u64,
    /// Seconds the step took.
    pub step_s: f64,
}

/// One step whose update was left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SkipMetrics {
    /// Optimizer step, from 1.
    pub step: u64,
    /// Steps without an update since the start of the run, this one included.
    pub skipped: u64,
    /// The first parameter whose gradient is not a number; `None` if only the loss is none.
    pub parameter: Option<String>,
}

/// One evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Optimizer step after which it was made.
    pub step: u64,
    /// Mean loss over the validation tokens, in nats.
    pub val_loss: f64,
    /// Validation tokens it was made over.
    pub val_tokens: u64,
}

/// Writes what rank 0 has to say. The other ranks have none.
pub struct Reporter {
    file: Lines,
    bar: Option<ProgressBar>,
    steps: u64,
}

impl Reporter {
    /// Appends to `path`; shows a bar of `steps` steps on a terminal and plain lines elsewhere.
    /// Lines of steps after `done` come from a run that went further than its last checkpoint; they
    /// will come again and are dropped.
    pub fn new(path: &Path, done: u64, steps: u64) -> io::Result<Self> {
        drop_lines_after(path, done)?;
        let file = Lines::open(path)?;
        // The bar is drawn on standard error.
        let is_watched = io::stdout().is_terminal() && io::stderr().is_terminal();
        let bar = is_watched.then(|| {
            let bar = ProgressBar::new(steps).with_position(done);
            let style = "{bar:24} {pos}/{len} | {msg} | eta {eta}";
            // The template is a constant that parses; the default style would do as well.
            bar.set_style(
                ProgressStyle::with_template(style)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar
        });
        Ok(Reporter { file, bar, steps })
    }

    /// Reports a step: always to the bar, and to file and console when `log` says so.
    pub fn step(&mut self, metrics: &StepMetrics, log: bool) -> io::Result<()> {
        let StepMetrics { step, loss, grad_norm, lr, tokens_per_s, mfu, step_s, .. } = *metrics;
        if let Some(bar) = &self.bar {
            bar.set_position(step);
            bar.set_message(format!("loss {loss:.4} | {tokens_per_s:.0} tok/s"));
        }
        if !log {
            return Ok(());
        }
        if self.bar.is_none() {
            let left = Duration::from_secs_f64(step_s * (self.steps - step) as f64);
            self.line(&format!(
                "step {step:>5}/{} | loss {loss:.4} | grad norm {grad_norm:.3} | lr {lr:.2e} | \
                 {step_s:.3} s | {tokens_per_s:.0} tok/s | mfu {:.1}% | eta {}",
                self.steps,
                mfu * 100.0,
                clock(left)
            ));
        }
        self.record(metrics)
    }

    /// Reports a step without an update, always.
    pub fn skip(&mut self, metrics: &SkipMetrics, why: &str) -> io::Result<()> {
        let SkipMetrics { step, skipped, .. } = metrics;
        self.line(&format!(
            "step {step:>5}/{} | {why}: the update was left out ({skipped} so far)",
            self.steps
        ));
        self.record(metrics)
    }

    /// Reports an evaluation.
    pub fn evaluation(&mut self, metrics: &EvalMetrics) -> io::Result<()> {
        self.line(&format!("step {:>5} | validation loss {:.4}", metrics.step, metrics.val_loss));
        self.record(metrics)
    }

    /// Prints a line for people.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => say(text),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn record(&mut self, metrics: &impl Serialize) -> io::Result<()> {
        self.file.append(serde_json::to_string(metrics)?);
        Ok(())
    }
}

/// Rewrites a file of metrics without the lines of steps after `done`.
fn drop_lines_after(path: &Path, done: u64) -> io::Result<()> {
    #[derive(Deserialize)]
    struct Line {
        step: u64,
    }
    let Ok(text) = fs::read_to_string(path) else { return Ok(()) };
    let keeps = |line: &&str| serde_json::from_str::<Line>(line).is_ok_and(|l| l.step <= done);
    let kept: Vec<_> = text.lines().filter(keeps).collect();
    if kept.len() == text.lines().count() {
        return Ok(());
    }
    let mut text = kept.join("\n");
    if !text.is_empty() {
        text.push('\n');
    }
    write_beside(path, text.as_bytes())
}

/// Replaces a file as a whole: a reader sees the old content or the new, never a part.
pub fn write_beside(path: &Path, content: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("partial");
    let mut file = File::create(&beside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(beside, path)
}

/// Hours, minutes and seconds.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}
