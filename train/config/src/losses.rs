//! The training losses that a configuration can name: the cross-entropy, and those that a program adds.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use kiln_model::layers::TokenLoss;
use kiln_shard::ranks::panic_message;
use serde::de::DeserializeOwned;

use crate::{CROSS_ENTROPY, ConfigError, LossSection, typed};

/// The input of a function that makes a loss.
#[derive(Clone, Copy, Debug)]
pub struct LossInit<'a> {
    /// The section `[loss]`.
    pub section: &'a LossSection,
}

impl LossInit<'_> {
    /// Reads the section `[loss.extra]`.
    ///
    /// # Errors
    ///
    /// If the section has keys unknown to `T`, or values of other types.
    pub fn extra<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        typed("loss.extra", &self.section.extra)
    }
}

type Make = Arc<dyn Fn(LossInit) -> Result<TokenLoss, ConfigError> + Send + Sync>;

/// The losses that a program adds, by name.
#[derive(Clone, Default)]
pub struct Losses(BTreeMap<String, Make>);

impl Losses {
    /// Adds a loss, which `make` creates from its settings; see `Registry::loss`.
    ///
    /// # Panics
    ///
    /// If the name is empty or taken.
    #[must_use]
    pub fn with(
        mut self,
        name: &str,
        make: impl Fn(LossInit) -> Result<TokenLoss, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        assert!(!name.is_empty(), "loss.kind: a loss needs a name");
        let is_taken = name == CROSS_ENTROPY || self.0.insert(name.to_owned(), Arc::new(make)).is_some();
        assert!(!is_taken, "loss.kind = \"{name}\" is a loss already: choose another name");
        self
    }

    /// Returns the loss that `section` names, without trying it on a model; `None` for the cross-entropy.
    ///
    /// # Errors
    ///
    /// If there is no loss of that name, or its settings are invalid.
    pub fn find(&self, section: &LossSection) -> Result<Option<TokenLoss>, ConfigError> {
        if section.kind == CROSS_ENTROPY {
            return match section.extra.keys().next() {
                None => Ok(None),
                Some(key) => Err(ConfigError::invalid(format!(
                    "loss.extra.{key}: the cross-entropy has no settings; [loss.extra] is for custom losses"
                ))),
            };
        }
        let Some(make) = self.0.get(&section.kind) else {
            let names = [CROSS_ENTROPY].into_iter().chain(self.0.keys().map(String::as_str));
            let known: Vec<_> = names.map(|name| format!("\"{name}\"")).collect();
            return Err(ConfigError::invalid(format!(
                "loss.kind = \"{}\": this program has no such loss, only {}. Run a custom loss with the program \
                 that registers it",
                section.kind,
                known.join(", ")
            )));
        };
        make(LossInit { section }).map(Some)
    }

    /// Returns the loss that `section` describes, for a vocabulary of `vocab_size`; `None` for the cross-entropy.
    ///
    /// # Errors
    ///
    /// As for [`Losses::find`], and if the loss does not return one value per token, or panics.
    pub fn make(&self, section: &LossSection, vocab_size: usize) -> Result<Option<TokenLoss>, ConfigError> {
        let Some(loss) = self.find(section)? else { return Ok(None) };
        let tokens = 2;
        let device = Device::flex();
        let logits = Tensor::zeros([tokens, vocab_size], &device);
        // A custom loss may panic for this batch.
        let probe = || loss.of(logits, Tensor::zeros([tokens], &device)).dims();
        let shape = panic::catch_unwind(AssertUnwindSafe(probe)).map_err(|panic| {
            ConfigError::invalid(format!(
                "loss.kind = \"{}\" panics for {tokens} tokens with {vocab_size} logits each: {}",
                section.kind,
                panic_message(&*panic)
            ))
        })?;
        if shape != [tokens] {
            return Err(ConfigError::invalid(format!(
                "loss.kind = \"{}\": for {tokens} tokens it returns {shape:?} instead of one loss per token, [{tokens}]",
                section.kind
            )));
        }
        Ok(Some(loss))
    }
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
        assert!(make("").expect("the cross-entropy").is_none());
        assert!(make("kind = 'mine'").expect("a loss").is_some());
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
    #[should_panic(expected = "is a loss already")]
    fn the_cross_entropy_cannot_be_replaced() {
        let _ = with(CROSS_ENTROPY);
    }
}
