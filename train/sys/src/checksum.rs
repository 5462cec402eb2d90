use bytemuck::{Pod, Zeroable};
use crc_fast::{CrcAlgorithm, Digest, checksum, checksum_combine};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// A CRC-64/NVME checksum. Any damage within 64 bits changes it. Checksums of a file's parts combine into the checksum
/// of the file, so ranks can each read a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Checksum(u64);

impl Checksum {
    /// Name of the algorithm in manifests.
    pub const NAME: &'static str = "crc64nvme";

    /// Checksum of zero bytes.
    pub fn empty() -> Self {
        Checksum::of(&[])
    }

    /// Checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Checksum(checksum(ALGORITHM, bytes))
    }

    /// Returns the checksum of `self`'s bytes followed by `next`'s `length` bytes. Takes almost a millisecond; for
    /// consecutive bytes, use [`RunningChecksum`].
    pub fn then(self, next: Checksum, length: u64) -> Self {
        Checksum(checksum_combine(ALGORITHM, self.0, next.0, length))
    }

    /// Returns the checksum as a number.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// Creates a checksum from the number that [`Checksum::to_bits`] returned.
    pub fn from_bits(bits: u64) -> Self {
        Checksum(bits)
    }
}

/// Computes the [`Checksum`] of bytes that arrive piece by piece.
pub struct RunningChecksum(Digest);

impl Default for RunningChecksum {
    fn default() -> Self {
        RunningChecksum(Digest::new(ALGORITHM))
    }
}

impl RunningChecksum {
    /// Adds `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the checksum of all bytes so far.
    pub fn finish(&self) -> Checksum {
        Checksum(self.0.finalize())
    }
}

impl std::fmt::Display for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let parsed = u64::from_str_radix(&text, 16).ok().map(Checksum);
        parsed
            .filter(|checksum| checksum.to_string() == text)
            .ok_or_else(|| serde::de::Error::custom(format!("`{text}` is not a checksum")))
    }
}

#[cfg(test)]
mod tests {
    use super::{Checksum, RunningChecksum};

    /// Expected values: the catalogue of parametrised CRC algorithms.
    #[test]
    fn it_is_the_crc_that_it_is_called() {
        assert_eq!(Checksum::of(b"123456789").to_string(), "ae8b14860a799888");
        assert_eq!(Checksum::empty().to_string(), "0000000000000000");
    }

    #[test]
    fn parts_make_the_whole() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i * i % 251) as u8).collect();
        let whole = Checksum::of(&bytes);
        for cut in [0, 1, 7, 4096, 9_999, 10_000] {
            let (head, tail) = bytes.split_at(cut);
            let joined = Checksum::of(head).then(Checksum::of(tail), tail.len() as u64);
            assert_eq!(joined, whole, "{cut}");
            let mut running = RunningChecksum::default();
            running.update(head);
            assert_eq!(running.finish(), Checksum::of(head), "{cut}");
            running.update(tail);
            assert_eq!(running.finish(), whole, "{cut}");
        }
    }

    #[test]
    fn only_its_own_spelling_is_read() {
        let read = |text: &str| serde_json::from_str::<Checksum>(&format!("\"{text}\""));
        assert_eq!(read("00000000000000ff").unwrap(), Checksum::from_bits(255));
        for wrong in ["ff", "00000000000000FF", "+0000000000000ff", "00000000000000fg", ""] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
