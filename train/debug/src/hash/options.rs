use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use clap::ValueEnum;

use super::record::StepPhase;
use crate::steps;

/// Kinds of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HashedKind {
    /// Inputs and outputs of modules and layers in the forward pass.
    Activations,
    /// The gradients of activations in backward, and the reduced gradients of parameters.
    Gradients,
    /// The weights before the first selected step, and after the update of each selected step.
    Weights,
    /// The state of the optimizer, at the same times as the weights.
    Moments,
}

/// The tensors and steps to hash: `steps=1-20`, `steps=5,activations,weights` or `steps=1-20,modules`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashOptions {
    /// The optimizer steps, from 1.
    pub steps: RangeInclusive<u64>,
    /// Set if a module has one hash per kind instead of one per tensor, which makes smaller files.
    pub by_module: bool,
    /// Kinds of tensors. Tokens, loss and norm are always included.
    pub kinds: Vec<HashedKind>,
}

impl HashOptions {
    /// Selects every tensor of `steps`.
    pub fn all(steps: RangeInclusive<u64>) -> Self {
        HashOptions { steps, by_module: false, kinds: HashedKind::value_variants().to_vec() }
    }

    pub(super) fn has(&self, kind: HashedKind) -> bool {
        self.kinds.contains(&kind)
    }

    pub(super) fn has_pass(&self, phase: StepPhase) -> bool {
        self.has(match phase {
            StepPhase::Backward => HashedKind::Gradients,
            _ => HashedKind::Activations,
        })
    }
}

/// The error for an invalid selection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{problem}; write steps=1-20, or steps=5,activations,gradients,weights,moments, or steps=1-20,modules"
)]
pub struct HashOptionsError {
    problem: String,
}

impl FromStr for HashOptions {
    type Err = HashOptionsError;

    fn from_str(text: &str) -> Result<Self, HashOptionsError> {
        let wrong = |problem: String| HashOptionsError { problem };
        let mut parts = text.split(',').map(str::trim);
        let steps = steps::parse(parts.next().unwrap_or_default()).map_err(wrong)?;
        let mut options = HashOptions { kinds: Vec::new(), ..HashOptions::all(steps) };
        for part in parts {
            match HashedKind::from_str(part, false) {
                Ok(kind) if !options.kinds.contains(&kind) => options.kinds.push(kind),
                Ok(_) => {}
                Err(_) if part == "modules" => options.by_module = true,
                Err(_) => return Err(wrong(format!("\"{part}\" is not a kind of tensor"))),
            }
        }
        if options.kinds.is_empty() {
            options.kinds = HashedKind::value_variants().to_vec();
        }
        Ok(options)
    }
}

impl fmt::Display for HashOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "steps={}-{}", self.steps.start(), self.steps.end())?;
        if self.by_module {
            f.write_str(",modules")?;
        }
        let mut names = self.kinds.iter().filter_map(ValueEnum::to_possible_value);
        names.try_for_each(|name| write!(f, ",{}", name.get_name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_options_round_trip() {
        let parsed = |text: &str| text.parse::<HashOptions>();
        assert_eq!(parsed("steps=1-20"), Ok(HashOptions::all(1..=20)));
        let one = HashOptions { steps: 5..=5, by_module: true, kinds: vec![HashedKind::Weights] };
        assert_eq!(parsed("steps=5, modules, weights"), Ok(one.clone()));
        assert_eq!(parsed(&one.to_string()), Ok(one));
        for (text, problem) in [
            ("", "expected steps="),
            ("1-20", "expected steps="),
            ("steps=0", "numbered from 1"),
            ("steps=1-", "not a step"),
            ("steps=3-2", "before"),
            ("steps=1,logits", "not a kind"),
        ] {
            let error = parsed(text).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("write steps=1-20"), "{text}: {error}");
        }
    }
}
