//! Sealed traffic: records of four bytes of length, a body and an AES-128-GCM tag. The nonce is the record's number,
//! and each direction of each connection has its own key, so a changed, omitted, repeated or moved record cannot be
//! decrypted. A key is replaced by its hash before it has sealed more records than GCM allows.

use super::options::Seal;
use aes_gcm::aead::{AeadInOut, KeyInit};
use aes_gcm::{Aes128Gcm, Nonce, Tag};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};

const BODY: usize = 128 << 10;

const LENGTH: usize = 4;

const TAG: usize = 16;

/// Records sealed with one key: at most 512 GiB, about the limit of TLS 1.3 (RFC 8446, section 5.5).
const RECORDS_PER_KEY: u64 = 1 << 22;

pub(super) type Key = [u8; 16];

/// Returns the HMAC-SHA-256 of `text`. `role` separates hashes for different uses; no role may be a prefix of another.
pub(super) fn keyed(key: &[u8], role: &[u8], text: &[u8]) -> Hmac<Sha256> {
    let mac = <Hmac<Sha256> as Mac>::new_from_slice(key);
    let mac = mac.unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
    mac.chain_update(role).chain_update(text)
}

pub(super) fn derive(from: &[u8], role: &[u8], text: &[u8]) -> Key {
    let hash: [u8; 32] = keyed(from, role, text).finalize().into_bytes().into();
    std::array::from_fn(|index| hash[index])
}

/// The reason why a record cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The record is not what the other side sent at this position, or the keys differ.
    #[error("record {record} is not genuine: it was changed, repeated or moved on its way")]
    Forged {
        /// Number of the record on this connection, from 0.
        record: u64,
    },
    /// The record claims to be longer than allowed.
    #[error("record {record} claims {length} bytes, where at most {BODY} are allowed")]
    TooLong {
        /// Number of the record on this connection, from 0.
        record: u64,
        /// The claimed length in bytes.
        length: usize,
    },
    /// The connection ended inside the record.
    #[error("the connection ended inside record {record}")]
    Truncated {
        /// Number of the record on this connection, from 0.
        record: u64,
    },
}

impl From<SealError> for io::Error {
    fn from(error: SealError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }
}

struct Direction {
    key: Key,
    cipher: Aes128Gcm,
    next: u64,
}

impl Direction {
    fn new(seal: Seal, key: &Key) -> Option<Direction> {
        match seal {
            Seal::Off => None,
            Seal::Encrypt => Some(Direction { key: *key, cipher: Aes128Gcm::new(&(*key).into()), next: 0 }),
        }
    }

    fn advance(&mut self) {
        self.next += 1;
        if self.next.is_multiple_of(RECORDS_PER_KEY) {
            self.key = derive(&self.key, b"next key", &[]);
            self.cipher = Aes128Gcm::new(&self.key.into());
        }
    }

    fn nonce(&self) -> Nonce<aes_gcm::aead::consts::U12> {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.next.to_be_bytes());
        nonce.into()
    }
}

pub(super) struct Sealer {
    direction: Direction,
    record: Vec<u8>,
    sent: usize,
}

impl Sealer {
    pub(super) fn new(seal: Seal, key: &Key) -> Option<Box<Sealer>> {
        let direction = Direction::new(seal, key)?;
        Some(Box::new(Sealer { direction, record: Vec::new(), sent: 0 }))
    }

    /// Writes the start of `parts` as one record. Returns its number of content bytes once the record has been sent.
    /// After a temporary error, repeat the call with the same bytes, which more bytes may follow.
    pub(super) fn write(&mut self, mut to: impl Write, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.record.is_empty() {
            self.record.resize(LENGTH, 0);
            for part in parts {
                let room = LENGTH + BODY - self.record.len();
                self.record.extend_from_slice(&part[..part.len().min(room)]);
            }
            self.close()?;
            self.sent = 0;
        }
        while self.sent < self.record.len() {
            match to.write(&self.record[self.sent..])? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => self.sent += count,
            }
        }
        let len = self.record.len() - LENGTH - TAG;
        self.record.clear();
        Ok(len)
    }

    fn close(&mut self) -> io::Result<()> {
        let len = (self.record.len() - LENGTH) as u32;
        self.record[..LENGTH].copy_from_slice(&len.to_le_bytes());
        let nonce = self.direction.nonce();
        let (clear, body) = self.record.split_at_mut(LENGTH);
        let tag = self.direction.cipher.encrypt_inout_detached(&nonce, clear, body.into());
        let tag = tag.map_err(|_| io::Error::other("the cipher refuses a record"))?;
        self.record.extend_from_slice(&tag);
        self.direction.advance();
        Ok(())
    }
}

