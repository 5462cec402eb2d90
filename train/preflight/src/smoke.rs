//! `kiln train CONFIG --smoke`: runs every stage of a run at minimal size, in about a minute.

use std::path::Path;
use std::time::Instant;

use clap::ValueEnum;
use kiln_model::Decoder;

use kiln_checkpoint::sharded::{parameter_names, parameter_shapes};
use kiln_checkpoint::{self as checkpoint, Checkpoint};
use kiln_config::optimizers::check_groups;
use kiln_config::{CROSS_ENTROPY, Config, EventFolder, ModelSection};
use kiln_train::error::{Result, TrainError};
use kiln_train::metrics::print_line;
use kiln_train::run::{Resume, RunOptions, Summary};

/// The parts of a run that a smoke run shrinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Smoke {
    /// Shrink the batch, the length of sequences, and the number of steps.
    Batch,
    /// Also shrink the model, to two narrow blocks with the same layers.
    Width,
}

/// Steps of a smoke run; from the middle one, the run is resumed once.
const STEPS: u64 = 4;

const SEQ_LEN: usize = 64;

const EVAL_SAMPLES: u64 = 8;

/// Relative tolerance for the resumed run's losses: GPU kernels sum in any order. On a CPU, the bits are equal.
const TOLERANCE: f64 = 1e-3;

const PROMPT: &str = "The";

const HEAD_DIM: usize = 16;
const HEADS: usize = 4;

impl Smoke {
    /// Shrinks the run: each rank trains on two micro-batches of one sequence, or of two with a loss that the program
    /// adds, which may compare pairs. A source of samples that the program adds may need its sequence length, as do conversations.
    pub fn shrink(self, config: &mut Config) {
        let Config { data, loss, train, optim, eval, checkpoint, log, sample, .. } = config;
        let keeps_length = data.source.is_some() || !data.chat.is_empty();
        if data.seq_len > SEQ_LEN && !keeps_length {
            // Answers may not fit into shorter sequences; `kiln check` checks them.
            eval.prompts = None;
        }
        if !keeps_length {
            data.seq_len = data.seq_len.min(SEQ_LEN);
        }
        train.steps = STEPS;
        let rows = if loss.kind == CROSS_ENTROPY { 1 } else { 2 };
        train.micro_batch = rows.into();
        train.global_batch = 2 * rows * train.ranks;
        optim.warmup_steps = optim.warmup_steps.min(STEPS / 2);
        optim.decay_steps = optim.decay_steps.map(|steps| steps.min(STEPS - optim.warmup_steps));
        eval.every = 0;
        eval.samples = EVAL_SAMPLES;
        (checkpoint.every, checkpoint.keep, checkpoint.keep_every) = (STEPS / 2, 0, 0);
        log.every = 1;
        // External outputs and servers belong to the run that is tried, not to a trial.
        (log.tensorboard, log.histograms, log.http) = (EventFolder::None, 0, None);
        sample.max_tokens = sample.max_tokens.min(16);
        sample.every = sample.every.min(STEPS / 2);
        if sample.all_prompts().next().is_none() {
            sample.prompt = PROMPT.to_owned();
        }
        if self == Smoke::Width {
            narrow(&mut config.model);
        }
    }
}

/// Reduces the model to two narrow blocks. Grouped heads stay grouped, and all experts stay.
fn narrow(section: &mut ModelSection) {
    // Only the vocabulary size comes from the data, and it does not matter here.
    let Ok(model) = section.resolve(Some(1)) else { return };
    let is_grouped = model.kv_heads < model.heads;
    section.layers = Some(model.layers.min(2));
    section.d_model = Some(HEADS * HEAD_DIM);
    section.heads = Some(HEADS);
    section.kv_heads = Some(if is_grouped { HEADS / 2 } else { HEADS });
    section.head_dim = model.head_dim.map(|_| HEAD_DIM);
    section.d_ff = Some(2 * HEADS * HEAD_DIM);
    section.moe = model.moe.map(|mut moe| {
        moe.expert_d_ff = HEADS * HEAD_DIM;
        moe.shared_expert_d_ff = moe.shared_expert_d_ff.map(|_| HEADS * HEAD_DIM);
        moe
    });
}

/// Removes settings from `config` for parameters that `decoder` lacks because it has fewer blocks.
pub(crate) fn forget_absent(config: &mut Config, decoder: &Decoder) {
    config.train.forget_absent(&parameter_names(decoder));
    let shapes = parameter_shapes(decoder);
    config.optim.groups.retain(|group| check_groups(std::slice::from_ref(group), &shapes).is_ok());
}

/// Trains, evaluates, saves and generates with a shrunk `config`, and then resumes from the middle checkpoint.
/// The resumed run must reproduce the losses. All files are below `folder`.
pub fn run(
    mut config: Config,
    shrink: Smoke,
    folder: &Path,
    options: RunOptions,
    train: impl Fn(Config, &RunOptions) -> Result<Summary>,
) -> Result<Summary> {
    let started = Instant::now();
    config.train.ranks = options.ranks.unwrap_or(config.train.ranks);
    shrink.shrink(&mut config);
    print_line(&format!(
        "smoke: {} steps of {} sequences of {} tokens, in {}",
        config.train.steps,
        config.train.global_batch,
        config.data.seq_len,
        folder.display()
    ));
    let straight = RunOptions { out: folder.join("straight").into(), ..options };
    let trained = train(config.clone(), &straight)?;
    if trained.preempted {
        return Ok(trained);
    }
    let middle =
        checkpoint::checkpoint_path(&checkpoint::checkpoints_folder(&folder.join("straight")), STEPS / 2);
    if !middle.exists() {
        print_line(
            "smoke: the program's training loop saved no checkpoint in the middle, so resuming was not tried",
        );
        return Ok(trained);
    }
    Checkpoint::open(&middle)?;
    let resumed =
        RunOptions { out: folder.join("resumed").into(), resume: Some(Resume::Path(middle)), ..straight };
    let again = train(config, &resumed)?;
    if again.preempted {
        return Ok(again);
    }
    let losses = |summary: &Summary| [summary.loss, summary.val_loss].map(Option::unwrap_or_default);
    let pairs = || losses(&again).into_iter().zip(losses(&trained));
    if pairs().any(|(a, b)| (a - b).abs() > TOLERANCE * b.abs()) {
        return Err(TrainError::Smoke { straight: losses(&trained), resumed: losses(&again) });
    }
    let same = pairs().all(|(a, b)| a.to_bits() == b.to_bits());
    print_line(&format!(
        "smoke: training, evaluation, saving, resuming (with {}) and sampling work; {:.1} s",
        if same { "the same bits" } else { "nearly the same losses" },
        started.elapsed().as_secs_f64()
    ));
    Ok(again)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_shrinks() {
        for preset in kiln_model::PRESETS {
            for shrink in [Smoke::Batch, Smoke::Width] {
                let text = format!(
                    "[data]\npath = \"data\"\n[model]\npreset = \"{preset}\"\n[train]\nranks = 3\nglobal_batch = 999"
                );
                let mut config: Config = toml::from_str(&text).expect("a configuration");
                shrink.shrink(&mut config);
                config.validate().expect("it fits together");
                let model = config.resolve_model(None, Some(100)).expect("a model");
                model.validate().expect("it fits together");
                assert_eq!(model.d_model == HEADS * HEAD_DIM, shrink == Smoke::Width, "{preset}");
            }
        }
    }
}
