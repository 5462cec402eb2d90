//! Takes events that are void out of the files of earlier starts.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::path::Path;

use kiln_storage::files;
use prost::Message;

use super::proto::{Event, What};
use super::record::{HEADER, TRAILER, length};

/// Longer records are none of ours.
const MOST_RECORD: u64 = 1 << 30;

/// Ends the event file at `path` before its first event of the step `first` or a later one, and before a record that
/// is not whole. Nothing of an earlier step is lost: a run shows everything of a step that it can go on from before it
/// takes the next.
///
/// The file that goes on says as well which events are void. But not every reader minds it: to TensorBoard's fast
/// loader, only points are void in whose place others come.
pub(super) fn cut(path: &Path, first: u64) -> io::Result<()> {
    let file = files::open_with(OpenOptions::new().read(true).write(true), path)?;
    let (mut reader, all) = (BufReader::new(&file), file.metadata()?.len());
    let mut end = 0;
    while let Some(record) = next(&mut reader)? {
        let is_void = match Event::decode(&record[HEADER..record.len() - TRAILER]) {
            Ok(Event { step, what: Some(What::Summary(_)), .. }) => {
                u64::try_from(step).is_ok_and(|step| step >= first)
            }
            // The version of the file, or of another program.
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

/// The next record, with all that belongs to it; `None` if there is no whole one.
fn next(from: &mut BufReader<&File>) -> io::Result<Option<Vec<u8>>> {
    let mut record = Vec::new();
    from.by_ref().take(HEADER as u64).read_to_end(&mut record)?;
    let Some(length) = length(&record).filter(|length| *length <= MOST_RECORD) else { return Ok(None) };
    let rest = length + TRAILER as u64;
    let read = from.by_ref().take(rest).read_to_end(&mut record)?;
    Ok((read as u64 == rest).then_some(record))
}
