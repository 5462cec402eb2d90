//! The version of the program.

use std::sync::OnceLock;

static VERSION: OnceLock<String> = OnceLock::new();

/// Sets the version, commit and features of this program, as `kiln --version` prints them; the first call wins.
pub fn set_version(version: String) {
    VERSION.get_or_init(|| version);
}

/// Returns the version of this program, on one line.
pub fn version() -> &'static str {
    VERSION.get().map_or(env!("CARGO_PKG_VERSION"), String::as_str)
}
