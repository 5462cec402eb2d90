//! The reference for `mfu`: the peak of all devices of a run in matrix products, which the first runs measure.
//!
//! Other programs can only slow a measurement down, so the best one counts, once a second one comes close.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use kiln_nvidia::{cache_folder, environment};
use kiln_sys::durable::write_atomic;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::cpu::cores_of_machine;

/// Peak FLOP/s of all devices of a run in matrix products; constant during a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    flops: f64,
    kept: Option<PathBuf>,
    has_warned: bool,
}

impl Peak {
    /// Creates a known peak: from the user, a data sheet, or a measurement that was just made.
    pub fn given(flops: f64) -> Self {
        Peak { flops, kept: None, has_warned: false }
    }

    pub(super) fn kept(flops: f64, kept: PathBuf) -> Self {
        Peak { kept: Some(kept), ..Peak::given(flops) }
    }

    /// Returns the peak in FLOP/s.
    pub fn flops(&self) -> f64 {
        self.flops
    }

    /// Returns the share of the peak that steps of `reached` FLOP/s achieve. A share above 1 means a wrong peak: warns
    /// once, and removes the stored measurements, so that the next starts measure again.
    pub fn share(&mut self, reached: f64) -> f64 {
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
                "mfu is above 100 %: steps reach {reached:.3} TFLOP/s, and device.peak_tflops, the data \
                 sheet or a measurement gives {peak:.3}"
            ),
            Some(file) => {
                // Another rank, or another run, may have removed the file.
                let _ = fs::remove_file(file);
                tracing::warn!(
                    "mfu is above 100 %: steps reach {reached:.3} TFLOP/s, and earlier runs have measured {peak:.3}. \
                     The next runs measure the peak again; device.peak_tflops sets it"
                );
            }
        }
    }
}

/// Minimum ratio of the second-best to the best measurement for a peak to be known.
const AGREEMENT: f64 = 0.95;

const KEPT: usize = 4;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Key {
    device: String,
    cores: Option<usize>,
    threads: usize,
    dtype: String,
    /// Version of the program, since its kernels may become faster.
    version: String,
}

impl Key {
    pub(super) fn new(device: String, threads: usize, dtype: &str) -> Self {
        let (dtype, version) = (dtype.to_owned(), env!("CARGO_PKG_VERSION").to_owned());
        Key { device, cores: cores_of_machine(), threads, dtype, version }
    }

    pub(super) fn file(&self) -> Option<PathBuf> {
        let digest = Sha256::digest(format!("{self:?}"));
        Some(cache_folder(&environment)?.join("peaks").join(format!("{digest:x}.json")))
    }
}

pub(super) fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// The content of a file of measurements. A damaged file, or one for another key, counts as empty.
#[derive(Serialize, Deserialize)]
struct Kept {
    key: Key,
    measured: Vec<f64>,
}

impl Kept {
    fn read(file: &Path, key: &Key) -> Self {
        let read = || serde_json::from_slice::<Kept>(&fs::read(file).ok()?).ok();
        let kept = read().filter(|kept| kept.key == *key);
        kept.unwrap_or_else(|| Kept { key: key.clone(), measured: Vec::new() })
    }

    fn agreed(&self) -> Option<f64> {
        match self.measured[..] {
            [best, second, ..] if second >= AGREEMENT * best => Some(best),
            _ => None,
        }
    }

    fn add(&mut self, measured: f64) {
        self.measured.push(measured);
        self.measured.sort_by(|a, b| b.total_cmp(a));
        self.measured.truncate(KEPT);
    }
}

/// Returns the FLOP/s of `key`, or `None` until two measurements in `file` agree. Until then, calls `measure` once and
/// stores the result. A file that cannot be written is not an error: the next start measures again.
pub(super) fn known(
    file: &Path,
    key: &Key,
    measure: impl FnOnce() -> io::Result<f64>,
) -> io::Result<Option<f64>> {
    let mut kept = Kept::read(file, key);
    if let Some(best) = kept.agreed() {
        return Ok(Some(best));
    }
    kept.add(measure()?);
    if let Err(error) = write(file, &kept) {
        tracing::debug!("cannot keep the measured peak: writing {} failed: {error}", file.display());
    }
    Ok(kept.agreed())
}

fn write(file: &Path, kept: &Kept) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    write_atomic(file, &serde_json::to_vec_pretty(kept)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_is_constant_during_a_run() {
        let mut peak = Peak::given(2e12);
        assert_eq!((peak.share(1e12), peak.share(4e12), peak.share(1e12)), (0.5, 2.0, 0.5));
    }

    #[test]
    fn exceeded_peak_is_forgotten() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("peak.json");
        fs::write(&file, "{}").expect("a file");
        let mut peak = Peak::kept(2e12, file.clone());
        assert_eq!(peak.share(1e12), 0.5);
        assert!(file.exists());
        assert_eq!((peak.share(4e12), peak.share(1e12)), (2.0, 0.5));
        assert!(!file.exists());
    }

    fn starts(file: &Path, key: &Key, measurements: &[f64]) -> (Vec<Option<f64>>, usize) {
        let mut made = 0;
        let known = measurements.iter().map(|measured| {
            known(file, key, || {
                made += 1;
                Ok(*measured)
            })
            .expect("measured")
        });
        (known.collect(), made)
    }

    #[test]
    fn peak_is_measured_until_two_agree() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("peaks").join("cpu.json");
        let key = Key::new("a processor".to_owned(), 2, "f32");
        let (found, made) = starts(&file, &key, &[100.0, 20.0, 60.0, 97.0, 300.0, 10.0]);
        assert_eq!(found, [None, None, None, Some(100.0), Some(100.0), Some(100.0)]);
        assert_eq!(made, 4, "starts that measured");
        let other = Key { threads: 4, ..key.clone() };
        assert_ne!(other.file(), key.file());
        assert_eq!(starts(&file, &other, &[50.0]), (vec![None], 1));
        fs::write(&file, "{").expect("a damaged file");
        assert_eq!(starts(&file, &key, &[70.0, 70.0]), (vec![None, Some(70.0)], 2));
    }

    #[test]
    fn peak_needs_a_folder() {
        let file = Path::new("/dev/null/peaks/cpu.json");
        let key = Key::new("a processor".to_owned(), 2, "f32");
        assert_eq!(starts(file, &key, &[100.0, 100.0]), (vec![None, None], 2));
    }
}
