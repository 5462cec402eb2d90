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
    }
}

impl TensorEntry {
    /// Leaves out the arms of enums, which are the only segments of a name that begin with a capital letter.
    fn rename(&mut self) {
        let is_arm = |segment: &str| segment.starts_with(|first: char| first.is_ascii_uppercase());
        let name: Vec<_> = self.name.split('.').filter(|segment| !is_arm(segment)).collect();
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
