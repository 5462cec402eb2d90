//! Training runs.
//!
//! [`train`] makes one plan for all ranks. Each step of a rank is `Trainer::train_step`:
//! fetch → forward → loss ÷ global tokens → backward → clip → finite? → update.

mod agree;
mod events;
mod folder;
mod inherited;
mod joining;
mod memory;
mod nonfinite;
mod observe;
mod options;
mod plan;
mod position;
pub mod prompts;
mod recorded;
mod requirements;
mod startup;
mod train;
mod trainer;

pub use crate::error::{FolderError, MAX_SKIPPED, MemoryError, PositionKey, TrainError};
pub use crate::eval::evaluate;
pub use crate::passes::{MicroBatch, RunLoss, forward_backward, micro_batches, tokens_of_step};
pub use events::{FAILURE, last_event};
pub use folder::{
    CHECK_PREFIX, HASHES_FILE, Progress, Standing, Waiting, find as find_folder, is_foreign, metrics_of_run,
    progress, run_of, standing, waiting,
};
pub use kiln_observe::run::Sample;
pub use memory::check as memory_warnings;
pub use memory::{check_decoder as check_memory, lay_out_memory, needed_bytes, settle_recompute};
pub use observe::{AttachedTools, Controls, Moment, ObservedRank, Observer, Pass, Reach, RunFacts, Tools};
pub use options::{Resume, RunFolder, RunOptions, Summary};
pub use plan::Plan;
pub use recorded::RecordedStep;
pub use requirements::{check_parts, check_position, check_source, model_of_run, open_source, resolve_model};
pub use train::with_ranks;
pub use train::{LoopResult, Program, train, train_joined, train_with};
pub use trainer::Trainer;
