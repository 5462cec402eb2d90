//! The information about each rank from which a verdict is made.

use crate::flight::{Flight, GroupFlight};

/// The circumstances in which flights were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    /// Unknown: the flights were read from files, or taken at different times.
    Unknown,
    /// The ranks were asked after a wait had timed out.
    TimedOut,
    /// The ranks were asked while they may still continue.
    SoFar,
}

/// The information about one rank.
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

/// A group's name and world ranks, which identify it on every rank.
pub(super) type GroupKey<'a> = (&'a str, &'a [usize]);

/// Returns the flight of a rank, if it answered.
pub(super) fn flight(witnesses: &[Witness], rank: usize) -> Option<&Flight> {
    match witnesses.get(rank)? {
        Witness::Answered(flight) => Some(flight),
        _ => None,
    }
}

/// Returns the rank's view of a group, if the rank answered and belongs to the group.
pub(super) fn view<'a>(
    witnesses: &'a [Witness],
    rank: usize,
    group: GroupKey<'_>,
) -> Option<&'a GroupFlight> {
    let groups = &flight(witnesses, rank)?.groups;
    groups.iter().find(|known| (known.name.as_str(), known.ranks.as_slice()) == group)
}
