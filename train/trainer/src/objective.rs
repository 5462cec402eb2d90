//! Training objectives that run the model themselves: several times, on other tokens, or next to frozen models.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;

use burn::tensor::{Device, Int, Tensor};
use kiln_checkpoint::sharded::{Pass, ShardedDecoder};
use kiln_model::{Context, decoder};
use kiln_shard::ShardError;

/// A training objective. It runs the model on a micro-batch, and returns a loss; sharding, accumulation, clipping,
/// logs, checkpoints and resumption are those of every run. Add one with
/// [`Registry::objective`](crate::registry::Registry::objective).
///
/// Closures of the form `|pass, batch, cx| loss` are objectives that run the model once. This one trains on later tokens
/// twice as much as on the first half of a sequence:
///
/// ```
/// use kiln_checkpoint::sharded::Pass;
/// use kiln_train::objective::{ObjectiveContext, TokenBatch};
/// use kiln_train::registry::Registry;
///
/// let registry = Registry::default().objective("later", |_| {
///     Ok(|pass: &Pass<'_>, batch: &TokenBatch, cx: &ObjectiveContext<'_>| {
///         let [rows, seq] = batch.targets.dims();
///         let half = batch.weights().slice([0..rows, 0..seq / 2]) * 0.5;
///         let weights = batch.weights().slice_assign([0..rows, 0..seq / 2], half);
///         let hidden = cx.hidden(pass, batch.inputs.clone());
///         cx.cross_entropy(pass, hidden, batch.targets.clone(), Some(weights))
///     })
/// });
/// ```
pub trait Objective: Send + Sync {
    /// Returns the loss of a micro-batch, `[1]`. The losses of all micro-batches and ranks are added up: multiply a
    /// sum over tokens by [`ObjectiveContext::scale`], or a sum over samples by the reciprocal of
    /// [`ObjectiveContext::samples`].
    ///
    /// Every rank must make the same calls on `pass`, and on frozen models, regardless of its tokens: each gathers weights
    /// from all ranks.
    fn loss(&self, pass: &Pass<'_>, batch: &TokenBatch, cx: &ObjectiveContext<'_>) -> Tensor<1>;

    /// Returns how often [`Objective::loss`] runs the trained model. A step in which it runs more or less often fails,
    /// because other ranks would wait for its collectives.
    fn runs(&self) -> usize {
        1
    }

    /// Returns whether evaluations compute the objective on the validation data, for `val_objective` in
    /// `metrics.jsonl`. The last batch may have samples that do not count: their weights are 0 and their targets
    /// negative, so a mean over samples must leave them out.
    fn is_evaluated(&self) -> bool {
        true
    }
}

impl<F> Objective for F
where
    F: Fn(&Pass<'_>, &TokenBatch, &ObjectiveContext<'_>) -> Tensor<1> + Send + Sync,
{
    fn loss(&self, pass: &Pass<'_>, batch: &TokenBatch, cx: &ObjectiveContext<'_>) -> Tensor<1> {
        self(pass, batch, cx)
    }
}

/// The tokens of a micro-batch, on the device.
#[derive(Clone, Debug)]
pub struct TokenBatch {
    /// Input tokens, `[batch, seq]`.
    pub inputs: Tensor<2, Int>,
    /// Target tokens, `[batch, seq]`: for each input, the token that follows it. Negative targets do not count.
    pub targets: Tensor<2, Int>,
    /// A weight for each target, `[batch, seq]`, if the data have weights. A sample whose weights are all 0 does not
    /// count.
    pub weights: Option<Tensor<2>>,
}

impl TokenBatch {
    /// Returns the weights of the targets, `[batch, seq]`: ones if the data have none.
    pub fn weights(&self) -> Tensor<2> {
        let ones = || Tensor::ones(self.targets.dims(), &self.targets.device());
        self.weights.clone().unwrap_or_else(ones)
    }
}

/// A model whose weights an objective reads, but does not train: a name of `[loss.frozen]` and its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrozenModel {
    /// Its name in `[loss.frozen]`.
    pub name: String,
    /// A checkpoint, a run folder, or a folder in the Hugging Face layout.
    pub path: PathBuf,
}

/// The step's normalisation, and operations for the loss of an objective.
pub struct ObjectiveContext<'a> {
    scale: f64,
    samples: f64,
    share: f64,
    context: &'a Context,
    frozen: &'a [(String, ShardedDecoder)],
    device: Device,
    runs: Cell<u64>,
    head_runs: Cell<u64>,
    added: RefCell<Option<Tensor<1>>>,
}

/// The position of a micro-batch among all tokens that are averaged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weighting {
    /// The reciprocal of the sum of all weights.
    pub(crate) scale: f64,
    /// The number of all samples.
    pub(crate) samples: f64,
    /// The micro-batch's share of all tokens.
    pub(crate) share: f64,
}

impl<'a> ObjectiveContext<'a> {
    pub(crate) fn new(
        weighting: Weighting,
        context: &'a Context,
        frozen: &'a [(String, ShardedDecoder)],
        device: &Device,
    ) -> Self {
        let Weighting { scale, samples, share } = weighting;
        let device = device.clone().inner();
        let (runs, head_runs, added) = (Cell::new(0), Cell::new(0), RefCell::new(None));
        ObjectiveContext { scale, samples, share, context, frozen, device, runs, head_runs, added }
    }

    /// Returns the factor of a sum over tokens: one divided by the sum of the weights of all targets of the step, over
    /// all ranks and micro-batches.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Returns the number of samples of the step, over all ranks and micro-batches.
    pub fn samples(&self) -> f64 {
        self.samples
    }

