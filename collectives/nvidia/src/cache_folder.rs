//! The location of the user's caches.

use std::path::PathBuf;

use crate::places::Lookup;

/// Returns Kiln's cache folder according to the XDG Base Directory Specification: `$XDG_CACHE_HOME/kiln`, or
/// `~/.cache/kiln`. `None` if neither is known.
pub fn cache_folder(lookup: &Lookup) -> Option<PathBuf> {
    let absolute = |path: &PathBuf| path.is_absolute();
    let base = lookup("XDG_CACHE_HOME").filter(absolute);
    let base = base.or_else(|| Some(lookup("HOME").filter(absolute)?.join(".cache")))?;
    Some(base.join("kiln"))
}
