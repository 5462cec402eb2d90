//! The framing of TensorFlow's record files, the format of event files:
//! <https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details>.

use crc_fast::{CrcAlgorithm, checksum};

/// Size of a record's header in bytes: the length and its checksum.
pub(super) const HEADER: usize = 12;

/// Size of a record's trailer in bytes: the checksum of the data.
pub(super) const TRAILER: usize = 4;

/// Returns the length of the data from the header of a record; `None` if the header is invalid.
pub(super) fn length(header: &[u8]) -> Option<u64> {
    let (length, crc) = header.split_first_chunk::<8>()?;
    let is_header = u32::from_le_bytes(crc.try_into().ok()?) == masked_crc(length);
    is_header.then_some(u64::from_le_bytes(*length))
}

/// Frames `data` as one record: its length, the masked CRC-32C of the length, the data, and their masked
/// CRC-32C, all little-endian.
pub(super) fn framed(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked_crc(&length).to_le_bytes());
    record.extend_from_slice(data);
    record.extend_from_slice(&masked_crc(data).to_le_bytes());
    record
}

/// Returns the CRC-32C of `data`, rotated and shifted: the data of record files often contains other
/// checksums, and the CRC of data that contains its own CRC is useless.
fn masked_crc(data: &[u8]) -> u32 {
    // The checksum has 32 bits.
    let crc = checksum(CrcAlgorithm::Crc32Iscsi, data) as u32;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Returns the data of the records in `bytes`, and the bytes after the last complete record.
#[cfg(test)]
pub(super) fn read(mut bytes: &[u8]) -> (Vec<&[u8]>, &[u8]) {
    let mut records = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<8>() {
        let Some((crc, rest)) = rest.split_first_chunk::<4>() else { break };
        assert_eq!(masked_crc(length), u32::from_le_bytes(*crc), "the checksum of a length");
        let Some((data, rest)) = rest.split_at_checked(u64::from_le_bytes(*length) as usize) else { break };
        let Some((crc, rest)) = rest.split_first_chunk::<4>() else { break };
        assert_eq!(masked_crc(data), u32::from_le_bytes(*crc), "the checksum of data");
        records.push(data);
        bytes = rest;
    }
    (records, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_the_bytes_of_the_format() {
        // Written by TensorBoard's own `RecordWriter` for b"abc".
        let golden = b"\x03\0\0\0\0\0\0\0\xb0\x99\x49\x0eabc\x6e\x57\xf1\x21";
        assert_eq!(framed(b"abc"), golden);
        let bytes = [framed(b"abc"), framed(b""), framed(b"d")[..12].to_vec()].concat();
        let (all, rest) = read(&bytes);
        assert_eq!((all, rest.len()), (vec![&b"abc"[..], b""], 12));
    }
}