    /// Returns the micro-batch's share of the step's tokens. A sum times [`ObjectiveContext::scale`] divided by it is the
    /// mean of the micro-batch, for [`ObjectiveContext::record`].
    pub fn share(&self) -> f64 {
        self.share
    }

    /// Runs the blocks on `tokens` `[batch, seq]`, with as many rows as the micro-batch, and returns the residual stream
    /// before the head, `[batch, seq, d_model]`. Losses that layers add are part of the training loss. Each run of a pass
    /// has separate dropout masks.
    pub fn hidden(&self, pass: &Pass<'_>, tokens: Tensor<2, Int>) -> Tensor<3> {
        let context = self.context.for_run(self.runs.replace(self.runs.get() + 1));
        let (x, added) = decoder::hidden_with_loss(pass, tokens, self.share, &context);
        let mut sum = self.added.borrow_mut();
        *sum = sum.take().into_iter().chain(added).reduce(|a, b| a + b);
        x
    }

    /// Runs the layer of the head that `model.head_layer` names on `x` `[batch, seq, d_model]`, and returns the same
    /// shape. Losses that it adds do not count.
    ///
    /// # Panics
    ///
    /// If the model has no such layer.
    pub fn head_layer(&self, pass: &Pass<'_>, x: Tensor<3>) -> Tensor<3> {
        let context = self.context.for_run(self.head_runs.replace(self.head_runs.get() + 1));
        decoder::head_layer(pass, x, &context)
    }

    /// Runs the model on `tokens` `[batch, seq]`, and returns the logits, `[batch, seq, vocab_size]`, in the compute dtype.
    pub fn logits(&self, pass: &Pass<'_>, tokens: Tensor<2, Int>) -> Tensor<3> {
        decoder::head_logits(pass, self.hidden(pass, tokens))
    }

    /// Runs the model on `inputs` `[batch, seq]`, and returns the log-probability of each of `targets`, `[batch, seq]`.
    /// Holds the logits of all positions.
    pub fn log_probabilities(
        &self,
        pass: &Pass<'_>,
        inputs: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> Tensor<2> {
        decoder::log_probabilities(pass, self.hidden(pass, inputs), targets)
    }

    /// Returns the fused cross-entropy of `targets` `[batch, seq]` given the residual stream `hidden` `[batch, seq,
    /// d_model]`: the sum over all targets that are not negative, times their `weights` `[batch, seq]`, which
    /// are constants, and [`ObjectiveContext::scale`], as `[1]`. Holds the logits of a few positions at a time.
    pub fn cross_entropy(
        &self,
        pass: &Pass<'_>,
        hidden: Tensor<3>,
        targets: Tensor<2, Int>,
        weights: Option<Tensor<2>>,
    ) -> Tensor<1> {
        let context = self.context.clone().with_token_loss(None).with_target_weights(weights);
        decoder::head_loss(pass, hidden, targets, self.scale, &context)
    }

    /// Returns a model of `[loss.frozen]`.
    ///
    /// # Panics
    ///
    /// If `model` is not from [`LossInit::frozen_model`](crate::losses::LossInit::frozen_model), or in
    /// [`Trainer::train_step_with`](crate::run::Trainer::train_step_with), which has no frozen models.
    pub fn frozen(&self, model: &FrozenModel) -> Frozen<'_> {
        let found = self.frozen.iter().find(|(name, _)| *name == model.name);
        let Some((_, decoder)) = found else {
            panic!(
                "the objective has no frozen model \"{}\": request it with LossInit::frozen_model, in an \
                 objective of the registry",
                model.name
            )
        };
        Frozen { decoder, device: &self.device }
    }

    /// Logs `value` `[1]`, the mean of the micro-batch, as `objective.<name>`: its mean over the step.
    pub fn record(&self, name: &str, value: Tensor<1>) {
        self.context.record_at("objective", name, value, self.share);
    }

    /// Returns `loss` with the losses that layers have added.
    pub(crate) fn total(&self, loss: Tensor<1>) -> Tensor<1> {
        match self.added.take() {
            Some(added) => loss + added.mul_scalar(self.share),
            None => loss,
        }
    }
}

/// A model that an objective reads without training it. Its weights are sharded like those of the trained model.
pub struct Frozen<'a> {
    decoder: &'a ShardedDecoder,
    device: &'a Device,
}

impl Frozen<'_> {
    /// Returns the logits for `tokens` `[batch, seq]`, `[batch, seq, vocab_size]`, without gradient.
    pub fn logits(&self, tokens: &Tensor<2, Int>) -> Tensor<3> {
        let pass = self.decoder.pass(self.device);
        let logits = decoder::logits(&pass, tokens.clone().inner());
        self.free();
        logits
    }

    /// Returns the log-probability of each of `targets` given `inputs`, all `[batch, seq]`, without gradient.
    pub fn log_probabilities(&self, inputs: &Tensor<2, Int>, targets: &Tensor<2, Int>) -> Tensor<2> {
        let pass = self.decoder.pass(self.device);
        let hidden = decoder::hidden(&pass, inputs.clone().inner(), &Context::evaluation());
        let log_p = decoder::log_probabilities(&pass, hidden, targets.clone().inner());
        self.free();
        log_p
    }

    fn free(&self) {
        // The engine keeps a failure, which `check_frozen` returns after the pass.
        let _ = self.decoder.engine().finish_evaluation();
    }
}

/// Returns the first failure of a frozen model's collectives.
pub(crate) fn check_frozen(frozen: &[(String, ShardedDecoder)]) -> Result<(), ShardError> {
    frozen.iter().try_for_each(|(_, model)| model.engine().check())
}
