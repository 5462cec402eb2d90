//! Current waits between ranks, before any deadline has passed.

use super::stuck::{find_stuck, heads_of};
use super::witness::{Moment, Witness, flight, view};
use crate::verdict::Verdict;

/// The longest current wait, which may still end.
#[derive(Clone, Debug, PartialEq)]
pub struct Wait {
    /// Seconds since the first waiting rank issued its operation; 0 if no rank waits.
    pub seconds: f64,
    /// The verdict if the wait does not end.
    pub verdict: Verdict,
}

impl Wait {
    /// Returns the longest wait of all ranks. Witness `i` is world rank `i`, and all witnesses date from
    /// about the same moment.
    pub fn longest(witnesses: &[Witness]) -> Wait {
        let waits = (0..witnesses.len()).flat_map(|rank| heads_of(witnesses, rank));
        let seconds = waits.map(|(seconds, _)| seconds).fold(0.0, f64::max);
        let verdict = Verdict::about_stuck(witnesses, find_stuck(witnesses), Moment::SoFar);
        Wait { seconds, verdict }
    }
}

/// Returns the world ranks that `rank` waits for, in ascending order: those that have not issued its
/// operation, or did not answer. Witness `i` is world rank `i`.
pub fn waits_for(witnesses: &[Witness], rank: usize) -> Vec<usize> {
    let mut awaited: Vec<usize> = heads_of(witnesses, rank)
        .flat_map(|(_, stuck)| {
            let has_not = move |other: &usize| match flight(witnesses, *other) {
                None => true,
                Some(_) => {
                    view(witnesses, *other, stuck.group).is_none_or(|group| group.issued <= stuck.sequence)
                }
            };
            stuck.group.1.iter().copied().filter(has_not)
        })
        .collect();
    awaited.sort_unstable();
    awaited.dedup();
    awaited
}
