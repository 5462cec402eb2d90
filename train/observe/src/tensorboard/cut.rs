//! Removes void events from the files of earlier starts.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::path::Path;

use kiln_storage::files;
use prost::Message;

use super::proto::{Event, What};
use super::record::{HEADER, TRAILER, length};

/// Maximum size of a record; longer records were not written by Kiln.
const MOST_RECORD: u64 = 1 << 30;

/// Truncates the event file at `path` before its first event of the step `first` or a later one, and before
/// an incomplete record. No event of an earlier step is lost: a run shows everything about a step that it can
/// resume from before it takes the next.
///
/// The new file also says which events are void. But not every reader respects this: in TensorBoard's fast
/// loader, only points that are replaced by others become void.
pub(super) fn cut(path: &Path, first: u64) -> io::Result<()> {
    let file = files::open_with(OpenOptions::new().read(true).write(true), path)?;
    let (mut reader, all) = (BufReader::new(&file), file.metadata()?.len());
    let mut end = 0;
    while let Some(record) = next(&mut reader)? {
        let is_void = match Event::decode(&record[HEADER..record.len() - TRAILER]) {
            Ok(Event { step, what: Some(What::Summary(_)), .. }) => {
                u64::try_from(step).is_ok_and(|step| step >= first)
            }
            // The version of the file, or an event of another program.
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

/// Returns the next record, including its framing; `None` if there is no complete one.
fn next(from: &mut BufReader<&File>) -> io::Result<Option<Vec<u8>>> {
    let mut record = Vec::new();
    from.by_ref().take(HEADER as u64).read_to_end(&mut record)?;
    let Some(length) = length(&record).filter(|length| *length <= MOST_RECORD) else { return Ok(None) };
    let rest = length + TRAILER as u64;
    let read = from.by_ref().take(rest).read_to_end(&mut record)?;
    Ok((read as u64 == rest).then_some(record))
}
