//! Operations of streams, and the bytes that they use.

use super::clock::Clock;

/// What a stream, or the host, was asked to do.
#[derive(Debug, PartialEq, Eq)]
pub struct Operation {
    /// Operations are counted in the order in which they are issued.
    pub number: u64,
    /// Such as `launch of matmul`.
    pub what: String,
    /// The stream, and which of its operations this is, counted from 1.
    pub place: Option<(usize, u32)>,
    /// What comes before it, and itself.
    pub clock: Clock,
}

impl Operation {
    /// Whether this comes before `other`, or is it. What the host does comes before all that is issued later.
    pub fn precedes(&self, other: &Operation) -> bool {
        self.place.is_none_or(|(stream, position)| position <= other.clock.at(stream))
    }
}

/// What an operation does with bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    Read,
    Write,
    Allocate,
    Free,
}

/// Bytes that an operation uses, by their addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    pub start: u64,
    pub end: u64,
    pub how: Use,
}

impl Access {
    /// `bytes` at `start`.
    pub fn new(start: u64, bytes: u64, how: Use) -> Access {
        Access { start, end: start + bytes, how }
    }
}
