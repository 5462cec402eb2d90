//! The training losses that a configuration can name: the cross-entropy, and those that a program adds.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use kiln_checkpoint::sharded::Pass;
use kiln_checkpoint::source::ModelSource;
use kiln_config::{CROSS_ENTROPY, ConfigError, LossSection, typed};
use kiln_model::layers::TokenLoss;
use kiln_model::panics::{message, named};
use kiln_model::settings::ReadKeys;
use serde::de::DeserializeOwned;

use crate::error::Result;
use crate::objective::{FrozenModel, Objective, ObjectiveContext, TokenBatch};

/// The section of the settings of custom losses.
const EXTRA: &str = "loss.extra";

/// The input of a function that makes a loss or an objective.
#[derive(Clone, Copy, Debug)]
pub struct LossInit<'a> {
    /// The section `[loss]`.
    pub section: &'a LossSection,
    frozen: &'a RefCell<Vec<FrozenModel>>,
    read: &'a ReadKeys,
}

impl LossInit<'_> {
    /// Reads the section `[loss.extra]`.
    ///
    /// # Errors
    ///
    /// If the section has keys unknown to `T`, or values of other types.
    pub fn extra<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        self.read.note::<T>(EXTRA);
        typed(EXTRA, &self.section.extra)
    }

    /// Requests the model that `[loss.frozen]` names `name`, for
    /// [`ObjectiveContext::frozen`](crate::objective::ObjectiveContext::frozen).
    ///
    /// # Errors
    ///
    /// If the section does not have the name.
    pub fn frozen_model(&self, name: &str) -> Result<FrozenModel, ConfigError> {
        let Some(path) = self.section.frozen.get(name) else {
            return Err(ConfigError::invalid(format!(
                "loss.frozen.{name} is missing: name the checkpoint that loss.kind = \"{}\" reads, as in --set \
                 loss.frozen.{name}=runs/base",
                self.section.kind
            )));
        };
        let model = FrozenModel { name: name.to_owned(), path: path.clone() };
        let mut frozen = self.frozen.borrow_mut();
        if !frozen.contains(&model) {
            frozen.push(model.clone());
        }
        Ok(model)
    }
}

/// The loss that a run minimises.
#[derive(Clone)]
pub enum Loss {
    /// The fused cross-entropy.
    CrossEntropy,
    /// A loss per token, given all logits.
    Token(TokenLoss),
    /// An objective that runs the model itself, and the frozen models that it reads.
    Objective(Arc<dyn Objective>, Vec<FrozenModel>),
}

impl Loss {
    /// Returns the loss per token that replaces the cross-entropy, if there is one.
    pub fn token(&self) -> Option<&TokenLoss> {
        match self {
            Loss::Token(loss) => Some(loss),
            Loss::CrossEntropy | Loss::Objective(..) => None,
        }
    }

    /// Returns how often the model runs in a pass.
    pub fn runs(&self) -> usize {
        match self {
            Loss::Objective(objective, _) => objective.runs(),
            Loss::CrossEntropy | Loss::Token(_) => 1,
        }
    }
}

impl fmt::Debug for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::CrossEntropy => "CrossEntropy",
            Loss::Token(_) => "Token",
            Loss::Objective(..) => "Objective",
        })
    }
}

/// The name of a loss in messages.
struct NameOf<'a>(&'a str);

impl fmt::Display for NameOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "loss.kind = \"{}\"", self.0)
    }
}

/// An objective whose panics have its name.
struct Named {
    kind: String,
    objective: Arc<dyn Objective>,
}

impl Objective for Named {
    fn loss(&self, pass: &Pass<'_>, batch: &TokenBatch, cx: &ObjectiveContext<'_>) -> Tensor<1> {
        named(NameOf(&self.kind), || self.objective.loss(pass, batch, cx))
    }

    fn runs(&self) -> usize {
        self.objective.runs()
    }

    fn is_evaluated(&self) -> bool {
        self.objective.is_evaluated()
    }
}

type Make<T> = Arc<dyn Fn(LossInit) -> Result<T, ConfigError> + Send + Sync>;

#[derive(Clone)]
enum Maker {
    Token(Make<TokenLoss>),
    Objective(Make<Arc<dyn Objective>>),
}

/// The losses that a program adds, by name.
#[derive(Clone, Default)]
pub struct Losses(BTreeMap<String, Maker>);

impl Losses {
    /// Adds a loss per token, which `make` creates from its settings; see `Registry::loss`.
    ///
    /// # Panics
    ///
    /// If the name is empty or taken.
    #[must_use]
    pub fn with(
        self,
        name: &str,
        make: impl Fn(LossInit) -> Result<TokenLoss, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        self.add(name, Maker::Token(Arc::new(make)))
    }

