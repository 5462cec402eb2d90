//! Kiln trains decoder-only language models with fully sharded data parallelism.
//!
//! This crate combines the others: configuration, data, the training loop, checkpoints, generation, and the
//! binary `kiln`.
//!
//! # Where does your idea go?
//!
//! Your own program has every command of `kiln`, with your parts: its `main` is
//! [`cli::main`]`(`[`registry::Registry`]`::default()...)`, and the configuration names the parts. Each row has
//! an example in `train/kiln/examples/`, which the tests run.
//!
//! | what you want to change | where | example |
//! |---|---|---|
//! | the feed-forward layer | [`Registry::layer`](registry::Registry::layer), `model.feed_forward` | `own_layer.rs` |
//! | attention | [`Registry::attention`](registry::Registry::attention), `model.attention` | `own_attention.rs` |
//! | a recurrent layer, or a latent cache | [`LayerCache`](kiln_model::layers::LayerCache) | `gated_linear_attention.rs`, `latent_attention.rs` |
//! | the whole block | [`Registry::block`](registry::Registry::block), `model.block` | `own_layer.rs` has the form |
//! | the wiring of a block, around the layers that the configuration names | [`Registry::block_around`](registry::Registry::block_around), `model.block` | `lora.rs` |
//! | a layer's result, and the checkpoint it starts from | [`AnyLayer::wrapped`](kiln_model::layers::AnyLayer::wrapped), `train.train_only` | `lora.rs` |
//! | a loss of a layer, or a value to log | [`Context::add_loss`](kiln_model::Context::add_loss), [`Context::record`](kiln_model::Context::record) | `own_metric.rs` |
//! | the training loss of a token | [`Registry::loss`](registry::Registry::loss), `loss.kind` | `own_loss.rs` |
//! | the objective: two models, pairs, several runs of the model | [`Registry::objective`](registry::Registry::objective), `loss.kind` | `dpo.rs`, `distillation.rs` |
//! | extra heads, which an objective runs | [`Registry::head_layer`](registry::Registry::head_layer), `model.head_layer` | `multi_token.rs` |
//! | the samples, and which targets count | [`Registry::data`](registry::Registry::data), `data.source` | `own_source.rs` |
//! | the optimizer | [`Registry::optimizer`](registry::Registry::optimizer), `optim.kind` | `own_optimizer.rs` |
//! | an optimizer with state of whole matrices | [`Rule::owned_slots`](kiln_shard::Rule::owned_slots) | `shampoo.rs` |
//! | learning rates and schedules by parameter | `[[optim.groups]]` of the configuration | |
//! | a metric to log | [`Registry::metric`](registry::Registry::metric) | `own_metric.rs` |
//! | the text | [`data::prepare`] | `own_data.rs` |
//! | what a loop measures between steps | [`Trainer::record`](run::Trainer::record) | `gradient_noise.rs` |
//! | when a run evaluates, saves or ends | [`Registry::training_loop`](registry::Registry::training_loop), [`run::Trainer`] | `own_trainer.rs` |
//! | the whole training loop | [`sharded::ShardedDecoder`], [`batches::Batches`] | `own_loop.rs` |
//! | the commands, alone or on launched ranks | [`Registry::command`](registry::Registry::command) | `own_command.rs` |
//! | settings of your program | `[experiment]`, [`Config::experiment`](config::Config::experiment) | `own_trainer.rs` |
//!
//! `examples/own-crate` is a crate outside of the repository. The map of the code is `ARCHITECTURE.md`.
//!
//! Parts that can be used alone are separate crates, re-exported here as modules: [`data`], [`checkpoint`],
//! [`place`]. None of these crates depends on this one. A custom binary that does not call [`cli::main`] calls
//! [`process::start`] first.

pub mod cli;
mod commands;
pub mod error;
pub mod prelude;
pub mod run;
mod version;

pub use burn;
pub use kiln_checkpoint as checkpoint;
pub use kiln_checkpoint::{hugging_face, sharded, source, weights};
pub use kiln_collectives as collectives;
pub use kiln_config as config;
pub use kiln_config::{device, links, optimizers, schedule};
pub use kiln_data as data;
pub use kiln_debug as debug;
pub use kiln_debug::breakpoint;
pub use kiln_launch::place;
pub use kiln_model as model;
pub use kiln_plan as planner;
pub use kiln_preflight::bench;
pub use kiln_shard as shard;
pub use kiln_sys::words;
pub use kiln_train::{
    batches, command, eval, fault, flight, generate, launch, logged, losses, metrics, objective, passes,
    prepared, process, registry, values, world,
};
pub use serde;

/// Sets the global allocator that counts the memory of each rank, and keeps freed memory for the next step. A
/// program without it also trains, but reports no memory. Sets none in tests, so that they can include the files of
/// several programs.
#[macro_export]
macro_rules! allocator {
    () => {
        #[cfg(not(test))]
        #[global_allocator]
        static ALLOCATOR: $crate::process::CountingAllocator = $crate::process::CountingAllocator;
    };
}
