//! The reports of a run: `metrics.jsonl` for programs, and lines or a progress bar for users.

mod best;
mod text;
mod trend;

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiln_collectives::{ActivityTime, HELD};
use kiln_observe::tensorboard::{Histogram, TensorBoard};
use kiln_shard::ValueHistogram;
use kiln_sys::{LineReader, Lines};
use serde::{Deserialize, Serialize};

use crate::process::output::{Bar, ProgressLine};
use crate::process::{Meter, Repeat};
use crate::values::Values;
use kiln_sys::files;

pub use best::BestLoss;
use text::StepLine;
use trend::{Remaining, Trend};

pub use crate::process::output::print_line;
pub use kiln_sys::durable::is_beside;
pub use kiln_sys::durable::write_atomic;
pub use kiln_sys::durable::write_new_beside;

/// One logged training step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Optimizer step, from 1.
    pub step: u64,
    /// Mean loss over all tokens of all ranks, in nats.
    pub loss: f64,
    /// 2-norm of the gradient before clipping, as used for clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Tokens of the step divided by its duration.
    pub tokens_per_s: f64,
    /// Tokens trained on since the start of the run.
    pub tokens: u64,
    /// Model FLOP/s divided by the device's peak; `None` if the peak is not reliably known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Highest peak memory of any rank in bytes; see [`Engine::peak_bytes`](kiln_shard::Engine::peak_bytes).
    pub peak_bytes: u64,
    /// Duration of the step in seconds.
    pub step_s: f64,
    /// Model TFLOP/s of all ranks together.
    pub tflops: f64,
    /// The time of the step on this rank, by activity.
    #[serde(flatten)]
    pub times: StepTimes,
    /// Values recorded by layers, and metrics that a program adds.
    #[serde(flatten)]
    pub values: Values,
}

/// Seconds of a step on one rank, without waiting except in `wait_s`. On a GPU, times of the host, which queues work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTimes {
    /// Reading and cutting samples.
    pub data_s: f64,
    /// Forward passes.
    pub forward_s: f64,
    /// Backward passes.
    pub backward_s: f64,
    /// Gradient norm, clipping and update.
    pub optimizer_s: f64,
    /// Everything else.
    pub other_s: f64,
    /// Waiting for other ranks: communication that is not hidden by computation.
    pub wait_s: f64,
}

impl StepTimes {
    /// Returns the times between two results of [`Recorder::times`](kiln_collectives::Recorder::times).
    /// `held` is the part of this time for which ranks were held for inspection.
    pub fn between(before: &[ActivityTime], now: &[ActivityTime], held: Duration) -> Self {
        let (mut times, mut here) = (StepTimes::default(), 0.0);
        for ActivityTime { activity, busy, waited } in now {
            let before = before.iter().find(|before| before.activity == *activity);
            let since = |now: Duration, then: fn(&ActivityTime) -> Duration| {
                now.saturating_sub(before.map_or(Duration::ZERO, then)).as_secs_f64()
            };
            if *activity == HELD {
                here = since(*busy, |then| then.busy);
                continue;
            }
            *match *activity {
                "data loading" => &mut times.data_s,
                "forward" => &mut times.forward_s,
                "backward" => &mut times.backward_s,
                "optimizer" => &mut times.optimizer_s,
                _ => &mut times.other_s,
            } += since(*busy, |then| then.busy);
            times.wait_s += since(*waited, |then| then.waited);
        }
        // The rest of the hold was spent waiting for ranks that were held.
        times.wait_s = (times.wait_s - (held.as_secs_f64() - here).max(0.0)).max(0.0);
        times
    }
}

/// A step whose update was skipped.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SkipMetrics {
    /// Optimizer step, from 1.
    pub step: u64,
    /// Number of steps without an update since the start of the run, including this one.
    pub skipped: u64,
    /// The first parameter whose gradient is not finite; `None` if only the loss is not.
    pub parameter: Option<String>,
}

/// One evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Optimizer step after which the evaluation was made.
    pub step: u64,
    /// Mean loss over the validation tokens, in nats.
    pub val_loss: f64,
    /// Number of validation tokens.
    pub val_tokens: u64,
    /// The program's own objective on the validation data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_objective: Option<f64>,
    /// Mean loss over the tokens of all answers of `eval.prompts`, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer_loss: Option<f64>,
}

#[derive(Serialize)]
struct Line<'a, T> {
    #[serde(flatten)]
    metrics: &'a T,
    time: f64,
}

/// Returns the current time in seconds since 1970 (UTC).
pub fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

const FRAME: Duration = Duration::from_millis(200);

