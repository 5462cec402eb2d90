//! What is known of the ranks when something goes wrong.

use crate::flight::{Flight, GroupFlight};

/// What is known of one rank.
#[derive(Clone, Debug, PartialEq)]
pub enum Witness {
    /// It answered.
    Answered(Box<Flight>),
    /// It has not said anything for this long, in seconds, though its connection is open.
    Silent {
        /// Seconds since it was last heard of.
        seconds: f64,
    },
    /// It is no more, in the words of whoever noticed.
    Gone {
        /// Such as `"died: its connection closed without a goodbye"`.
        reason: String,
    },
}

/// Names a group across ranks.
pub(super) type GroupKey<'a> = (&'a str, &'a [usize]);

pub(super) fn flight(witnesses: &[Witness], rank: usize) -> Option<&Flight> {
    match witnesses.get(rank)? {
        Witness::Answered(flight) => Some(flight),
        _ => None,
    }
}

pub(super) fn view<'a>(
    witnesses: &'a [Witness],
    rank: usize,
    group: GroupKey<'_>,
) -> Option<&'a GroupFlight> {
    let groups = &flight(witnesses, rank)?.groups;
    groups.iter().find(|known| (known.name.as_str(), known.ranks.as_slice()) == group)
}
