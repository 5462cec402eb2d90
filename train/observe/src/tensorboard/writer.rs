//! Writes event files in the format of TensorFlow's record files:
//! <https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details>.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, checksum};
use kiln_sys::{Records, files};
use prost::Message;

use super::event::{self, now};
use super::proto::{Event, What};

/// Seconds since 1970 follow this prefix.
const PREFIX: &str = "events.out.tfevents.";

/// Marks files written by Kiln.
const SUFFIX: &str = ".kiln";

const MOST_RECORD: u64 = 1 << 30;

/// Length and its checksum, in bytes.
const HEADER: usize = 12;

/// Checksum of the data, in bytes.
const TRAILER: usize = 4;

fn length(header: &[u8]) -> Option<u64> {
    let (length, crc) = header.split_first_chunk::<8>()?;
    let is_header = u32::from_le_bytes(crc.try_into().ok()?) == masked_crc(length);
    is_header.then_some(u64::from_le_bytes(*length))
}

/// Frames `data` as a record: length, masked CRC-32C of the length, data, masked CRC-32C of the data; little-endian.
fn framed(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked_crc(&length).to_le_bytes());
    record.extend_from_slice(data);
    record.extend_from_slice(&masked_crc(data).to_le_bytes());
    record
}

/// Returns the rotated and shifted CRC-32C: a plain CRC is useless for data that contains its own CRC.
fn masked_crc(data: &[u8]) -> u32 {
    let crc = checksum(CrcAlgorithm::Crc32Iscsi, data) as u32;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Writes an event file. A failed write leaves no partial event, and is logged.
pub(crate) struct EventWriter {
    records: Records,
    first: Vec<u8>,
}

impl EventWriter {
    /// Starts a new event file in `folder`, and removes events of the step `first` and later ones from earlier files.
    pub(crate) fn create(folder: &Path, first: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let existing = event_files(folder)?;
        // A new run changes no existing file, which may belong to another run.
        let is_ours = |path: &Path| path.to_string_lossy().ends_with(SUFFIX);
        let mut earlier = existing.iter().filter(|(_, path)| first > 0 && is_ours(path));
        earlier.try_for_each(|(_, path)| cut(path, first))?;
        let (records, time) = (Records::open(&next_file(folder, &existing), "event")?, now());
        let first = [event::version(time), event::start(time, first)];
        let first = first.iter().flat_map(|event| framed(&event.encode_to_vec())).collect();
        Ok(EventWriter { records, first })
    }

    pub(crate) fn write(&mut self, event: &Event) {
        let record = framed(&event.encode_to_vec());
        if self.first.is_empty() {
            self.records.append(&record);
        } else if self.records.append(&[&self.first[..], &record].concat()) {
            self.first.clear();
        }
    }

    /// Closes the file. Fails if any event could not be written.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.records.finish()
    }
}

pub(crate) fn has_events(folder: &Path) -> io::Result<bool> {
    Ok(!event_files(folder)?.is_empty())
}

/// Returns a path that sorts after `existing`, because TensorBoard reads files in the order of their names.
fn next_file(folder: &Path, existing: &[(u64, PathBuf)]) -> PathBuf {
    let last = existing.iter().map(|(time, _)| *time).max();
    let seconds = (now() as u64).max(last.map_or(0, |last| last + 1));
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let host: String = host.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    folder.join(format!("{PREFIX}{seconds:010}.{host}.{}.0{SUFFIX}", std::process::id()))
}

fn event_files(folder: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let event_file = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let time = name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()?;
        Some((time, entry.path()))
    };
    Ok(entries.flatten().filter_map(event_file).collect())
}

/// Truncates the event file at `path` before its first event of step `first` or later, and before an incomplete record.
/// A run writes all events of a step with a checkpoint before it starts the next, so no earlier event is lost.
pub(super) fn cut(path: &Path, first: u64) -> io::Result<()> {
    let file = files::open_with(OpenOptions::new().read(true).write(true), path)?;
    let (mut reader, all) = (BufReader::new(&file), file.metadata()?.len());
    let mut end = 0;
    while let Some(record) = next(&mut reader)? {
        let is_void = match Event::decode(&record[HEADER..record.len() - TRAILER]) {
            Ok(Event { step, what: Some(What::Summary(_)), .. }) => {
                u64::try_from(step).is_ok_and(|step| step >= first)
            }
            _ => false,
        };
        if is_void {
            break;
        }
        end += record.len() as u64;
    }
    if end < all {
        file.set_len(end)?;
    }
    Ok(())
}

fn next(from: &mut BufReader<&File>) -> io::Result<Option<Vec<u8>>> {
    let mut record = Vec::new();
    from.by_ref().take(HEADER as u64).read_to_end(&mut record)?;
    let Some(length) = length(&record).filter(|length| *length <= MOST_RECORD) else { return Ok(None) };
    let rest = length + TRAILER as u64;
    let read = from.by_ref().take(rest).read_to_end(&mut record)?;
    Ok((read as u64 == rest).then_some(record))
}

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
    fn records_have_the_standard_bytes() {
        // Written by TensorBoard's own `RecordWriter` for b"abc".
        let golden = b"\x03\0\0\0\0\0\0\0\xb0\x99\x49\x0eabc\x6e\x57\xf1\x21";
        assert_eq!(framed(b"abc"), golden);
        let bytes = [framed(b"abc"), framed(b""), framed(b"d")[..12].to_vec()].concat();
        let (all, rest) = read(&bytes);
        assert_eq!((all, rest.len()), (vec![&b"abc"[..], b""], 12));
    }
}