/// Writes the reports of rank 0. The other ranks have no reporter.
pub struct Reporter {
    file: Lines,
    bar: Option<Arc<Bar>>,
    ranks: usize,
    done: u64,
    steps: u64,
    begun: Instant,
    trend: Trend,
    remaining: Remaining,
    last: Option<StepLine>,
    best: Option<BestLoss>,
    saving: Arc<Meter>,
    tensorboard: Option<TensorBoard>,
}

/// Shows a long operation until dropped.
pub struct Shown {
    _line: Option<ProgressLine>,
    _repeat: Option<Repeat>,
}

impl Reporter {
    /// Appends to `path`; shows a bar on a terminal, and lines elsewhere. `saving` counts the bytes of a checkpoint.
    pub fn new(path: &Path, done: u64, steps: u64, ranks: usize, saving: Arc<Meter>) -> io::Result<Self> {
        let best = BestLoss::find(path)?;
        let file = Lines::open(path)?;
        let (trend, remaining) = (Trend::default(), Remaining::default());
        let (bar, begun) = (Bar::watched().map(Arc::new), Instant::now());
        let (last, tensorboard) = (None, None);
        let reporter = Reporter {
            file,
            bar,
            ranks,
            done,
            steps,
            begun,
            trend,
            remaining,
            last,
            best,
            saving,
            tensorboard,
        };
        reporter.activity("the first step");
        Ok(reporter)
    }

    /// Also writes all reports to TensorBoard.
    pub fn with_tensorboard(self, tensorboard: Option<TensorBoard>) -> Self {
        Reporter { tensorboard, ..self }
    }

    /// Reports a step: always to the bar, and to file and console if `log` is true.
    pub fn step(&mut self, metrics: &StepMetrics, log: bool) -> io::Result<()> {
        let StepMetrics { step, loss, grad_norm, tokens_per_s, mfu, tflops, peak_bytes, step_s, .. } =
            *metrics;
        self.trend.add(loss);
        let left = self.steps.saturating_sub(step);
        let left = self.remaining.after(self.begun.elapsed(), step_s, left);
        let (steps, trend) = (self.steps, self.trend.arrow());
        let wait = (self.ranks > 1).then(|| metrics.times.wait_s / step_s);
        let line = StepLine {
            step,
            steps,
            loss,
            trend,
            grad_norm,
            tokens_per_s,
            mfu,
            flops: 1e12 * tflops,
            peak_bytes,
            wait,
            left,
        };
        if log && self.bar.is_none() {
            self.line(&line.in_log());
        }
        self.done = step;
        self.last = Some(line);
        if let Some(bar) = &self.bar {
            let saving = part_of("saving", &self.saving);
            bar.draw(self.frame(saving.as_deref(), bar.width()));
        }
        if log { self.record(metrics) } else { Ok(()) }
    }

    /// Reports a step without an update, whether or not it would be logged.
    pub fn skip(&mut self, metrics: &SkipMetrics, why: &str) -> io::Result<()> {
        let SkipMetrics { step, skipped, .. } = metrics;
        let head = StepLine::head(*step, self.steps);
        self.line(&format!("{head} | {why}: the update was skipped ({skipped} so far)"));
        self.done = *step;
        self.last.iter_mut().for_each(|line| line.step = *step);
        self.record(metrics)
    }

    /// Reports an evaluation.
    pub fn evaluation(&mut self, metrics: &EvalMetrics) -> io::Result<()> {
        let EvalMetrics { step, val_loss, val_objective, answer_loss, .. } = *metrics;
        let objective = val_objective.map_or_else(String::new, |value| format!(" | objective {value:.4}"));
        let answers = answer_loss.map_or_else(String::new, |loss| format!(" | answer loss {loss:.4}"));
        let lowest = match self.best {
            Some(best) if val_loss >= best.val_loss => {
                format!(" | the lowest was {:.4}, at step {}", best.val_loss, best.step)
            }
            _ => String::new(),
        };
        self.best = BestLoss::lower(self.best, BestLoss { step, val_loss });
        let head = StepLine::head(step, self.steps);
        self.line(&format!("{head} | validation loss {val_loss:.4}{lowest}{objective}{answers}"));
        self.record(metrics)
    }

    /// Returns the lowest validation loss of the run, including earlier starts of a resumed run.
    pub fn best(&self) -> Option<BestLoss> {
        self.best
    }

