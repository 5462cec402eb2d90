//! Low-rank adapters of a model (LoRA).

use globset::Glob;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ModelConfigError;

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

/// Maximum rank of an adapter.
const MAX_RANK: usize = 65_536;

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
        let LoraConfig { rank, alpha, dropout, ref targets } = *self;
        let invalid = |key, value: String, range| Err(ModelConfigError::Lora { key, value, range });
        if !(1..=MAX_RANK).contains(&rank) {
            return invalid("rank", rank.to_string(), "from 1 to 65536");
        }
        if !(alpha > 0.0 && alpha.is_finite()) {
            return invalid("alpha", alpha.to_string(), "positive and finite");
        }
        if !(0.0..1.0).contains(&dropout) {
            return invalid("dropout", dropout.to_string(), "in [0, 1)");
        }
        if targets.is_empty() {
            return invalid("targets", "[]".to_owned(), "names or patterns of maps, such as \"*_proj\"");
        }
        if let Some(target) = targets.iter().find(|target| Glob::new(target).is_err()) {
            return invalid("targets", format!("\"{target}\""), "a valid pattern");
        }
        Ok(())
    }
}

/// Returns whether `target` selects the map with this full name. An invalid pattern selects none.
fn selects(target: &str, name: &str) -> bool {
    match target.contains(['*', '?']) {
        true => Glob::new(target).is_ok_and(|pattern| pattern.compile_matcher().is_match(name)),
        false => name == target || name.strip_suffix(target).is_some_and(|rest| rest.ends_with('.')),
    }
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
            ("layers.?.attention.[qv]*", "layers.1.attention.q_proj", true),
            ("layers.?.attention.[qv]*", "layers.1.attention.k_proj", false),
            ("layers.?.attention.?_proj", "layers.1.attention.q_proj", true),
            ("layers.?.attention.?_proj", "layers.12.attention.q_proj", false),
            ("*a*a*b", "aaaaaaaaaaaaaaaaaaaac", false),
            ("*", "", true),
        ] {
            assert_eq!(selects(target, name), expected, "{target} {name}");
        }
    }
}
