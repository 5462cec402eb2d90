//! Low-rank adapters of a model (LoRA).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ModelConfigError, at_least_one, at_most, in_range};

/// Low-rank adapters (Hu et al., 2021) of linear maps in the blocks: `y = x W + alpha / rank · dropout(x) A B`. The
/// adapters are trained, all other weights are frozen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoraConfig {
    /// Columns of `A` and rows of `B`.
    pub rank: usize,
    /// Scale of the adapters, times `rank`.
    pub alpha: f64,
    /// Probability of dropping an element of an adapter's input.
    pub dropout: f64,
    /// The maps with an adapter. A name, such as `q_proj`, selects the maps with that name; a pattern with `*` or `?`
    /// selects maps by their full names, such as `layers.0.attention.q_proj`. Routers and experts have no adapters.
    pub targets: Vec<String>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        LoraConfig { rank: 16, alpha: 32.0, dropout: 0.0, targets: vec!["*_proj".to_owned()] }
    }
}

impl LoraConfig {
    /// Returns the factor of the result of an adapter.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Returns whether the map `name`, such as `layers.0.attention.q_proj`, has an adapter.
    pub fn adapts(&self, name: &str) -> bool {
        self.targets.iter().any(|target| selects(target, name))
    }

    /// Returns the first target that selects none of the maps `names`.
    pub fn unused_target<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Option<&str> {
        let is_unused = |target: &&String| !names.clone().any(|name| selects(target, name));
        self.targets.iter().find(is_unused).map(String::as_str)
    }

    /// Checks that the settings are in range.
    pub(super) fn validate(&self) -> Result<(), ModelConfigError> {
        at_least_one("lora.rank", self.rank)?;
        at_most("lora.rank", self.rank, super::MAX_SIZE)?;
        in_range("lora.alpha", self.alpha, self.alpha > 0.0, "positive and finite")?;
        in_range("lora.dropout", self.dropout, (0.0..1.0).contains(&self.dropout), "in [0, 1)")?;
        if self.targets.is_empty() {
            return Err(ModelConfigError::NoTargets);
        }
        Ok(())
    }
}

/// Returns whether `target` selects the map with this full name.
fn selects(target: &str, name: &str) -> bool {
    match target.contains(['*', '?']) {
        true => matches(target.as_bytes(), name.as_bytes()),
        false => name == target || name.strip_suffix(target).is_some_and(|rest| rest.ends_with('.')),
    }
}

/// Matches `text` against a pattern, in which `*` stands for any text and `?` for one character.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    // The end of the last `*` in the pattern, and the text that it has not consumed yet.
    let (mut p, mut t, mut star) = (0, 0, None);
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p + 1, t));
                p += 1;
            }
            Some(wanted) if *wanted == b'?' || *wanted == text[t] => (p, t) = (p + 1, t + 1),
            _ => {
                let Some((after, consumed)) = star else { return false };
                star = Some((after, consumed + 1));
                (p, t) = (after, consumed + 1);
            }
        }
    }
    pattern[p..].iter().all(|rest| *rest == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_select_maps() {
        for (target, name, expected) in [
            ("q_proj", "layers.0.attention.q_proj", true),
            ("attention.q_proj", "layers.0.attention.q_proj", true),
            ("proj", "layers.0.attention.q_proj", false),
            ("layers.1.ffn.up_proj", "layers.1.ffn.up_proj", true),
            ("layers.1.ffn.up_proj", "layers.11.ffn.up_proj", false),
            ("*_proj", "layers.11.ffn.up_proj", true),
            ("*.attention.*", "layers.11.ffn.up_proj", false),
            ("layers.?.attention.[qv]*", "layers.1.attention.q_proj", false),
            ("layers.?.attention.?_proj", "layers.1.attention.q_proj", true),
            ("layers.?.attention.?_proj", "layers.12.attention.q_proj", false),
            ("*a*a*b", "aaaaaaaaaaaaaaaaaaaac", false),
            ("*", "", true),
        ] {
            assert_eq!(selects(target, name), expected, "{target} {name}");
        }
    }
}
