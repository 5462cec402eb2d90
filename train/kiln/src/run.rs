//! Training runs with the tools of this program: [`kiln_train::run`], for `kiln status`, `attach` and `watch`.

use std::sync::Arc;

use kiln_collectives::Communicator;
use kiln_config::Config;
use kiln_train::{process, run};

pub use kiln_train::run::*;

pub use crate::commands::tools::RunTools;
use crate::version::version;

fn with_tools(options: &RunOptions) -> RunOptions {
    version();
    // Checked before the options are cloned: a second handle of the flag means that the caller stops its runs itself.
    process::tell_what_is_missing(Arc::strong_count(&options.stop) > 1);
    let mut options = options.clone();
    options.tools.get_or_insert_with(|| Arc::new(RunTools::default()));
    options
}

/// Trains the decoder that `config` describes: see [`kiln_train::run::train`].
///
/// # Errors
///
/// As for [`kiln_train::run::train`].
pub fn train(config: Config, options: &RunOptions) -> Result<Summary, TrainError> {
    run::train(config, &with_tools(options))
}

/// Like [`train`], with a custom training loop that every rank runs.
///
/// # Errors
///
/// As for [`train`], and the errors of `run`.
pub fn train_with(
    config: Config,
    options: &RunOptions,
    run: impl Fn(Trainer<'_>) -> LoopResult + Send + Sync,
) -> Result<Summary, TrainError> {
    run::train_with(config, &with_tools(options), run)
}

/// Like [`train`], as one rank of a world that is already connected: see [`kiln_train::run::train_joined`].
///
/// # Errors
///
/// As for [`kiln_train::run::train_joined`].
pub fn train_joined(
    world: Arc<dyn Communicator>,
    config: Config,
    options: &RunOptions,
) -> Result<Summary, TrainError> {
    run::train_joined(world, config, &with_tools(options))
}
