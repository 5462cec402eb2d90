//! Everything that a program with custom layers, losses, optimizers, commands or training loops needs.
//!
//! ```no_run
//! use kiln::burn::tensor::activation::relu;
//! use kiln::prelude::*;
//!
//! kiln::allocator!();
//!
//! /// `down(relu(up(x)))`.
//! #[derive(Module, Debug)]
//! struct Mine {
//!     up: Linear,
//!     down: Linear,
//! }
//!
//! impl Mine {
//!     fn new(init: LayerInit) -> Result<Self, LayerError> {
//!         let LayerInit { model, key, device, .. } = init;
//!         let (d, ff) = (model.d_model, model.d_ff);
//!         Ok(Mine {
//!             up: Linear::new(d, ff, model.init_std, key.fork("up"), device),
//!             down: Linear::new(ff, d, model.residual_std(), key.fork("down"), device),
//!         })
//!     }
//! }
//!
//! impl Layer for Mine {
//!     fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
//!         self.down.forward(relu(self.up.forward(x)))
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     kiln::cli::main(Registry::default().layer("mine", Mine::new))
//! }
//! ```

pub use burn;
pub use burn::module::Module;
pub use burn::tensor::{Bool, DType, Device, Int, Tensor};
pub use kiln_checkpoint as checkpoint;
pub use kiln_checkpoint::CheckpointState;
pub use kiln_checkpoint::sharded::{Pass, ShardedDecoder};
pub use kiln_collectives::Communicator;
pub use kiln_config::optimizers::OptimizerInit;
pub use kiln_config::{Config, ConfigError};
pub use kiln_data::{DataInit, DataSource, Sample, SourceError, Split, read_tokenizer_of};
pub use kiln_model::layers::{
    AnyLayer, Attention, Block, Context, Layer, LayerError, LayerInit, Layers, Linear, RmsNorm, SwiGlu,
    TokenLoss, Wrapper,
};
pub use kiln_model::{Decoder, Key, ModelConfig, decoder};
pub use kiln_shard::ranks::run_ranks;
pub use kiln_shard::{
    AdamW, Choice, DirectionRun, Engine, EngineBuilder, Optimizer, OwnedRun, Policy, Rule, Settings,
    ShardRun, UpdateStep,
};
pub use kiln_train::batches::Batches;
pub use kiln_train::command::CommandResult;
pub use kiln_train::logged::{LoggedStep, MetricResult};
pub use kiln_train::losses::LossInit;
pub use kiln_train::objective::{FrozenModel, Objective, ObjectiveContext, TokenBatch};
pub use kiln_train::registry::Registry;
pub use kiln_train::run::{LoopResult, Program, Summary, TrainError, Trainer};

pub use crate::run::{RunOptions, train, train_with};
