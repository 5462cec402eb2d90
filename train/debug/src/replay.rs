//! `kiln replay`: repeats one step of a run from the checkpoint before it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use clap::Args;
use kiln_shard::Accumulate;
use kiln_sys::LineReader;
use serde_json::Value;

use crate::{Breakpoint, DebugOptions, DebugTools, HashOptions, Others};
use kiln_checkpoint as checkpoint;
use kiln_config::{self as config, Config, EventFolder, SampleSection};
use kiln_launch::place::Job;
use kiln_train::error::{Result, TrainError};
use kiln_train::metrics::{StepMetrics, print_line};
use kiln_train::process::stop_on_signals;
use kiln_train::registry::Registry;
use kiln_train::run::{Resume, RunFolder, RunOptions, Trainer, metrics_of_run, run_of, train_with};

/// Relative tolerance of loss and norm if the number of ranks differs, since the order of sums then differs.
const TOLERANCE: f64 = 1e-4;

/// Arguments of `kiln replay`.
#[derive(Args)]
pub struct ReplayArgs {
    /// Run folder.
    run: PathBuf,
    /// Step to repeat.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    step: u64,
    /// Number of ranks, as threads of this process [default: as in the run].
    #[arg(long)]
    ranks: Option<usize>,
    /// Stop at a breakpoint of the step. May be repeated.
    #[arg(long = "break", value_name = "WHERE")]
    breakpoints: Vec<Breakpoint>,
    /// Hold only this rank at the breakpoints; see --others.
    #[arg(long, value_name = "N", requires = "breakpoints")]
    rank: Option<usize>,
    /// Behaviour of the other ranks while --rank is held.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "hold", requires = "rank")]
    others: Others,
    /// Write tensor hashes of these steps for `kiln diff`; requires --out.
    #[arg(long, value_name = "STEPS[,KINDS]", requires = "out")]
    hash: Option<HashOptions>,
    /// Override a configuration value of the run, such as data.path; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Folder to keep the files of the replay in [default: a temporary folder].
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Numbers {
    loss: f64,
    grad_norm: f64,
}

impl ReplayArgs {
    /// Replays the step. Returns the exit code: 1 if the result differs from the recorded one.
    ///
    /// # Errors
    ///
    /// If the folder does not hold a run, or as for [`train_with`].
    pub fn run(mut self, registry: &Registry) -> Result<u8> {
        // A checkpoint stands for its run.
        self.run = run_of(&self.run);
        let text = self.run.join("config.toml");
        if !text.is_file() {
            let run = self.run.display();
            return Err(TrainError::usage(format!("{run} is not a run folder: it has no config.toml")));
        }
        let mut config = config::load(&text, &self.overrides)?;
        // Builds without this key reduced gradients once per step.
        config.shard.accumulate.get_or_insert(Accumulate::Unsharded);
        let ranks = (config.train.ranks, self.ranks.unwrap_or(config.train.ranks));
        let folder = checkpoint::checkpoints_folder(&self.run);
        let before = checkpoint::later_than(&folder, 0).into_iter().filter(|step| *step < self.step).max();
        if self.step > config.train.steps {
            let steps = config.train.steps;
            return Err(TrainError::usage(format!("--step {}: the run has {steps} steps", self.step)));
        }
        let from = before.map_or("the start".to_owned(), |step| format!("the checkpoint of step {step}"));
        print_line(&format!("replay: step {} of {} from {from}", self.step, self.run.display()));
        let temporary = match &self.out {
            Some(_) => None,
            None => {
                let made = tempfile::Builder::new().prefix("kiln-replay-").tempdir();
                Some(made.map_err(TrainError::io("make a folder in", &std::env::temp_dir()))?)
            }
        };
        let out = match (&self.out, &temporary) {
            (Some(out), _) => out.clone(),
            (None, Some(folder)) => folder.path().join("run"),
            (None, None) => return Err(TrainError::usage("there is no folder to replay in")),
        };
        let options = RunOptions {
            out: RunFolder::At(out),
            resume: before.map(|step| Resume::Path(checkpoint::checkpoint_path(&folder, step))),
            ranks: Some(ranks.1),
            registry: registry.clone(),
            job: Job::default(),
            stop: stop_on_signals(),
            alone: true,
            tools: Some(Arc::new(DebugTools(DebugOptions {
                breakpoints: self.breakpoints(),
                has_prompt: true,
                hash: self.hash.clone(),
                ..DebugOptions::default()
            }))),
            ..RunOptions::default()
        };
        let now = take(alone(config), &options, self.step)?;
        drop(temporary);
        let Some(now) = now else { return Ok(kiln_train::launch::PREEMPTED) };
        Ok(self.compare(now, recorded(&self.run, self.step), ranks.0 == ranks.1))
    }

