//! One GPU.

use std::fmt;

use super::data_sheet::DataSheet;
use super::error::Version;
use crate::Precision;

/// A GPU as its driver describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Its number among the GPUs that this process sees.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: Version,
    /// Total memory in bytes.
    pub memory: u64,
    /// Memory in bytes that was free when the GPU was examined.
    pub free: u64,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum clock in Hz.
    pub clock: f64,
    /// Its unique id.
    pub uuid: [u8; 16],
    /// Number of GPUs that this process sees, including this one.
    pub visible: usize,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        write!(
            f,
            "{} ({}, compute capability {}, {:.1} of {:.1} GiB free)",
            self.index,
            self.name,
            self.capability,
            gib(self.free),
            gib(self.memory)
        )
    }
}

impl Gpu {
    /// Returns the peak FLOP/s in matrix products: from its data sheet, or else from its multiprocessors at the
    /// maximum clock.
    pub fn peak_flops(&self, precision: Precision) -> f64 {
        if let Some(sheet) = DataSheet::of_driver(&self.name) {
            return sheet.peak_flops(precision);
        }
        // Per multiprocessor and clock (CUDA C++ Programming Guide, arithmetic throughput).
        let per_clock = match (precision, self.capability) {
            (Precision::F32, Version(8, 0)) => 128.0,
            (Precision::F32, _) => 256.0,
            (_, Version(10, _)) => 8192.0,
            (_, Version(9, _)) => 4096.0,
            (_, Version(8, 0) | Version(8, 7)) => 2048.0,
            (_, _) => 1024.0,
        };
        per_clock * f64::from(self.multiprocessors) * self.clock
    }
}

#[cfg(test)]
mod tests {
    use super::{Gpu, Precision, Version};

    fn gpu(name: &str, capability: Version, multiprocessors: u32, clock: f64) -> Gpu {
        let (name, uuid) = (name.to_owned(), [0; 16]);
        let visible = 1;
        Gpu { index: 0, name, capability, memory: 0, free: 0, multiprocessors, clock, uuid, visible }
    }

    /// With an unknown name, a GPU gets nearly the peak of its data sheet, at the clock assumed there.
    #[test]
    fn data_sheets_and_multiprocessors_agree() {
        for (name, capability, multiprocessors, clock) in [
            ("NVIDIA H100 80GB HBM3", Version(9, 0), 132, 1.83e9),
            ("NVIDIA A100-SXM4-80GB", Version(8, 0), 108, 1.41e9),
            ("NVIDIA L40S", Version(8, 9), 142, 2.52e9),
        ] {
            for precision in [Precision::Bf16, Precision::F32] {
                let known = gpu(name, capability, multiprocessors, clock).peak_flops(precision);
                let other = gpu("a GPU", capability, multiprocessors, clock).peak_flops(precision);
                let ratio = other / known;
                assert!((0.9..1.1).contains(&ratio), "{name} {precision:?}: {known} {other}");
            }
        }
    }
}
