//! Whether anything is said at all.

use std::sync::atomic::{AtomicUsize, Ordering};

/// How many want silence.
static SILENT: AtomicUsize = AtomicUsize::new(0);

/// While a value of this type lives, [`say`](super::say) says nothing, and there is no bar: for runs that are part of a
/// command with something else to say. Errors and warnings are told.
#[derive(Debug)]
#[must_use]
pub struct Silence(());

/// Nothing is said from now on.
pub fn silence() -> Silence {
    SILENT.fetch_add(1, Ordering::Relaxed);
    Silence(())
}

impl Drop for Silence {
    fn drop(&mut self) {
        SILENT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether anyone wants silence.
pub(super) fn is_silent() -> bool {
    SILENT.load(Ordering::Relaxed) > 0
}
