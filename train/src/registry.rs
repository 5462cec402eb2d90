//! What a program adds to Kiln: layers, optimizers and losses of its own, under names that a configuration
//! uses, and metrics.

use kiln_model::Layers;
use kiln_model::layers::{Layer, LayerError, LayerInit, TokenLoss};
use kiln_shard::Optimizer;

use crate::config::ConfigError;
use crate::logged::{LoggedStep, MetricResult, Metrics};
use crate::losses::{LossInit, Losses};
use crate::optimizers::{OptimizerInit, Optimizers};

/// The parts that every command of a program knows: the built-in ones, and those that are added here. A
/// program with layers of its own has all commands of `kiln` in a `main` of a few lines:
///
/// ```no_run
/// # use kiln::registry::Registry;
/// # use kiln_model::layers::SwiGlu;
/// #[global_allocator]
/// static ALLOCATOR: kiln::process::CountingAllocator = kiln::process::CountingAllocator;
///
/// fn main() -> std::process::ExitCode {
///     kiln::cli::main(Registry::default().layer("my-ffn", |init| Ok(SwiGlu::new(init))))
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Registry {
    layers: Layers,
    losses: Losses,
    metrics: Metrics,
    optimizers: Optimizers,
}

impl Registry {
    /// Adds a feed-forward layer, for `model.feed_forward = name`.
    ///
    /// # Panics
    ///
    /// When the name is empty, or a layer of this kind has it already.
    pub fn layer<L: Layer>(
        self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        Registry { layers: self.layers.feed_forward(name, make), ..self }
    }

    /// Adds an attention layer, for `model.attention = name`.
    ///
    /// # Panics
    ///
    /// When the name is empty, or a layer of this kind has it already.
    pub fn attention<L: Layer>(
        self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        Registry { layers: self.layers.attention(name, make), ..self }
    }

    /// Adds a whole block, for `model.block = name`.
    ///
    /// # Panics
    ///
    /// When the name is empty, or a layer of this kind has it already.
    pub fn block<L: Layer>(
        self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        Registry { layers: self.layers.block(name, make), ..self }
    }

    /// Adds a metric: what `value` makes of a step that is logged is in `metrics.jsonl` under `name`. Every
    /// rank calls it at the same place between its other calls, in the order in which metrics were added. So
    /// it may call what is collective, such as
    /// [`Engine::weight_norms`](kiln_shard::Engine::weight_norms). What rank 0 gets is written. An error ends
    /// the run.
    ///
    /// # Panics
    ///
    /// When the name is empty, has a dot, or is that of another key.
    pub fn metric(
        self,
        name: &str,
        value: impl Fn(&LoggedStep<'_>) -> MetricResult + Send + Sync + 'static,
    ) -> Self {
        Registry { metrics: self.metrics.metric(name, value), ..self }
    }

    /// Adds a training loss, for `loss.kind = name`. Evaluations compute the cross-entropy whatever it is, so
    /// that runs with different losses can be compared.
    ///
    /// # Panics
    ///
    /// When the name is empty, or a loss has it already.
    pub fn loss(
        self,
        name: &str,
        make: impl Fn(LossInit) -> Result<TokenLoss, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        Registry { losses: self.losses.with(name, make), ..self }
    }

    /// Adds an optimizer, for `optim.kind = name`: a [`Rule`](kiln_shard::Rule) for all parameters, or an
    /// [`Optimizer`] of several.
    ///
    /// # Panics
    ///
    /// When the name is empty, or an optimizer has it already.
    pub fn optimizer<O: Into<Optimizer>>(
        self,
        name: &str,
        make: impl Fn(OptimizerInit) -> Result<O, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        Registry { optimizers: self.optimizers.with(name, make), ..self }
    }

    /// The optimizers that a run can have.
    pub fn optimizers(&self) -> &Optimizers {
        &self.optimizers
    }

    /// The training losses that a run can have besides the cross-entropy.
    pub fn losses(&self) -> &Losses {
        &self.losses
    }

    /// The layers that a decoder can be made of.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// The metrics that the program adds.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }
}
