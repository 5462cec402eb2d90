//! PyTorch, run as a separate program, alternating with Kiln.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use kiln::config::{Config, ModelSection, Precision};
use kiln_shard::{Recompute, Reshard, Strategy};
use serde_json::Value;

use super::shapes::Shapes;
use crate::error::BenchError;
use crate::measure::Steps;

pub(super) struct Peer {
    python: PathBuf,
    script: PathBuf,
    cuda: bool,
    eager: bool,
}

impl Peer {
    /// Creates a peer. Fails if the script does not exist.
    pub(super) fn new(python: PathBuf, script: PathBuf, cuda: bool, eager: bool) -> Result<Peer, BenchError> {
        if !script.is_file() {
            return Err(BenchError::NoScript { script: script.display().to_string() });
        }
        Ok(Peer { python, script, cuda, eager })
    }

    fn failed(&self, problem: String) -> BenchError {
        let command = format!("{} {}", self.python.display(), self.script.display());
        BenchError::Peer { command, problem }
    }

    /// Returns the seconds of operations, by their names in Kiln; empty for shapes of no preset.
    pub(super) fn kernels(&self, shapes: &Shapes, quick: bool) -> Result<BTreeMap<String, f64>, BenchError> {
        let Some(preset) = shapes.preset else { return Ok(BTreeMap::new()) };
        let mut words = vec!["--kernels".to_owned()];
        words.extend(["--preset".to_owned(), preset.to_owned()]);
        words.extend(number("--batch", shapes.batch));
        words.extend(number("--seq", shapes.seq));
        words.extend(dtype(shapes.precision));
        words.extend(quick.then(|| "--quick".to_owned()));
        let report = self.run(words)?;
        serde_json::from_value(report["kernels"].clone())
            .map_err(|error| self.failed(format!("printed unexpected output: {error}")))
    }

    /// Returns the peer's report on the steps of `config`; `None` if the model is not an unchanged preset.
    pub(super) fn steps(&self, config: &Config, count: Steps) -> Result<Option<Value>, BenchError> {
        let Some(words) = words_for(config, count) else { return Ok(None) };
        let report = self.run(words)?;
        match report["tokens_per_s"].is_number() {
            true => Ok(Some(report)),
            false => Err(self.failed("printed unexpected output".to_owned())),
        }
    }

    fn run(&self, mut words: Vec<String>) -> Result<Value, BenchError> {
        if self.cuda {
            words.extend(["--device", "cuda"].map(str::to_owned));
            words.extend((!self.eager).then(|| "--compile".to_owned()));
        }
        let output = Command::new(&self.python)
            .arg(&self.script)
            .args(&words)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| self.failed(format!("cannot be started: {error}")))?;
        if !output.status.success() {
            let words = words.join(" ");
            return Err(self.failed(format!("with {words}: {}; see above", output.status)));
        }
        // One line of JSON; libraries may print something before it.
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().last().unwrap_or_default();
        serde_json::from_str(line).map_err(|error| self.failed(format!("did not print JSON: {error}")))
    }
}

fn number(flag: &str, value: usize) -> [String; 2] {
    [flag.to_owned(), value.to_string()]
}

fn dtype(precision: Precision) -> [String; 2] {
    let name = if precision == Precision::Bf16 { "bf16" } else { "f32" };
    ["--dtype".to_owned(), name.to_owned()]
}

/// Returns the preset of `config`'s model, if it is an unchanged one.
pub(super) fn preset_of(config: &Config) -> Option<String> {
    let preset = config.model.preset.clone()?;
    let vocabulary = kiln_model::ModelConfig::preset(&preset)?.vocab_size;
    let plain = ModelSection {
        preset: Some(preset.clone()),
        vocab_size: config.model.vocab_size.and(Some(vocabulary)),
        ..ModelSection::default()
    };
    (config.model == plain).then_some(preset)
}

fn words_for(config: &Config, count: Steps) -> Option<Vec<String>> {
    let preset = preset_of(config)?;
    let mode = match (config.shard.strategy, config.shard.reshard) {
        (Strategy::NoShard, _) => "ddp",
        (Strategy::FullShard, Reshard::Default | Reshard::Always) => "fsdp",
        _ => "shard_grad_op",
    };
    let mut words = vec!["--preset".to_owned(), preset, "--mode".to_owned(), mode.to_owned()];
    words.extend(number("--ranks", config.train.ranks));
    words.extend(number("--batch", config.train.global_batch));
    words.extend(number("--micro-batch", config.micro_batch()));
    words.extend(["--accumulate".to_owned(), config.shard.accumulate().to_string()]);
    words.extend(number("--seq", config.data.seq_len));
    words.extend(number("--steps", count.timed));
    words.extend(number("--warmup", count.warmup));
    words.extend(dtype(config.precision.compute()));
    words.extend((config.shard.recompute() == Recompute::Block).then(|| "--recompute".to_owned()));
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::{Config, Precision, Recompute, Steps, words_for};

    #[test]
    fn the_peer_is_told_the_same() {
        let mut config = Config::default();
        config.model.preset = Some("1b".to_owned());
        config.model.vocab_size = Some(32_000);
        (config.train.global_batch, config.train.micro_batch) = (8, 2.into());
        config.data.seq_len = 2048;
        config.precision.compute = Precision::Bf16.into();
        config.shard.recompute = Recompute::Block.into();
        let count = Steps { timed: 5, warmup: 2 };
        assert_eq!(
            words_for(&config, count).expect("a preset").join(" "),
            "--preset 1b --mode fsdp --ranks 1 --batch 8 --micro-batch 2 --accumulate sharded --seq 2048 \
             --steps 5 --warmup 2 --dtype bf16 --recompute"
        );
        // Models that the script does not know.
        config.model.layers = Some(3);
        assert_eq!(words_for(&config, count), None);
        config.model.layers = None;
        config.model.vocab_size = Some(1000);
        assert_eq!(words_for(&config, count), None);
        config.model.preset = None;
        assert_eq!(words_for(&config, count), None);
    }
}
