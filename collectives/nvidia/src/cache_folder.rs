//! Where this user's caches are.

use std::path::PathBuf;

use crate::places::Lookup;

/// Kiln's folder for caches, as the XDG Base Directory Specification has it: `$XDG_CACHE_HOME/kiln`, or
/// `~/.cache/kiln`. `None` where neither is known.
pub fn cache_folder(lookup: &Lookup) -> Option<PathBuf> {
    let absolute = |path: &PathBuf| path.is_absolute();
    let base = lookup("XDG_CACHE_HOME").filter(absolute);
    let base = base.or_else(|| Some(lookup("HOME").filter(absolute)?.join(".cache")))?;
    Some(base.join("kiln"))
}
