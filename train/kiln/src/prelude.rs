//! What a program with its own parts needs: `use kiln::prelude::*`.

pub use burn::module::Module;
pub use burn::tensor::{Device, Int, Tensor};
pub use burn::{self};
pub use kiln_checkpoint::sharded::ShardedDecoder;
pub use kiln_config::losses::LossInit;
pub use kiln_config::optimizers::OptimizerInit;
pub use kiln_config::{Config, ConfigError};
pub use kiln_model::layers::{Context, Layer, LayerError, LayerInit, Linear, RmsNorm, TokenLoss};
pub use kiln_model::{Decoder, Key, ModelConfig};
pub use kiln_shard::{Engine, Optimizer, Rule};
pub use kiln_train::logged::{LoggedStep, MetricResult};
pub use kiln_train::registry::Registry;
pub use kiln_train::run::{LoopResult, Program, Summary, TrainError, Trainer};

pub use crate::run::{RunOptions, train, train_with};