    /// Shows on the bar that something other than a step is running.
    pub fn activity(&self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.draw(self.frame(Some(what), bar.width()));
        }
    }

    /// Shows the progress of a save while the run waits for it: on the bar, or in a line every few seconds.
    pub fn saving(&self) -> Shown {
        let meter = self.saving.clone();
        let Some(bar) = self.bar.clone() else {
            return Shown { _line: Some(ProgressLine::for_bytes("saving", meter)), _repeat: None };
        };
        let frame = self.frames();
        let repeat = Repeat::every(FRAME, "kiln-progress", move |is_last| {
            if let (false, Some(saving)) = (is_last, part_of("saving", &meter)) {
                bar.draw(frame(Some(&saving), bar.width()));
            }
        });
        Shown { _line: None, _repeat: repeat.ok() }
    }

    fn frame(&self, activity: Option<&str>, columns: usize) -> String {
        self.frames()(activity, columns)
    }

    fn frames(&self) -> impl Fn(Option<&str>, usize) -> String + use<> {
        let (last, done, steps) = (self.last.clone(), self.done, self.steps);
        move |activity, columns| match &last {
            Some(line) => line.on_terminal(activity, columns),
            None => text::before_steps(done, steps, activity.unwrap_or_default(), columns),
        }
    }

    /// Writes text that belongs to `step` to TensorBoard, if enabled.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) {
        self.tensorboard.iter_mut().for_each(|board| board.text(step, tag, text));
    }

    /// Writes histograms of `what`, such as `weights`, by module to TensorBoard, if enabled.
    pub fn histograms(&mut self, step: u64, what: &str, by_module: Vec<(String, ValueHistogram)>) {
        let Some(board) = &mut self.tensorboard else { return };
        for (module, ValueHistogram { min, max, sum, sum_squares, counts }) in by_module {
            let limits = ValueHistogram::limits();
            let histogram = Histogram { min, max, sum, sum_squares, limits, counts };
            board.histogram(step, &format!("{what}/{module}"), histogram);
        }
    }

    /// Prints a line for users.
    pub fn line(&self, text: &str) {
        print_line(text);
    }

    /// Removes the bar.
    pub fn finish(&mut self) {
        self.bar = None;
    }

    fn record(&mut self, metrics: &impl Serialize) -> io::Result<()> {
        let line = serde_json::to_string(&Line { metrics, time: unix_time() })?;
        self.tensorboard.iter_mut().for_each(|board| board.line(&line));
        self.file.append(line);
        Ok(())
    }
}

fn part_of(what: &str, meter: &Meter) -> Option<String> {
    let (done, of) = meter.read();
    (done < of).then(|| format!("{what} {}%", 100 * done / of))
}

/// Moves lines about steps after `done`, which a resumed run repeats, to the end of `cut`; true if there are any.
pub fn cut_lines_after(path: &Path, done: u64, cut: &Path) -> io::Result<bool> {
    #[derive(Deserialize)]
    struct Line {
        step: u64,
    }
    let mut lines = match LineReader::open(path) {
        Ok(lines) => lines,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let stays = |line: &[u8]| serde_json::from_slice::<Line>(line).is_ok_and(|l| l.step <= done);
    let (mut kept, mut rest) = (Vec::new(), Vec::new());
    let mut is_whole = true;
    while let Some(line) = lines.next_line()? {
        let whole = line.strip_suffix(b"\n");
        is_whole = whole.is_some();
        let line = whole.unwrap_or(line);
        if line.is_empty() {
            continue;
        }
        let to = if stays(line) { &mut kept } else { &mut rest };
        to.extend_from_slice(line);
        to.push(b'\n');
    }
    if rest.is_empty() && is_whole {
        return Ok(false);
    }
    // Appended to `cut` before being removed here, so that every line is always in one of the files.
    let mut file = files::open_with(OpenOptions::new().create(true).append(true), cut)?;
    file.write_all(&rest)?;
    file.sync_all()?;
    write_atomic(path, &kept)?;
    Ok(!rest.is_empty())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_that_are_cut_are_kept_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let (path, cut) = (folder.path().join("metrics.jsonl"), folder.path().join("cut"));
        assert!(!cut_lines_after(&path, 0, &cut).unwrap());
        let lines = "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"ste";
        fs::write(&path, lines).unwrap();
        cut_lines_after(&path, 2, &cut).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":1}\n{\"step\":2}\n");
        assert_eq!(fs::read_to_string(&cut).unwrap(), "{\"step\":3}\n{\"ste\n");
        cut_lines_after(&path, 1, &cut).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":1}\n");
        assert_eq!(fs::read_to_string(&cut).unwrap(), "{\"step\":3}\n{\"ste\n{\"step\":2}\n");
    }
}
