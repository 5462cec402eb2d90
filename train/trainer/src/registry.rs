//! The parts that a program adds to Kiln: layers, losses, optimizers, metrics and commands.

use std::sync::Arc;

use kiln_collectives::Communicator;
use kiln_model::Layers;
use kiln_model::layers::{AnyLayer, Layer, LayerError, LayerInit, TokenLoss};
use kiln_shard::Optimizer;

use crate::command::{CommandResult, Commands};
use crate::logged::{LoggedStep, MetricResult, Metrics};
use crate::losses::{LossInit, Losses};
use crate::objective::Objective;
use kiln_config::ConfigError;
use kiln_config::optimizers::{OptimizerInit, Optimizers};
use kiln_data::{DataInit, DataSource, SourceError, Sources};

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
    sources: Sources,
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

    /// Adds a whole block, for `model.block = name`. The block creates its layers itself.
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

    /// Adds a block made from the attention and feed-forward layers that the configuration names, for `model.block =
    /// name`. See [`Layers::block_around`].
    ///
    /// # Panics
    ///
    /// If the name is empty, or already taken by a block.
    pub fn block_around<L: Layer>(
        self,
        name: &str,
        make: impl Fn(LayerInit, AnyLayer, AnyLayer) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        Registry { layers: self.layers.block_around(name, make), ..self }
    }

    /// Adds a layer of the head, for `model.head_layer = name`, which only an objective runs: an extra head, for
    /// instance.
    ///
    /// # Panics
    ///
    /// If the name is empty, or already taken by a layer of this kind.
    pub fn head_layer<L: Layer>(
        self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        Registry { layers: self.layers.head_layer(name, make), ..self }
    }

    /// Adds a metric: rank 0's result for a logged step goes to `metrics.jsonl` under `name`; an error ends the run.
    /// All ranks call `value` at the same point of a step, in the order of addition, so `value` may be collective.
    ///
    /// ```
    /// use kiln_train::registry::Registry;
    ///
    /// let registry = Registry::default().metric("perplexity", |step| Ok(step.metrics.loss.exp()));
    /// ```
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
    /// ```
    /// use burn::tensor::activation::log_softmax;
    /// use kiln_model::layers::TokenLoss;
    /// use kiln_train::registry::Registry;
    ///
    /// let registry = Registry::default().loss("plain", |_| {
    ///     Ok(TokenLoss::new(|logits, targets| {
    ///         log_softmax(logits, 1).gather(1, targets.unsqueeze_dim(1)).neg().squeeze_dim(1)
    ///     }))
    /// });
    /// ```
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

    /// Adds an objective, for `loss.kind = name`: a training loss that runs the model itself. Evaluations report it
    /// next to the cross-entropy, as `val_objective`.
    ///
    /// # Panics
    ///
    /// If the name is empty, or already taken by another loss.
    pub fn objective<O: Objective + 'static>(
        self,
        name: &str,
        make: impl Fn(LossInit) -> Result<O, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        Registry { losses: self.losses.with_objective(name, make), ..self }
    }

    /// Adds a source of samples, for `data.source = name`.
    ///
    /// # Panics
    ///
    /// If the name is empty, or already taken by another source.
    pub fn data<S: DataSource + 'static>(
        self,
        name: &str,
        make: impl Fn(DataInit) -> Result<S, SourceError> + Send + Sync + 'static,
    ) -> Self {
        Registry { sources: self.sources.with(name, make), ..self }
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

    /// Adds the help text of a command: `my-program NAME --help` prints it, and `my-program --help` its first line. Without
    /// a help text, `--help` is an argument like any other, which the command receives.
    ///
    /// ```
    /// use kiln_train::registry::Registry;
    ///
    /// let registry = Registry::default()
    ///     .command("greet", |names, _| Ok(println!("hello {names:?}")))
    ///     .command_help("greet", "Greet people\n\nUsage: my-program greet [NAME]...");
    /// ```
    ///
    /// # Panics
    ///
    /// If there is no command of this name.
    pub fn command_help(self, name: &str, help: &'static str) -> Self {
        Registry { commands: self.commands.with_help(name, help), ..self }
    }

    /// Returns the commands that the program adds.
    pub fn commands(&self) -> &Commands {
        &self.commands
    }

    /// Returns the available optimizers.
    pub fn optimizers(&self) -> &Optimizers {
        &self.optimizers
    }

    /// Returns the sources of samples that the program adds.
    pub fn sources(&self) -> &Sources {
        &self.sources
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
