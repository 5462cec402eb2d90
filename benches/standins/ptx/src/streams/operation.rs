//! Operations of streams, and the bytes they access.

use super::clock::Clock;

/// An operation of a stream or of the host.
#[derive(Debug, PartialEq, Eq)]
pub struct Operation {
    /// The operation's number, in the order in which operations are issued.
    pub number: u64,
    /// Its description, such as `launch of matmul`.
    pub what: String,
    /// The stream, and its position among the stream's operations, counted from 1.
    pub place: Option<(usize, u32)>,
    /// The operations before it, and itself.
    pub clock: Clock,
}

impl Operation {
    /// Returns `true` if this comes before `other`, or is `other`. Operations of the host come before all
    /// that are issued later.
    pub fn precedes(&self, other: &Operation) -> bool {
        self.place.is_none_or(|(stream, position)| position <= other.clock.at(stream))
    }
}

/// The kind of access of an operation to bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    Read,
    Write,
    Allocate,
    Free,
}

/// Bytes that an operation accesses, by address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    pub start: u64,
    pub end: u64,
    pub how: Use,
}

impl Access {
    /// Creates an access to `bytes` bytes at `start`.
    pub fn new(start: u64, bytes: u64, how: Use) -> Access {
        Access { start, end: start + bytes, how }
    }
}