pub(super) struct Opener {
    direction: Direction,
    /// Starts with the record that is arriving or being read; the rest is spare room.
    record: Vec<u8>,
    whole: usize,
    filled: usize,
    /// Bytes of the body that have been read; `None` while the record is arriving.
    read: Option<usize>,
    failed: Option<SealError>,
}

impl Opener {
    pub(super) fn new(seal: Seal, key: &Key) -> Option<Box<Opener>> {
        let direction = Direction::new(seal, key)?;
        let record = vec![0; LENGTH];
        let whole = LENGTH;
        Some(Box::new(Opener { direction, record, whole, filled: 0, read: None, failed: None }))
    }

    /// Fills `parts` from opened records; returns 0 at the end of the connection.
    pub(super) fn read(&mut self, mut from: impl Read, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if let Some(error) = self.failed {
            return Err(error.into());
        }
        loop {
            if let Some(read) = self.read {
                let body = &self.record[LENGTH + read..self.whole - TAG];
                let mut count = 0;
                for part in parts.iter_mut() {
                    let some = part.len().min(body.len() - count);
                    part[..some].copy_from_slice(&body[count..count + some]);
                    count += some;
                }
                self.read = Some(read + count);
                if count == body.len() {
                    self.read = None;
                    self.filled = 0;
                    self.whole = LENGTH;
                }
                if count > 0 {
                    return Ok(count);
                }
                // Nothing was copied, because `parts` or the record is empty.
                if self.read.is_some() {
                    return Ok(0);
                }
            }
            match from.read(&mut self.record[self.filled..self.whole])? {
                0 if self.filled == 0 => return Ok(0),
                0 => return Err(self.fail(|record| SealError::Truncated { record })),
                count => self.filled += count,
            }
            if self.filled == LENGTH {
                self.make_room()?;
            } else if self.filled == self.whole {
                self.open()?;
            }
        }
    }

    fn make_room(&mut self) -> io::Result<()> {
        let length: [u8; LENGTH] = std::array::from_fn(|index| self.record[index]);
        let length = u32::from_le_bytes(length) as usize;
        if length > BODY {
            return Err(self.fail(|record| SealError::TooLong { record, length }));
        }
        self.whole = LENGTH + length + TAG;
        if self.record.len() < self.whole {
            self.record.resize(self.whole, 0);
        }
        Ok(())
    }

    fn open(&mut self) -> io::Result<()> {
        let end = self.whole - TAG;
        let tag: [u8; TAG] = std::array::from_fn(|index| self.record[end + index]);
        let nonce = self.direction.nonce();
        let (clear, body) = self.record[..end].split_at_mut(LENGTH);
        let cipher = &self.direction.cipher;
        if cipher.decrypt_inout_detached(&nonce, clear, body.into(), &Tag::from(tag)).is_err() {
            return Err(self.fail(|record| SealError::Forged { record }));
        }
        self.direction.advance();
        self.read = Some(0);
        Ok(())
    }

