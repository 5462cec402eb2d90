//! Evidence about each rank, for verdicts.

use crate::flight::{Flight, GroupFlight};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    Unknown,
    TimedOut,
    SoFar,
}

/// Evidence about one rank.
#[derive(Clone, Debug, PartialEq)]
pub enum Witness {
    /// The rank answered.
    Answered(Box<Flight>),
    /// The rank has sent nothing for a while, though its connection is open.
    Silent {
        /// Seconds since the rank's last message.
        seconds: f64,
    },
    /// The rank's machine reports that its process is stopped.
    Halted,
    /// The rank is gone.
    Gone {
        /// The reason, such as `"died: its connection closed without a goodbye"`.
        reason: String,
    },
}

pub(super) type GroupKey<'a> = (&'a str, &'a [usize]);

pub(super) fn flight(witnesses: &[Witness], rank: usize) -> Option<&Flight> {
    match witnesses.get(rank)? {
        Witness::Answered(flight) => Some(flight),
        _ => None,
    }
}

/// Returns the record that `rank` has of the group; `None` if it did not answer or is not in the group.
pub(super) fn view<'a>(
    witnesses: &'a [Witness],
    rank: usize,
    group: GroupKey<'_>,
) -> Option<&'a GroupFlight> {
    let groups = &flight(witnesses, rank)?.groups;
    groups.iter().find(|known| (known.name.as_str(), known.ranks.as_slice()) == group)
}
