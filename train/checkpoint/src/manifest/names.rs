//! Names of parameters in checkpoints of older builds.

use super::{Manifest, TensorEntry};

/// The first version in which names have no arms of Rust enums. Until then, the gate of a feed-forward layer
/// was called `ffn.SwiGlu.gate_proj.weight`, and is now `ffn.gate_proj.weight`.
const WITHOUT_ARMS: u64 = 4;

impl Manifest {
    /// Gives parameters the names that this build has for them. Their files keep the old names.
    pub(super) fn rename(&mut self) {
        if self.format_version < WITHOUT_ARMS {
            self.tensors.iter_mut().for_each(TensorEntry::rename);
        }
        self.architecture.name_block(&mut self.state.model);
    }
}

impl TensorEntry {
    /// Leaves out the arms of enums.
    fn rename(&mut self) {
        let (path, last) = self.name.rsplit_once('.').unwrap_or(("", &self.name));
        let name: Vec<_> =
            path.split('.').filter(|part| !part.is_empty() && !is_arm(part)).chain([last]).collect();
        let name = name.join(".");
        if name != self.name {
            self.name_in_files = Some(std::mem::replace(&mut self.name, name));
        }
    }

    /// The key of this tensor in its files.
    pub fn key(&self) -> String {
        self.saved.key(self.name_in_files.as_deref().unwrap_or(&self.name))
    }
}

/// Whether a segment of a name is written as the arms of enums are, such as `SwiGlu`. Fields of one's own may
/// begin with a capital letter as well, such as `A_log`, `D` or `W_q`.
fn is_arm(segment: &str) -> bool {
    segment.starts_with(|first: char| first.is_ascii_uppercase())
        && segment.contains(|letter: char| letter.is_ascii_lowercase())
        && segment.chars().all(|letter| letter.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::is_arm;

    #[test]
    fn arms_of_enums_are_told_from_fields() {
        assert!(["SwiGlu", "Gelu", "Bf16"].into_iter().all(is_arm));
        assert!(!["A_log", "D", "W_q", "GATE", "gate_proj", "0", ""].into_iter().any(is_arm));
    }
}
