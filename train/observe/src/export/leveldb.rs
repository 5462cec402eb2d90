//! The log format of LevelDB, which files of Weights & Biases are in: records, cut where a block ends
//! (<https://github.com/google/leveldb/blob/main/doc/log_format.md>). Unlike LevelDB's, such a file has a header, and
//! its checksums are CRC-32 as in zlib, without a mask.

use std::io::{self, Write};

use crc_fast::{CrcAlgorithm, Digest};

/// What a file begins with: `:W&B`, a number that stands for them, and the version of the format.
const FILE_HEADER: &[u8] = b":W&B\xe1\xbe\0";

/// Bytes of a block. The header of the file is in the first.
const BLOCK: usize = 1 << 15;

/// Bytes before the data of a fragment: checksum, length and kind.
const FRAGMENT_HEADER: usize = 7;

/// Kinds of fragments of a record.
const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// Writes records.
pub(super) struct Log<W> {
    to: W,
    /// Bytes of the block that are written.
    filled: usize,
}

impl<W: Write> Log<W> {
    /// Begins a file.
    pub(super) fn new(mut to: W) -> io::Result<Self> {
        to.write_all(FILE_HEADER)?;
        Ok(Log { to, filled: FILE_HEADER.len() })
    }

    /// Writes a record.
    pub(super) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        let mut rest = record;
        let mut is_first = true;
        loop {
            let left = BLOCK - self.filled;
            if left < FRAGMENT_HEADER {
                self.to.write_all(&[0; FRAGMENT_HEADER][..left])?;
                self.filled = 0;
                continue;
            }
            let (fragment, after) = rest.split_at(rest.len().min(left - FRAGMENT_HEADER));
            let kind = match (is_first, after.is_empty()) {
                (true, true) => FULL,
                (true, false) => FIRST,
                (false, false) => MIDDLE,
                (false, true) => LAST,
            };
            self.fragment(kind, fragment)?;
            if after.is_empty() {
                return Ok(());
            }
            (rest, is_first) = (after, false);
        }
    }

    fn fragment(&mut self, kind: u8, data: &[u8]) -> io::Result<()> {
        let mut crc = Digest::new(CrcAlgorithm::Crc32IsoHdlc);
        crc.update(&[kind]);
        crc.update(data);
        // The checksum has 32 bits, and data is shorter than a block.
        self.to.write_all(&(crc.finalize() as u32).to_le_bytes())?;
        self.to.write_all(&(data.len() as u16).to_le_bytes())?;
        self.to.write_all(&[kind])?;
        self.to.write_all(data)?;
        self.filled += FRAGMENT_HEADER + data.len();
        Ok(())
    }

    /// Ends the file, and hands out what it was written to.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.to.flush()?;
        Ok(self.to)
    }
}

/// The records of a file.
#[cfg(test)]
pub(super) fn read(bytes: &[u8]) -> Vec<Vec<u8>> {
    assert_eq!(&bytes[..FILE_HEADER.len()], FILE_HEADER);
    let (mut at, mut records) = (FILE_HEADER.len(), Vec::new());
    let mut record: Option<Vec<u8>> = None;
    while at < bytes.len() {
        let left = BLOCK - at % BLOCK;
        if left < FRAGMENT_HEADER {
            assert!(bytes[at..at + left].iter().all(|byte| *byte == 0));
            at += left;
            continue;
        }
        let length = usize::from(u16::from_le_bytes([bytes[at + 4], bytes[at + 5]]));
        let kind = bytes[at + 6];
        let data = &bytes[at + FRAGMENT_HEADER..at + FRAGMENT_HEADER + length];
        let mut crc = Digest::new(CrcAlgorithm::Crc32IsoHdlc);
        crc.update(&bytes[at + 6..at + FRAGMENT_HEADER + length]);
        assert_eq!((crc.finalize() as u32).to_le_bytes(), bytes[at..at + 4]);
        assert_eq!(record.is_none(), matches!(kind, FULL | FIRST), "at {at}");
        record.get_or_insert_default().extend_from_slice(data);
        if matches!(kind, FULL | LAST) {
            records.extend(record.take());
        }
        at += FRAGMENT_HEADER + length;
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_cut_where_blocks_end() {
        // Ends of blocks with no room, room for a header alone, and little room; records over several blocks.
        let lengths = [1, BLOCK - 7 - 8 - 7 - 6, 5, BLOCK - 12 - 14, 9, 3 * BLOCK, BLOCK - 7, 100];
        let records: Vec<Vec<u8>> =
            lengths.iter().zip(1..).map(|(length, byte)| vec![byte; *length]).collect();
        let mut log = Log::new(Vec::new()).unwrap();
        records.iter().for_each(|record| log.append(record).unwrap());
        assert_eq!(read(&log.finish().unwrap()), records);
    }

    #[test]
    fn a_record_has_the_bytes_of_the_format() {
        let mut log = Log::new(Vec::new()).unwrap();
        log.append(b"abc").unwrap();
        // As `DataStore` of wandb 0.19.11 writes b"abc".
        let golden = b":W&B\xe1\xbe\x00\xa9\x20\x9d\x53\x03\x00\x01abc";
        assert_eq!(log.finish().unwrap(), golden);
    }
}
