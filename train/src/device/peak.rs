//! What `mfu` is held against.

use std::io;

use serde::{Deserialize, Serialize};

use super::cpu::measure_peak_flops;
use crate::config::Precision;

/// FLOP/s that all devices of a run could reach in products of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    flops: f64,
    origin: Origin,
}

/// Where the number comes from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Origin {
    /// The user, a data sheet, or a measurement that cannot be made again.
    Given { told: bool },
    /// A product of matrices on this machine.
    Measured(Measurement),
    /// Steps that were faster than that.
    Reached,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Measurement {
    precision: Precision,
    threads: usize,
    /// Machines, if all are like this one.
    machines: f64,
}

impl Measurement {
    fn make(self) -> io::Result<f64> {
        Ok(measure_peak_flops(self.precision, self.threads)? * self.machines)
    }
}

impl Peak {
    /// A peak that is known.
    pub fn given(flops: f64) -> Self {
        Peak { flops, origin: Origin::Given { told: false } }
    }

    /// The peak of so many machines, from products of matrices on `threads` threads of this one.
    ///
    /// # Errors
    ///
    /// If the system does not start them.
    pub(super) fn measured(precision: Precision, threads: usize, machines: f64) -> io::Result<Self> {
        let measurement = Measurement { precision, threads, machines };
        Ok(Peak { flops: measurement.make()?, origin: Origin::Measured(measurement) })
    }

    /// FLOP/s.
    pub fn flops(&self) -> f64 {
        self.flops
    }

    /// The share of the peak that steps of `reached` FLOP/s are, from 0 to 1. If it were more than 1, the
    /// peak was measured while other programs kept the processors busy: it is measured again, once, and is
    /// then at least what steps have reached. One that was given stays as it is, which is said once.
    pub fn share(&mut self, reached: f64) -> f64 {
        // A step without time is none to measure by.
        if reached > self.flops && reached.is_finite() {
            self.correct(reached);
        }
        reached / self.flops.max(1.0)
    }

    fn correct(&mut self, reached: f64) {
        let before = self.flops;
        match self.origin {
            Origin::Given { told: true } => {}
            Origin::Given { told: false } => {
                self.origin = Origin::Given { told: true };
                tracing::warn!(
                    "mfu is above 100 %: steps reach {:.3} TFLOP/s, and device.peak_tflops, or the data \
                     sheet, says {:.3}",
                    reached / 1e12,
                    before / 1e12
                );
            }
            Origin::Measured(measurement) => {
                // Steps go on without it.
                let again = measurement.make().unwrap_or(0.0);
                *self = Peak { flops: reached.max(again), origin: Origin::Reached };
                tracing::warn!(
                    "mfu was above 100 %, because the peak was measured while the machine was busy: it is \
                     {:.3} TFLOP/s now and was {:.3}; device.peak_tflops sets it for good",
                    self.flops / 1e12,
                    before / 1e12
                );
            }
            Origin::Reached => self.flops = reached,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_that_steps_exceed_was_measured_wrong() {
        let measurement = Measurement { precision: Precision::F32, threads: 1, machines: 1.0 };
        let mut peak = Peak { flops: 2.0, origin: Origin::Measured(measurement) };
        assert_eq!(peak.share(1.0), 0.5);
        assert_eq!(peak.flops(), 2.0);
        // Any processor makes more than that.
        let share = peak.share(4.0);
        assert!(share < 0.001, "measured again: {share}");
        // More than any processor makes.
        assert_eq!(peak.share(1e30), 1.0);
        assert_eq!(peak.share(5e29), 0.5);
    }

    #[test]
    fn a_peak_that_was_given_stays() {
        let mut peak = Peak::given(2e12);
        assert_eq!((peak.share(1e12), peak.share(4e12), peak.share(1e12)), (0.5, 2.0, 0.5));
    }
}
