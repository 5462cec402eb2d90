//! A custom training loss, with all commands of `kiln`: cross-entropy with smoothed labels (Szegedy et al.,
//! 2016).
//!
//!     cargo run --release --example own_loss -- train configs/quickstart.toml \
//!         --set loss.kind=label_smoothing --set loss.extra.smoothing=0.2

use std::process::ExitCode;

use burn::tensor::activation::log_softmax;
use kiln::config::ConfigError;
use kiln::losses::LossInit;
use kiln::process::CountingAllocator;
use kiln::registry::Registry;
use kiln_model::layers::TokenLoss;
use serde::Deserialize;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The section `[loss.extra]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    /// The share of the target's probability that is spread over all tokens.
    smoothing: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { smoothing: 0.1 }
    }
}

/// Returns the loss of each token, `[tokens]`, given its logits, `[tokens, vocab_size]`, and its target,
/// `[tokens]`: (1 - ε) · −log p(target) + ε · mean of −log p over the vocabulary.
fn label_smoothing(init: LossInit) -> Result<TokenLoss, ConfigError> {
    let Settings { smoothing } = init.extra()?;
    Ok(TokenLoss::new(move |logits, targets| {
        let log_p = log_softmax(logits, 1);
        let of_target = log_p.clone().gather(1, targets.unsqueeze_dim(1));
        let loss = of_target * (smoothing - 1.0) - log_p.mean_dim(1) * smoothing;
        loss.squeeze_dim(1)
    }))
}

fn main() -> ExitCode {
    kiln::cli::main(Registry::default().loss("label_smoothing", label_smoothing))
}
