//! The reference for `mfu`.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Peak FLOP/s of all devices of a run in matrix products. It never changes during a run, so that all values of
/// `mfu` have one scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    flops: f64,
    /// The file with the measurements of earlier starts.
    kept: Option<PathBuf>,
    has_warned: bool,
}

impl Peak {
    /// Creates a known peak: from the user, a data sheet, or a measurement that was just made.
    pub fn given(flops: f64) -> Self {
        Peak { flops, kept: None, has_warned: false }
    }

    /// Creates a peak from the measurements in the file `kept`.
    pub(super) fn kept(flops: f64, kept: PathBuf) -> Self {
        Peak { kept: Some(kept), ..Peak::given(flops) }
    }

    /// Returns the peak in FLOP/s.
    pub fn flops(&self) -> f64 {
        self.flops
    }

    /// Returns the share of the peak that steps of `reached` FLOP/s achieve, from 0 to 1. More than 1 means
    /// that the peak is wrong, which is reported once. The measurements of earlier starts are then removed: the
    /// next starts measure again.
    pub fn share(&mut self, reached: f64) -> f64 {
        // A step that took no time measures nothing.
        if reached > self.flops && reached.is_finite() && !self.has_warned {
            self.has_warned = true;
            self.warn(reached);
        }
        reached / self.flops.max(1.0)
    }

    fn warn(&self, reached: f64) {
        let [reached, peak] = [reached, self.flops].map(|flops| flops / 1e12);
        match &self.kept {
            None => tracing::warn!(
                "mfu is above 100 %: steps reach {reached:.3} TFLOP/s, and device.peak_tflops, the data sheet or a \
                 measurement says {peak:.3}"
            ),
            Some(file) => {
                // Another rank, or another run, may have removed the file.
                let _ = fs::remove_file(file);
                tracing::warn!(
                    "mfu is above 100 %: steps reach {reached:.3} TFLOP/s, and earlier starts have measured {peak:.3}. \
                     The next starts measure it again; device.peak_tflops sets it"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_stays_for_the_whole_run() {
        let mut peak = Peak::given(2e12);
        assert_eq!((peak.share(1e12), peak.share(4e12), peak.share(1e12)), (0.5, 2.0, 0.5));
    }

    #[test]
    fn a_peak_that_steps_exceed_is_forgotten() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("peak.json");
        fs::write(&file, "{}").expect("a file");
        let mut peak = Peak::kept(2e12, file.clone());
        assert_eq!(peak.share(1e12), 0.5);
        assert!(file.exists());
        assert_eq!((peak.share(4e12), peak.share(1e12)), (2.0, 0.5));
        assert!(!file.exists());
    }
}
