//! What is known of each rank when something goes wrong.

use crate::flight::{Flight, GroupFlight};

/// What is known of the time at which flights were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    /// Nothing: the flights were found in files, or each is of another moment.
    Unknown,
    /// The ranks were asked after a wait had timed out.
    TimedOut,
    /// The ranks were asked while they may still go on.
    SoFar,
}

/// What is known of one rank.
#[derive(Clone, Debug, PartialEq)]
pub enum Witness {
    /// The rank answered.
    Answered(Box<Flight>),
    /// The rank has been silent, though its connection is open.
    Silent {
        /// Seconds since its last message.
        seconds: f64,
    },
    /// Its machine says that the process of the rank is stopped.
    Halted,
    /// The rank is gone.
    Gone {
        /// Such as `"died: its connection closed without a goodbye"`.
        reason: String,
    },
}

/// A group's name and world ranks, which identify it on every rank.
pub(super) type GroupKey<'a> = (&'a str, &'a [usize]);

/// The flight of a rank, if it answered.
pub(super) fn flight(witnesses: &[Witness], rank: usize) -> Option<&Flight> {
    match witnesses.get(rank)? {
        Witness::Answered(flight) => Some(flight),
        _ => None,
    }
}

/// A rank's view of a group, if it answered and is in the group.
pub(super) fn view<'a>(
    witnesses: &'a [Witness],
    rank: usize,
    group: GroupKey<'_>,
) -> Option<&'a GroupFlight> {
    let groups = &flight(witnesses, rank)?.groups;
    groups.iter().find(|known| (known.name.as_str(), known.ranks.as_slice()) == group)
}
