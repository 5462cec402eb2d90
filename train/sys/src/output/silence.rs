//! Suppressing all output.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of live [`Silence`] guards.
static SILENT: AtomicUsize = AtomicUsize::new(0);

/// While a value of this type lives, [`say`](super::say) writes nothing, and there is no bar: for runs that
/// are part of a command with different output. Errors and warnings are still shown.
#[derive(Debug)]
#[must_use]
pub struct Silence(());

/// Suppresses output from now on.
pub fn silence() -> Silence {
    SILENT.fetch_add(1, Ordering::Relaxed);
    Silence(())
}

impl Drop for Silence {
    fn drop(&mut self) {
        SILENT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns true if output is suppressed.
pub(super) fn is_silent() -> bool {
    SILENT.load(Ordering::Relaxed) > 0
}