    /// Returns the breakpoints, which apply to the replayed step unless they name another.
    fn breakpoints(&self) -> Vec<Breakpoint> {
        let of = |breakpoint: &Breakpoint| Breakpoint {
            step: breakpoint.step.or(Some(self.step)),
            rank: breakpoint.rank.or(self.rank),
            others: if breakpoint.rank.is_none() { self.others } else { breakpoint.others },
            on: breakpoint.on.clone(),
        };
        self.breakpoints.iter().map(of).collect()
    }

    fn compare(&self, now: Numbers, before: Option<Numbers>, same_ranks: bool) -> u8 {
        let step = self.step;
        let Some(before) = before else {
            print_line(&format!(
                "replay: step {step}: loss {}, grad norm {}; the run did not log this step",
                now.loss, now.grad_norm
            ));
            return 0;
        };
        let pairs = [(now.loss, before.loss), (now.grad_norm, before.grad_norm)];
        // Non-finite numbers are recorded without their kind.
        let is_same = |(now, before): &(f64, f64)| {
            now.to_bits() == before.to_bits() || !(now.is_finite() || before.is_finite())
        };
        let equal = pairs.iter().all(is_same);
        let near = pairs.iter().all(|(now, before)| (now - before).abs() <= TOLERANCE * before.abs());
        let verdict = match (equal, near, same_ranks) {
            (true, ..) => "bit for bit equal",
            (false, true, false) => "equal up to rounding, with a different number of ranks",
            (false, true, true) => "close, but not bit for bit equal: check build, machine and settings",
            (false, false, _) => "different",
        };
        print_line(&format!(
            "replay: step {step}: loss {} (recorded {}), grad norm {} (recorded {}): {verdict}",
            now.loss, before.loss, now.grad_norm, before.grad_norm
        ));
        u8::from(!(equal || (near && !same_ranks)))
    }
}

fn alone(mut config: Config) -> Config {
    config.eval.every = 0;
    config.checkpoint.every = 0;
    config.eval.prompts = None;
    config.sample = SampleSection::default();
    config.log.every = 1;
    (config.log.tensorboard, config.log.histograms, config.log.http) = (EventFolder::None, 0, None);
    config
}

/// Trains up to `step` and returns its loss and norm, without saving anything; `None` if the run was stopped before.
fn take(config: Config, options: &RunOptions, step: u64) -> Result<Option<Numbers>> {
    let numbers = Mutex::new(None);
    train_with(config, options, |mut trainer: Trainer<'_>| {
        let mut goes_on = true;
        while goes_on && trainer.step() < step {
            goes_on = trainer.train_step()?;
        }
        let of = |metrics: &StepMetrics| Numbers { loss: metrics.loss, grad_norm: metrics.grad_norm };
        trainer.settle()?;
        let last = trainer.metrics().filter(|metrics| metrics.step == step).map(of);
        *numbers.lock().unwrap_or_else(PoisonError::into_inner) = last;
        Ok(trainer.abandon()?)
    })?;
    Ok(numbers.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Returns the logged numbers of `step`; NaN for a non-finite number, which is logged as `null`.
fn recorded(out: &Path, step: u64) -> Option<Numbers> {
    let mut lines = LineReader::open(&metrics_of_run(out)).ok()?;
    let number = |line: &Value, key: &str| {
        let value = line.get(key)?;
        if value.is_null() { Some(f64::NAN) } else { value.as_f64() }
    };
    while let Some(line) = lines.next_line().ok()? {
        let Ok(line) = serde_json::from_slice::<Value>(line) else { continue };
        let is_it = line.get("step").and_then(Value::as_u64) == Some(step);
        if let (true, Some(loss), Some(grad_norm)) =
            (is_it, number(&line, "loss"), number(&line, "grad_norm"))
        {
            return Some(Numbers { loss, grad_norm });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn recorded_numbers_keep_their_bits() {
        let run = tempfile::tempdir().unwrap();
        let losses: Vec<f64> =
            (1..400).map(|at| 2.0 + f64::from(at).sqrt().sin()).chain([f64::NAN]).collect();
        let line = |(step, loss): (usize, &f64)| {
            serde_json::json!({ "step": step, "loss": loss, "grad_norm": -loss }).to_string()
        };
        let lines: Vec<_> = losses.iter().enumerate().map(line).collect();
        fs::write(run.path().join("metrics.jsonl"), lines.join("\n")).unwrap();
        for (step, loss) in losses.iter().enumerate() {
            let Numbers { loss: read, grad_norm } = recorded(run.path(), step as u64).unwrap();
            let is_same = |x: f64, y: f64| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
            assert!(
                is_same(read, *loss) && is_same(grad_norm, -loss),
                "step {step}: {loss}, and read {read}"
            );
        }
    }
}
