//! A few steps of a configuration with hashes, in a temporary folder, for comparing configurations.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::difference::{Expected, Verdict};
use super::hashes;
use crate::error::DiffError;
use crate::error::Result;
use crate::hash::{StepHashes, read};
use crate::{DebugOptions, DebugTools, HashOptions};
use kiln_config::{Config, EventFolder};
use kiln_train::TrainError;
use kiln_train::process::output;
use kiln_train::registry::Registry;
use kiln_train::run::HASHES_FILE;
use kiln_train::run::{RunOptions, Trainer, train_with};

/// Returns the hashes of the first `steps` steps of `config`; ends early once they diverge from `until`.
pub fn run(
    config: &Config,
    registry: &Registry,
    steps: u64,
    until: Option<(&[StepHashes], Expected)>,
) -> Result<Vec<StepHashes>> {
    let folder = tempfile::Builder::new().prefix("kiln-trial-").tempdir();
    let folder = folder.map_err(TrainError::io("make a folder in", &std::env::temp_dir()))?;
    let out = folder.path().join("run");
    let mut config = config.clone();
    // Measuring the peak takes time, and the result would not be used.
    config.device.peak_tflops.get_or_insert(1.0);
    (config.log.tensorboard, config.log.histograms, config.log.http) = (EventFolder::None, 0, None);
    let steps = steps.min(config.train.steps);
    let options = RunOptions {
        out: out.clone().into(),
        registry: registry.clone(),
        alone: true,
        tools: Some(Arc::new(DebugTools(DebugOptions {
            hash: Some(HashOptions::all(1..=steps)),
            ..DebugOptions::default()
        }))),
        ..RunOptions::default()
    };
    let (hashes, stop) = (out.join(HASHES_FILE), options.stop.clone());
    let _silence = output::silence();
    train_with(config, &options, |mut trainer: Trainer<'_>| {
        while trainer.step() < steps && trainer.train_step()? {
            let Some((others, expected)) = until.filter(|_| trainer.engine().world().rank() == 0) else {
                continue;
            };
            let mine = read(&hashes)?;
            if hashes::compare(others, &mine, expected).judge.verdict() == Verdict::Different {
                stop.store(true, Ordering::Relaxed);
            }
        }
        Ok(trainer.abandon()?)
    })?;
    Ok(read(&hashes).map_err(DiffError::from)?)
}