    /// Adds an objective, which `make` creates from its settings; see `Registry::objective`.
    ///
    /// # Panics
    ///
    /// If the name is empty or taken.
    #[must_use]
    pub fn with_objective<O: Objective + 'static>(
        self,
        name: &str,
        make: impl Fn(LossInit) -> Result<O, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        self.add(name, Maker::Objective(Arc::new(move |init| Ok(Arc::new(make(init)?)))))
    }

    fn add(mut self, name: &str, maker: Maker) -> Self {
        assert!(!name.is_empty(), "loss.kind: a loss needs a name");
        let is_taken = name == CROSS_ENTROPY || self.0.insert(name.to_owned(), maker).is_some();
        assert!(!is_taken, "loss.kind = \"{name}\" is a loss already: choose another name");
        self
    }

    /// Returns the loss that `section` names, without trying it on a model.
    ///
    /// # Errors
    ///
    /// If there is no loss of that name, or its settings are invalid.
    pub fn find(&self, section: &LossSection) -> Result<Loss, ConfigError> {
        if section.kind == CROSS_ENTROPY {
            let keys = section.extra.keys().map(|key| format!("loss.extra.{key}"));
            let mut keys = keys.chain(section.frozen.keys().map(|key| format!("loss.frozen.{key}")));
            return match keys.next() {
                None => Ok(Loss::CrossEntropy),
                Some(key) => Err(ConfigError::invalid(format!(
                    "{key}: the cross-entropy has no settings; [loss.extra] and [loss.frozen] are for custom losses"
                ))),
            };
        }
        let Some(maker) = self.0.get(&section.kind) else {
            let names = [CROSS_ENTROPY].into_iter().chain(self.0.keys().map(String::as_str));
            let known: Vec<_> = names.map(|name| format!("\"{name}\"")).collect();
            return Err(ConfigError::invalid(format!(
                "loss.kind = \"{}\": this program has no such loss, only {}. Run a custom loss with the program \
                 that registers it",
                section.kind,
                known.join(", ")
            )));
        };
        let (frozen, read) = (RefCell::default(), ReadKeys::default());
        let init = LossInit { section, frozen: &frozen, read: &read };
        let loss = match maker {
            Maker::Token(make) => Loss::Token(make(init)?),
            Maker::Objective(make) => {
                let objective = Named { kind: section.kind.clone(), objective: make(init)? };
                Loss::Objective(Arc::new(objective), frozen.take())
            }
        };
        read.check(EXTRA, &section.extra).map_err(|unread| ConfigError::invalid(unread.to_string()))?;
        let used: Vec<_> = match &loss {
            Loss::Objective(_, frozen) => frozen.iter().map(|model| &model.name).collect(),
            Loss::CrossEntropy | Loss::Token(_) => Vec::new(),
        };
        match section.frozen.keys().find(|name| !used.contains(name)) {
            None => Ok(loss),
            Some(name) => Err(ConfigError::invalid(format!(
                "loss.frozen.{name}: loss.kind = \"{}\" does not read a model of that name: remove it",
                section.kind
            ))),
        }
    }

    /// Returns the loss that `section` describes, for a vocabulary of `vocab_size`.
    ///
    /// # Errors
    ///
    /// As for [`Losses::find`]; if a loss per token does not return one value per token, or panics; and if a frozen model
    /// cannot be opened, or has fewer tokens.
    pub fn make(&self, section: &LossSection, vocab_size: usize) -> Result<Loss> {
        let made = self.find(section)?;
        match &made {
            Loss::CrossEntropy => {}
            Loss::Token(loss) => {
                try_token_loss(section, loss, vocab_size)?;
                let (kind, loss) = (section.kind.clone(), loss.clone());
                let of = move |logits, targets| named(NameOf(&kind), || loss.of(logits, targets));
                return Ok(Loss::Token(TokenLoss::new(of)));
            }
            Loss::Objective(_, frozen) => {
                for FrozenModel { name, path } in frozen {
                    let known = ModelSource::open(path)?.model().vocab_size;
                    if known < vocab_size {
                        return Err(ConfigError::invalid(format!(
                            "loss.frozen.{name}: the model in {} knows {known} tokens, and the trained model {vocab_size}: \
                             name a model with the same tokenizer",
                            path.display()
                        ))
                        .into());
                    }
                }
            }
        }
        Ok(made)
    }
}

