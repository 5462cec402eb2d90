//! Read-ahead: keeps the disk busy while delivered data is copied.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::tensor_file::TensorFile;

/// Maximum bytes that are requested before they are copied.
const AHEAD: usize = 32 << 20;

/// Bytes per request.
const STEP: usize = 4 << 20;

/// The data that a rank is going to read, in order.
#[derive(Default)]
pub(super) struct ReadAhead {
    left: VecDeque<(Arc<TensorFile>, Range<usize>)>,
    /// Bytes requested and not yet copied.
    under_way: usize,
}

impl ReadAhead {
    /// Adds bytes of a file.
    pub(super) fn plan(&mut self, file: &Arc<TensorFile>, bytes: Range<usize>) {
        let starts = bytes.clone().step_by(STEP);
        self.left.extend(starts.map(|at| (file.clone(), at..(at + STEP).min(bytes.end))));
    }

    /// Requests more data, now that `copied` more bytes have been copied.
    pub(super) fn advance(&mut self, copied: usize) {
        self.under_way = self.under_way.saturating_sub(copied);
        while self.under_way < AHEAD
            && let Some((file, bytes)) = self.left.pop_front()
        {
            self.under_way += bytes.len();
            file.ask_for(bytes);
        }
    }
}
