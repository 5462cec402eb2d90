//! The number of kernels that a process compiled or found in the cache.

use std::fmt;
use std::ops::Sub;
use std::time::Duration;

use kiln_sys::words::{number_of, took};

/// Kernel counts of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelCounts {
    /// Kernels compiled earlier, and taken from the cache.
    pub taken: u64,
    /// Kernels compiled by NVRTC.
    pub compiled: u64,
    /// Total compile time of all threads.
    pub compiling: Duration,
}

#[cfg(feature = "cuda")]
impl From<kiln_nvidia::kernel_cache::Counts> for KernelCounts {
    fn from(counts: kiln_nvidia::kernel_cache::Counts) -> Self {
        let kiln_nvidia::kernel_cache::Counts { taken, compiled, compiling } = counts;
        KernelCounts { taken, compiled, compiling }
    }
}

impl Sub for KernelCounts {
    type Output = Self;

    /// Subtracts the counts `earlier` of an earlier moment.
    fn sub(self, earlier: Self) -> Self {
        KernelCounts {
            taken: self.taken.saturating_sub(earlier.taken),
            compiled: self.compiled.saturating_sub(earlier.compiled),
            compiling: self.compiling.saturating_sub(earlier.compiling),
        }
    }
}

impl fmt::Display for KernelCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KernelCounts { taken, compiled, compiling } = *self;
        write!(f, "{} from the cache, {compiled} compiled", number_of(taken, "kernel"))?;
        if compiled > 0 { write!(f, " in {}", took(compiling)) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_in_words() {
        let none = KernelCounts { taken: 41, ..KernelCounts::default() };
        assert_eq!(none.to_string(), "41 kernels from the cache, 0 compiled");
        let some = KernelCounts { taken: 42, compiled: 2, compiling: Duration::from_millis(1500) };
        assert_eq!((some - none).to_string(), "1 kernel from the cache, 2 compiled in 1.5 s");
    }
}
