#[cfg(feature = "cuda")]
use std::fmt;

#[cfg(feature = "cuda")]
use super::error::Version;
use crate::Precision;

/// The specifications of a GPU model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DataSheet {
    /// Name of the GPU for `kiln plan --gpu`.
    pub name: &'static str,
    part: &'static str,
    /// Memory in GiB that is available to programs.
    pub memory_gib: f64,
    /// Dense TFLOP/s in bf16 and f16 on tensor cores, with f32 accumulation.
    bf16: f64,
    f32: f64,
    /// Memory bandwidth in GB/s.
    pub bandwidth: f64,
    /// Bandwidth in GB/s, in one direction, to other GPUs of the same machine: over NVLink, or else PCIe.
    pub link: f64,
}

const fn sheet(
    name: &'static str,
    part: &'static str,
    [memory_gib, bf16, f32, bandwidth, link]: [f64; 5],
) -> DataSheet {
    DataSheet { name, part, memory_gib, bf16, f32, bandwidth, link }
}

/// The known GPUs. If several entries match a driver's name, the first one applies.
const DATA_SHEETS: &[DataSheet] = &[
    sheet("b200", "B200", [179.0, 2250.0, 75.0, 7700.0, 900.0]),
    sheet("gh200", "GH200", [95.0, 989.5, 67.0, 4000.0, 450.0]),
    sheet("h200", "H200", [139.8, 989.5, 67.0, 4800.0, 450.0]),
    sheet("h100-nvl", "H100 NVL", [93.0, 835.5, 60.0, 3900.0, 300.0]),
    sheet("h100-pcie", "H100 PCIe", [79.1, 756.0, 51.0, 2000.0, 64.0]),
    sheet("h100", "H100", [79.6, 989.5, 67.0, 3350.0, 450.0]),
    sheet("h800", "H800", [79.6, 989.5, 67.0, 3350.0, 200.0]),
    sheet("h20", "H20", [95.0, 148.0, 44.0, 4000.0, 450.0]),
    sheet("a100-40", "A100-SXM4-40GB", [39.4, 312.0, 19.5, 1555.0, 300.0]),
    sheet("a100-pcie-40", "A100-PCIE-40GB", [39.4, 312.0, 19.5, 1555.0, 32.0]),
    sheet("a100-80", "A100", [79.2, 312.0, 19.5, 2039.0, 300.0]),
    sheet("a800", "A800", [79.2, 312.0, 19.5, 2039.0, 200.0]),
    sheet("l40s", "L40S", [44.4, 362.0, 91.6, 864.0, 32.0]),
    sheet("l40", "L40", [44.4, 181.0, 90.5, 864.0, 32.0]),
    sheet("l4", "L4", [22.5, 121.0, 30.3, 300.0, 32.0]),
    sheet("a40", "A40", [44.4, 149.7, 37.4, 696.0, 32.0]),
    sheet("a30", "A30", [23.6, 165.0, 10.3, 933.0, 32.0]),
    sheet("a10", "A10", [22.5, 125.0, 31.2, 600.0, 32.0]),
    sheet("rtx4090", "RTX 4090", [23.5, 165.2, 82.6, 1008.0, 32.0]),
    sheet("rtx3090", "RTX 3090", [23.6, 71.0, 35.6, 936.0, 32.0]),
    sheet("rtx6000-ada", "RTX 6000 Ada", [47.5, 182.1, 91.1, 960.0, 32.0]),
];

impl DataSheet {
    /// Returns the data sheet of the GPU that its driver calls `name`, if it is in the table.
    pub fn from_driver_name(name: &str) -> Option<&'static DataSheet> {
        // Match whole words: an RTX A4000 is not an A40.
        let is_whole = |part: &str| {
            name.match_indices(part).any(|(at, _)| {
                let after = name[at + part.len()..].chars().next();
                !after.is_some_and(|next| next.is_ascii_alphanumeric())
            })
        };
        DATA_SHEETS.iter().find(|sheet| is_whole(sheet.part))
    }

    /// Returns the data sheet with this name.
    pub fn named(name: &str) -> Option<&'static DataSheet> {
        DATA_SHEETS.iter().find(|sheet| sheet.name.eq_ignore_ascii_case(name))
    }

    /// Lists the names that [`DataSheet::named`] knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        DATA_SHEETS.iter().map(|sheet| sheet.name)
    }

    /// Returns the peak FLOP/s of matrix products.
    pub fn peak_flops(&self, precision: Precision) -> f64 {
        1e12 * if precision == Precision::F32 { self.f32 } else { self.bf16 }
    }

    /// Returns this data sheet with these FLOP/s in matrix products and bytes per second of memory, where they are set.
    pub fn with_speed(mut self, flops: Option<f64>, bandwidth: Option<f64>) -> Self {
        if let Some(flops) = flops {
            (self.bf16, self.f32) = (flops / 1e12, flops / 1e12);
        }
        self.bandwidth = bandwidth.map_or(self.bandwidth, |bandwidth| bandwidth / 1e9);
        self
    }

    /// Returns the size of the GPU's memory in bytes.
    pub fn memory(&self) -> u64 {
        (self.memory_gib * f64::from(1 << 30)) as u64
    }
}

/// A GPU as its driver describes it.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Number of the GPU among the GPUs that this process sees.
    pub index: usize,
    /// Name of the GPU.
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
    /// Unique id of the GPU.
    pub uuid: [u8; 16],
    /// Number of GPUs that this process sees, including this one.
    pub visible: usize,
}

#[cfg(feature = "cuda")]
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

#[cfg(feature = "cuda")]
impl Gpu {
    /// Returns the peak FLOP/s in matrix products, from the data sheet, else from multiprocessors and clock.
    pub fn peak_flops(&self, precision: Precision) -> f64 {
        if let Some(sheet) = DataSheet::from_driver_name(&self.name) {
            return sheet.peak_flops(precision);
        }
        // FLOP per multiprocessor and clock cycle (CUDA C++ Programming Guide, arithmetic throughput).
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

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::{Gpu, Precision, Version};

    fn gpu(name: &str, capability: Version, multiprocessors: u32, clock: f64) -> Gpu {
        let (name, uuid) = (name.to_owned(), [0; 16]);
        let visible = 1;
        Gpu { index: 0, name, capability, memory: 0, free: 0, multiprocessors, clock, uuid, visible }
    }

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
