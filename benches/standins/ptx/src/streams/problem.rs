//! Problems with the order of operations, and their messages.

use std::fmt::{Display, Formatter, Result as FmtResult};
use std::ops::Range;
use std::sync::Arc;

use super::operation::{Operation, Use};

/// An operation, and its kind of access.
#[derive(Debug, PartialEq, Eq)]
pub struct Side {
    pub operation: Arc<Operation>,
    pub how: Use,
}

/// Two operations that must be ordered and are not, or an operation on memory that does not exist.
#[derive(Debug, PartialEq, Eq)]
pub enum Problem {
    Unordered {
        /// In the order in which they were issued.
        sides: [Side; 2],
        /// Offsets in the allocation.
        bytes: Range<u64>,
        allocation: u64,
        size: u64,
    },
    AfterFree {
        sides: [Side; 2],
        bytes: Range<u64>,
        allocation: u64,
        size: u64,
    },
    /// Addresses outside of every allocation.
    Unknown(Side, Range<u64>),
    /// The host has overwritten pinned memory that a copy still had to read.
    Overwritten {
        copy: Arc<Operation>,
        bytes: Range<u64>,
    },
}

impl Problem {
    /// Two conflicting uses of the same bytes.
    pub fn between(mut sides: [Side; 2], bytes: Range<u64>, allocation: u64, size: u64) -> Problem {
        sides.sort_by_key(|side| side.operation.number);
        // If the free comes before the other use, the use is after a free.
        if sides[0].how == Use::Free && sides[0].operation.precedes(&sides[1].operation) {
            return Problem::AfterFree { sides, bytes, allocation, size };
        }
        Problem::Unordered { sides, bytes, allocation, size }
    }

    /// Returns the operations involved.
    pub fn operations(&self) -> Vec<&Arc<Operation>> {
        match self {
            Problem::Unordered { sides, .. } | Problem::AfterFree { sides, .. } => {
                sides.iter().map(|side| &side.operation).collect()
            }
            Problem::Unknown(side, _) => vec![&side.operation],
            Problem::Overwritten { copy, .. } => vec![copy],
        }
    }
}

impl Display for Operation {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        match self.place {
            Some((stream, _)) => write!(f, "{} on stream {stream}", self.what),
            None => write!(f, "{} by the host", self.what),
        }
    }
}

impl Display for Side {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        let verb = match self.how {
            Use::Read => "reads",
            Use::Write => "writes",
            Use::Allocate => "allocates",
            Use::Free => "frees",
        };
        write!(f, "{} {verb}", self.operation)
    }
}

impl Display for Problem {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        match self {
            Problem::Unordered { sides: [first, second], bytes, allocation, size } => write!(
                f,
                "not ordered: {first} and {second} bytes {}..{} of allocation {allocation} ({size} bytes), \
                 and neither waits for the other\n  operations {} and {}",
                bytes.start, bytes.end, first.operation.number, second.operation.number
            ),
            Problem::AfterFree { sides: [first, second], bytes, allocation, size } => write!(
                f,
                "used after it was freed: {second} bytes {}..{} of allocation {allocation} ({size} bytes), \
                 which {first}\n  operations {} and {}",
                bytes.start, bytes.end, first.operation.number, second.operation.number
            ),
            Problem::Unknown(side, range) => write!(
                f,
                "not allocated: {side} {:#x}..{:#x}, which is neither device memory nor pinned\n  operation {}",
                range.start, range.end, side.operation.number
            ),
            Problem::Overwritten { copy, bytes } => write!(
                f,
                "overwritten: the host has changed {:#x}..{:#x}, which {copy} was still to read\n  operation {}",
                bytes.start, bytes.end, copy.number
            ),
        }
    }
}
