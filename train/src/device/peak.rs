//! What `mfu` is held against.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// FLOP/s that all devices of a run could reach in products of matrices. It never changes during a run, so that all
/// values of `mfu` have one scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    flops: f64,
    /// The file that earlier starts have kept their measurements in.
    kept: Option<PathBuf>,
    has_warned: bool,
}

impl Peak {
    /// A peak that is known: from the user, a data sheet, or a measurement that was just made.
    pub fn given(flops: f64) -> Self {
        Peak { flops, kept: None, has_warned: false }
    }

    /// A peak from the measurements in the file `kept`.
    pub(super) fn kept(flops: f64, kept: PathBuf) -> Self {
        Peak { kept: Some(kept), ..Peak::given(flops) }
    }

    /// FLOP/s.
    pub fn flops(&self) -> f64 {
        self.flops
    }

    /// The share of the peak that steps of `reached` FLOP/s are, from 0 to 1. More than 1 means that the peak is
    /// wrong, which is said once. Measurements that earlier starts have kept are removed then: the next starts make
    /// them again.
    pub fn share(&mut self, reached: f64) -> f64 {
        // A step without time measures nothing.
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
                // Another rank, or another run, may have removed it.
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
