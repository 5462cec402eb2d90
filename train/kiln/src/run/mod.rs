//! Training runs.
//!
//! [`train`] settles everything that is the same for all ranks (`plan.rs`) and starts them as threads of this
//! process; or this process is one rank, and rank 0 settles the plan and sends it to the others (`agree.rs`).
//! Each rank takes its steps: `Trainer::run` and `Trainer::train_step` in `trainer/run.rs`. A step is
//! [`optimizer_step`]: fetch → forward → loss ÷ global tokens → backward → clip → finite? → update.

mod agree;
mod decoder;
mod evaluate;
mod events;
mod exhausted;
mod folder;
mod inherited;
mod joining;
mod memory;
mod observe;
mod options;
mod plan;
mod position;
pub(crate) mod prompts;
mod recorded;
mod replay;
mod requirements;
mod smoke;
mod startup;
mod step;
mod surroundings;
mod trainer;

pub use crate::error::TrainError;
pub use decoder::{LoopResult, Program, train, train_joined, train_with};
pub(crate) use decoder::{TrainArgs, with_ranks};
pub use evaluate::evaluate;
pub(crate) use events::{FAILURE, last_event};
pub use folder::FolderError;
pub(crate) use folder::{
    Progress, Standing, Waiting, find as find_folder, is_foreign, progress, standing, waiting,
};
pub use kiln_observe::run::Sample;
pub(crate) use memory::check as memory_warnings;
pub use memory::{MemoryError, check_decoder as check_memory, lay_out_memory};
pub(crate) use observe::Controls;
pub use observe::{Moment, Observer};
pub use options::{MAX_SKIPPED, PositionKey, Resume, RunFolder, RunOptions, Summary};
pub(crate) use plan::Plan;
pub use recorded::RecordedStep;
pub(crate) use replay::ReplayArgs;
pub(crate) use requirements::{
    check_parts, check_position, check_source, model_of_run, open_source, resolve_model,
};
pub(crate) use smoke::{Smoke, forget_absent};
pub use step::{MicroBatch, MicroBatches, optimizer_step};
pub use trainer::Trainer;
