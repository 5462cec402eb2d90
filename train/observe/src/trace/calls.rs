//! Finding the same collective on all ranks of its group.

use std::collections::HashMap;

use super::model::{CollectiveTrace, RankTrace, Trace};

/// The members of a group, its name, and the number of an operation in it.
type Key<'a> = (&'a [usize], &'a str, u64);

/// The collectives of a trace, by group and number.
pub(super) struct Calls<'a> {
    by_key: HashMap<Key<'a>, Vec<(usize, &'a CollectiveTrace)>>,
}

impl<'a> Calls<'a> {
    pub(super) fn of(trace: &'a Trace) -> Self {
        let mut by_key: HashMap<_, Vec<_>> = HashMap::new();
        for rank in &trace.ranks {
            for collective in rank.steps.iter().flat_map(|step| &step.collectives) {
                if let Some(ranks) = rank.groups.get(&collective.group) {
                    let key = (ranks.as_slice(), collective.group.as_str(), collective.sequence);
                    by_key.entry(key).or_default().push((rank.rank, collective));
                }
            }
        }
        Calls { by_key }
    }

    /// Returns operation `sequence` of the group that `rank` calls `group`, on all ranks that have recorded
    /// it.
    pub(super) fn get(
        &self,
        rank: &'a RankTrace,
        group: &'a str,
        sequence: u64,
    ) -> &[(usize, &'a CollectiveTrace)] {
        let ranks = rank.groups.get(group).map_or(&[][..], Vec::as_slice);
        self.by_key.get(&(ranks, group, sequence)).map_or(&[], Vec::as_slice)
    }

    /// Returns the rank that issued the operation last, and the time.
    pub(super) fn last(
        &self,
        rank: &'a RankTrace,
        group: &'a str,
        sequence: u64,
    ) -> Option<(usize, &'a CollectiveTrace)> {
        self.get(rank, group, sequence).iter().copied().max_by_key(|(_, collective)| collective.enqueued)
    }
}