    fn fail(&mut self, error: impl FnOnce(u64) -> SealError) -> io::Error {
        let error = error(self.direction.next);
        self.failed = Some(error);
        error.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = *b"a key of a test.";

    fn sealed(texts: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut sealer = Sealer::new(Seal::Encrypt, &KEY).unwrap();
        let record = |text: &&[u8]| {
            let mut record = Vec::new();
            assert_eq!(sealer.write(&mut record, &[IoSlice::new(text)]).unwrap(), text.len());
            record
        };
        texts.iter().map(record).collect()
    }

    fn opened(bytes: &[u8]) -> (Vec<u8>, Option<SealError>) {
        let mut opener = Opener::new(Seal::Encrypt, &KEY).unwrap();
        let (mut from, mut all) = (bytes, Vec::new());
        loop {
            let mut some = [0; 7];
            match opener.read(&mut from, &mut [IoSliceMut::new(&mut some)]) {
                Ok(0) => return (all, None),
                Ok(count) => all.extend_from_slice(&some[..count]),
                Err(error) => {
                    let error = *error.get_ref().unwrap().downcast_ref::<SealError>().unwrap();
                    assert!(opener.read(&[][..], &mut [IoSliceMut::new(&mut some)]).is_err());
                    return (all, Some(error));
                }
            }
        }
    }

    #[test]
    fn records_come_back_as_they_went() {
        let records = sealed(&[b"first", b"", b"the second one"]);
        assert_eq!(opened(&records.concat()), (b"firstthe second one".to_vec(), None));
        let visible = records[2].windows(6).any(|window| window == b"second");
        assert!(!visible);
        assert!(Sealer::new(Seal::Off, &KEY).is_none() && Opener::new(Seal::Off, &KEY).is_none());
    }

    #[test]
    fn what_is_longer_than_a_record_becomes_several() {
        let long: Vec<u8> = (0..BODY + 100).map(|index| index as u8).collect();
        let mut sealer = Sealer::new(Seal::Encrypt, &KEY).unwrap();
        let mut bytes = Vec::new();
        let (head, tail) = long.split_at(24);
        let parts = [IoSlice::new(head), IoSlice::new(tail)];
        assert_eq!(sealer.write(&mut bytes, &parts).unwrap(), BODY);
        assert_eq!(sealer.write(&mut bytes, &[IoSlice::new(&long[BODY..])]).unwrap(), 100);
        assert_eq!(opened(&bytes), (long, None));
    }

    #[test]
    fn a_flipped_bit_is_noticed_wherever_it_is() {
        let records = sealed(&[b"before", b"payload"]);
        for bit in 0..records[1].len() * 8 {
            let mut changed = records.clone();
            changed[1][bit / 8] ^= 1 << (bit % 8);
            let (before, error) = opened(&changed.concat());
            assert!(before == b"before" && error.is_some(), "bit {bit}: {error:?}");
            if bit >= LENGTH * 8 {
                assert_eq!(error, Some(SealError::Forged { record: 1 }));
            }
        }
    }

    #[test]
    fn replayed_moved_or_missing_records_are_noticed() {
        let [a, b, c]: [Vec<u8>; 3] = sealed(&[b"a", b"b", b"c"]).try_into().unwrap();
        let forged = |record| Some(SealError::Forged { record });
        assert_eq!(opened(&[&*a, &*a].concat()), (b"a".to_vec(), forged(1)));
        assert_eq!(opened(&[&*a, &*c, &*b].concat()), (b"a".to_vec(), forged(1)));
        assert_eq!(opened(&b), (Vec::new(), forged(0)));
    }

    #[test]
    fn an_end_inside_a_record_is_noticed() {
        let bytes = sealed(&[b"whole", b"cut off"]).concat();
        let whole = LENGTH + 5 + TAG;
        for end in whole + 1..bytes.len() {
            let truncated = Some(SealError::Truncated { record: 1 });
            assert_eq!(opened(&bytes[..end]), (b"whole".to_vec(), truncated));
        }
    }

    #[test]
    fn a_length_beyond_all_records_takes_no_memory() {
        let error = SealError::TooLong { record: 0, length: u32::MAX as usize };
        assert_eq!(opened(&[0xff; 100]), (Vec::new(), Some(error)));
    }

    #[test]
    fn both_sides_change_keys_at_the_same_record() {
        let mut sealer = Sealer::new(Seal::Encrypt, &KEY).unwrap();
        let mut opener = Opener::new(Seal::Encrypt, &KEY).unwrap();
        for next in [0, RECORDS_PER_KEY - 1, RECORDS_PER_KEY] {
            (sealer.direction.next, opener.direction.next) = (next, next);
            let (mut record, mut text) = (Vec::new(), [0; 4]);
            sealer.write(&mut record, &[IoSlice::new(b"text")]).unwrap();
            opener.read(&record[..], &mut [IoSliceMut::new(&mut text)]).unwrap();
            assert_eq!(&text, b"text");
            assert_eq!(sealer.direction.key, opener.direction.key);
            assert_eq!(sealer.direction.key != KEY, next + 1 >= RECORDS_PER_KEY);
        }
    }

    #[test]
    fn a_record_that_leaves_in_pieces_is_one_record() {
        struct Slow(Vec<u8>, bool);
        impl Write for Slow {
            fn write(&mut self, from: &[u8]) -> io::Result<usize> {
                self.1 = !self.1;
                if self.1 {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                let some = from.len().min(3);
                self.0.extend_from_slice(&from[..some]);
                Ok(some)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut sealer = Sealer::new(Seal::Encrypt, &KEY).unwrap();
        let mut socket = Slow(Vec::new(), false);
        let mut attempts = 0;
        let texts = [&b"early"[..], b"early and late"];
        let count = loop {
            match sealer.write(&mut socket, &[IoSlice::new(texts[attempts.min(1)])]) {
                Ok(count) => break count,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
            attempts += 1;
        };
        assert_eq!((count, attempts > 1), (5, true));
        assert_eq!(opened(&socket.0), (b"early".to_vec(), None));
    }
}
