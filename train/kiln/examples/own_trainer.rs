//! A custom training loop on the stock trainer, which provides the run folder, the log, checkpoints, signals
//! and restarts: it ends when the validation loss has not improved for a while.
//!
//!     cargo run --release --example own_trainer -- train configs/quickstart.toml \
//!         --set experiment.every=20 --set experiment.patience=2

use std::process::ExitCode;

use kiln::process::CountingAllocator;
use kiln::registry::Registry;
use kiln::run::{LoopResult, Trainer};
use serde::Deserialize;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The section `[experiment]`, which checkpoints keep.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Experiment {
    /// Steps between evaluations.
    every: u64,
    /// Number of consecutive evaluations that may fail to improve on the best one.
    patience: usize,
}

impl Default for Experiment {
    fn default() -> Self {
        Experiment { every: 50, patience: 3 }
    }
}

/// Trains on one rank. All ranks see the same losses, so they stop after the same step.
fn train_until_it_stalls(mut trainer: Trainer<'_>) -> LoopResult {
    let Experiment { every, patience } = trainer.config().experiment()?;
    let (mut best, mut stalled) = (f64::INFINITY, 0);
    while stalled < patience && trainer.train_step()? {
        if !trainer.step().is_multiple_of(every) {
            continue;
        }
        // `None`: a stop was requested, so the next step returns false.
        let Some(loss) = trainer.evaluate()? else { continue };
        if loss < best {
            (best, stalled) = (loss, 0);
            trainer.save()?;
        } else {
            stalled += 1;
        }
    }
    if stalled >= patience {
        trainer.print_line(&format!("no better than {best:.4} for {patience} evaluations: that is enough"));
    }
    Ok(trainer.finish()?)
}

fn main() -> ExitCode {
    kiln::cli::main(Registry::default().training_loop(train_until_it_stalls))
}
