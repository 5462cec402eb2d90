//! The parts that a program adds to Kiln: layers, losses, optimizers, metrics and commands.

use std::sync::Arc;

use kiln_collectives::Communicator;
use kiln_model::Layers;
use kiln_model::layers::{Layer, LayerError, LayerInit, TokenLoss};
use kiln_shard::Optimizer;

use crate::command::{CommandResult, Commands};
use crate::logged::{LoggedStep, MetricResult, Metrics};
use kiln_config::ConfigError;
use kiln_config::losses::{LossInit, Losses};
use kiln_config::optimizers::{OptimizerInit, Optimizers};

/// The parts available to every command of a program: the built-in parts, and those that the program adds.
///
/// ```
/// use kiln_model::layers::SwiGlu;
/// use kiln_train::registry::Registry;
///
/// let registry = Registry::default().layer("my-ffn", |init| Ok(SwiGlu::new(init)));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Registry {
    layers: Layers,
    losses: Losses,
    metrics: Metrics,
    optimizers: Optimizers,
    commands: Commands,
}

impl Registry {
    /// Adds a feed-forward layer, for `model.feed_forward = name`.
    ///
    /// # Panics
    ///
    /// If the name is empty, or already taken by a layer of this kind.
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
    /// If the name is empty, or already taken by a layer of this kind.
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
    /// If the name is empty, or already taken by a layer of this kind.
    pub fn block<L: Layer>(
        self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        Registry { layers: self.layers.block(name, make), ..self }
    }

    /// Adds a metric: rank 0's result for a logged step goes to `metrics.jsonl` under `name`; an error ends the run.
    /// All ranks call `value` at the same point of a step, in the order of addition, so `value` may be collective.
    ///
    /// # Panics
    ///
    /// If the name is empty, contains a dot, or is the name of another key.
    pub fn metric(
        self,
        name: &str,
        value: impl Fn(&LoggedStep<'_>) -> MetricResult + Send + Sync + 'static,
    ) -> Self {
        Registry { metrics: self.metrics.metric(name, value), ..self }
    }

    /// Adds a training loss, for `loss.kind = name`. Evaluations always compute the cross-entropy.
    ///
    /// # Panics
    ///
    /// If the name is empty, or already taken by another loss.
    pub fn loss(
        self,
        name: &str,
        make: impl Fn(LossInit) -> Result<TokenLoss, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        Registry { losses: self.losses.with(name, make), ..self }
    }

    /// Adds an optimizer, for `optim.kind = name`: a [`Rule`](kiln_shard::Rule) or an [`Optimizer`].
    ///
    /// # Panics
    ///
    /// If the name is empty, or already taken by another optimizer.
    pub fn optimizer<O: Into<Optimizer>>(
        self,
        name: &str,
        make: impl Fn(OptimizerInit) -> Result<O, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        Registry { optimizers: self.optimizers.with(name, make), ..self }
    }

    /// Adds a command: `my-program NAME ARGUMENT...` calls `run` with the arguments after the name and with the world,
    /// in which it is the only rank. `my-program launch --nproc-per-node 2 -- NAME ARGUMENT...` calls it on every rank.
    /// An error ends the program with exit code 1.
    ///
    /// ```
    /// use kiln_train::registry::Registry;
    ///
    /// let registry = Registry::default().command("greet", |names, world| {
    ///     println!("rank {} of {} greets {names:?}", world.rank(), world.world_size());
    ///     Ok(())
    /// });
    /// ```
    ///
    /// # Panics
    ///
    /// If the name is empty, or already taken by a built-in or another command.
    pub fn command(
        self,
        name: &'static str,
        run: impl Fn(&[String], Arc<dyn Communicator>) -> CommandResult + Send + Sync + 'static,
    ) -> Self {
        Registry { commands: self.commands.with(name, run), ..self }
    }

    /// Returns the commands that the program adds.
    pub fn commands(&self) -> &Commands {
        &self.commands
    }

    /// Returns the available optimizers.
    pub fn optimizers(&self) -> &Optimizers {
        &self.optimizers
    }

    /// Returns the available training losses besides the cross-entropy.
    pub fn losses(&self) -> &Losses {
        &self.losses
    }

    /// Returns the available layers.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// Returns the metrics that the program adds.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }
}