/// Tries `loss` on two tokens, and fails if it panics or does not return one value for each.
fn try_token_loss(section: &LossSection, loss: &TokenLoss, vocab_size: usize) -> Result<(), ConfigError> {
    let tokens = 2;
    let device = Device::flex();
    let logits = Tensor::zeros([tokens, vocab_size], &device);
    // A custom loss may panic for this batch.
    let probe = || loss.of(logits, Tensor::zeros([tokens], &device)).dims();
    let shape = panic::catch_unwind(AssertUnwindSafe(probe)).map_err(|panic| {
        ConfigError::invalid(format!(
            "loss.kind = \"{}\" panics for {tokens} tokens with {vocab_size} logits each: {}",
            section.kind,
            message(&*panic)
        ))
    })?;
    if shape != [tokens] {
        return Err(ConfigError::invalid(format!(
            "loss.kind = \"{}\": for {tokens} tokens it returns {shape:?} instead of one loss per token, [{tokens}]",
            section.kind
        )));
    }
    Ok(())
}

impl fmt::Debug for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str) -> Losses {
        Losses::default().with(name, |_| Ok(TokenLoss::new(|logits, _| logits.sum_dim(1).squeeze_dim(1))))
    }

    #[test]
    fn unknown_losses_are_refused() {
        let losses = with("mine");
        let make = |text: &str| losses.make(&toml::from_str(text).expect("a section"), 4);
        assert!(matches!(make("").expect("the cross-entropy"), Loss::CrossEntropy));
        assert!(matches!(make("kind = 'mine'").expect("a loss"), Loss::Token(_)));
        let message = make("kind = 'focal'").expect_err("refused").to_string();
        assert!(
            message.contains("\"focal\"") && message.contains("only \"cross_entropy\", \"mine\""),
            "{message}"
        );
        let message = make("[extra]\ngamma = 2").expect_err("refused").to_string();
        assert!(message.contains("loss.extra.gamma"), "{message}");
        let summed = Losses::default().with("summed", |_| Ok(TokenLoss::new(|logits, _| logits.sum())));
        let section = toml::from_str("kind = 'summed'").expect("a section");
        let message = summed.make(&section, 4).expect_err("refused").to_string();
        assert!(message.contains("for 2 tokens it returns [1]"), "{message}");
        let broken = Losses::default().with("broken", |_| Ok(TokenLoss::new(|_, _| panic!("no {}", "idea"))));
        let message = broken.make(&toml::from_str("kind = 'broken'").expect("a section"), 4);
        let message = message.expect_err("refused").to_string();
        assert!(message.contains("\"broken\" panics for 2 tokens with 4 logits each: no idea"), "{message}");
    }

    #[test]
    fn settings_that_a_loss_does_not_read_are_refused() {
        #[derive(serde::Deserialize)]
        #[expect(dead_code, reason = "only the names of the fields are read")]
        struct Settings {
            gamma: f64,
        }
        let losses = with("plain").with("focal", |init| {
            init.extra::<Settings>()?;
            Ok(TokenLoss::new(|logits, _| logits.sum_dim(1).squeeze_dim(1)))
        });
        for (text, expected) in [
            (
                "kind = 'plain'\nextra.gamma = 2",
                "loss.extra.gamma: no part of this program reads this setting:",
            ),
            (
                "kind = 'focal'\nextra = { gamma = 2, gama = 1 }",
                "loss.extra.gama: no part of this program reads",
            ),
            ("kind = 'focal'\nextra = { gamma = 2, gama = 1 }", "this setting, only `gamma`: remove it"),
        ] {
            let message = losses.find(&toml::from_str(text).expect("a section")).expect_err("refused");
            assert!(message.to_string().contains(expected), "{message}");
        }
    }

    #[test]
    fn frozen_models_are_requested_by_name() {
        let losses = Losses::default().with_objective("pairs", |init| {
            let reference = init.frozen_model("reference")?;
            Ok(move |_: &Pass<'_>, _: &TokenBatch, cx: &ObjectiveContext<'_>| {
                cx.frozen(&reference);
                Tensor::zeros([1], &Device::flex())
            })
        });
        let find = |text: &str| losses.find(&toml::from_str(text).expect("a section"));
        let message = |text: &str| find(text).expect_err("refused").to_string();
        assert!(message("kind = 'pairs'").contains("--set loss.frozen.reference=runs/base"));
        let two = "kind = 'pairs'\nfrozen = { reference = 'a', other = 'b' }";
        assert!(
            message(two)
                .contains("loss.frozen.other: loss.kind = \"pairs\" does not read a model of that name")
        );
        let Loss::Objective(objective, frozen) =
            find("kind = 'pairs'\nfrozen.reference = 'a'").expect("an objective")
        else {
            panic!("an objective")
        };
        assert_eq!((objective.runs(), frozen[0].path.to_str()), (1, Some("a")));
    }

    #[test]
    #[should_panic(expected = "is a loss already")]
    fn the_cross_entropy_cannot_be_replaced() {
        let _ = with(CROSS_ENTROPY);
    }
}
