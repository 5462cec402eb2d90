//! A common clock for the ranks of several machines, estimated from collectives as NTP does from messages (Mills,
//! "Internet time synchronization: the network time protocol", 1991).
//!
//! A collective in which every rank needs data from all others cannot end on any rank before it has started on all. Let
//! `s` be its last start on a machine's ranks, and `e` its first end there. Then the offset `θ` by which A's clock is
//! ahead of B's satisfies `s_A - e_B ≤ θ ≤ e_A - s_B`.
//!
//! The estimate is the median of `e_A - e_B` over all-reduces and barriers, which end everywhere at about the same
//! time, limited to the intersection of these intervals. The error bound is the distance to the intersection's farther
//! end. It ignores clock drift of about 10 µs per second.

use std::collections::BTreeMap;

/// Identifies a collective: the ranks of its group, the group's name, and its sequence number.
pub(super) type CallKey = (Vec<usize>, String, u64);

/// Times of a collective on one rank, in seconds on its machine's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallTimes {
    pub(super) started: f64,
    pub(super) finished: f64,
    /// True if the collective ends on all ranks at about the same time.
    pub(super) ends_together: bool,
}

pub(super) struct RankClock<'a> {
    pub(super) node: &'a str,
    /// Collectives in which every rank needs data from all others.
    pub(super) calls: BTreeMap<CallKey, CallTimes>,
}

/// The offset by which a rank's clock is ahead of the first rank's, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Offset {
    pub(super) seconds: f64,
    pub(super) error: Option<f64>,
}

/// Clocks of one machine may seem to differ by this much, because times are not read exactly at the events.
const TOLERANCE: f64 = 1e-3;

pub(super) fn offsets(ranks: &[RankClock<'_>]) -> Vec<Offset> {
    // Ranks with the same machine name share a machine unless their clocks differ.
    let mut machines: Vec<Vec<usize>> = Vec::new();
    for (index, rank) in ranks.iter().enumerate() {
        let is_same = |machine: &&mut Vec<usize>| {
            ranks[machine[0]].node == rank.node
                && difference(ranks, &[index], &machine[..1])
                    .is_none_or(|found| found.low <= TOLERANCE && found.high >= -TOLERANCE)
        };
        match machines.iter_mut().find(is_same) {
            Some(machine) => machine.push(index),
            None => machines.push(vec![index]),
        }
    }
    let mut offsets = vec![Offset { seconds: 0.0, error: Some(0.0) }; ranks.len()];
    for machine in machines.iter().skip(1) {
        let offset = match difference(ranks, machine, &machines[0]) {
            None => Offset { seconds: 0.0, error: None },
            Some(found) => found.estimate(),
        };
        machine.iter().for_each(|index| offsets[*index] = offset);
    }
    offsets
}

struct Difference {
    low: f64,
    high: f64,
    /// Differences of the ends of collectives that end together.
    together: Vec<f64>,
    all: Vec<f64>,
}

impl Difference {
    fn estimate(mut self) -> Offset {
        let median = median(if self.together.is_empty() { &mut self.all } else { &mut self.together });
        // `clamp` would panic if drifting clocks make the intersection empty.
        let seconds = median.min(self.high).max(self.low.min(self.high));
        let error = (seconds - self.low).abs().max((self.high - seconds).abs());
        Offset { seconds, error: Some(error) }
    }
}

/// Compares the clock of the ranks `ahead` with that of the ranks `of`. `None` if they share no collective.
fn difference(ranks: &[RankClock<'_>], ahead: &[usize], of: &[usize]) -> Option<Difference> {
    let (ahead, of) = (machine_calls(ranks, ahead), machine_calls(ranks, of));
    let mut found =
        Difference { low: f64::NEG_INFINITY, high: f64::INFINITY, together: Vec::new(), all: Vec::new() };
    for (key, a) in &ahead {
        let Some(b) = of.get(key) else { continue };
        found.low = found.low.max(a.started - b.finished);
        found.high = found.high.min(a.finished - b.started);
        found.all.push(a.finished - b.finished);
        if a.ends_together {
            found.together.push(a.finished - b.finished);
        }
    }
    (!found.all.is_empty()).then_some(found)
}

/// Returns the last start and the first end of every collective on the ranks of a machine.
fn machine_calls<'a>(ranks: &'a [RankClock<'_>], machine: &[usize]) -> BTreeMap<&'a CallKey, CallTimes> {
    let mut calls: BTreeMap<&CallKey, CallTimes> = BTreeMap::new();
    for (key, times) in machine.iter().flat_map(|index| &ranks[*index].calls) {
        let known = calls.entry(key).or_insert(*times);
        known.started = known.started.max(times.started);
        known.finished = known.finished.min(times.finished);
    }
    calls
}

/// Returns the lower median, or NaN if there are no values.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns collectives of two ranks, one per second. The clock of the second rank is `ahead`.
    fn ranks<'a>(nodes: [&'a str; 2], ahead: f64) -> Vec<RankClock<'a>> {
        let mut clocks: Vec<_> =
            nodes.iter().map(|node| RankClock { node, calls: BTreeMap::new() }).collect();
        for sequence in 0..9_u64 {
            let begun = 100.0 + sequence as f64;
            let late = (sequence % 3) as f64 * 1e-4;
            for (rank, clock) in clocks.iter_mut().enumerate() {
                let offset = ahead * rank as f64;
                let seen = ((sequence + rank as u64) % 4) as f64 * 1e-6;
                let times = CallTimes {
                    started: begun + late * (1 - rank) as f64 + offset,
                    finished: begun + 3e-4 + seen + offset,
                    ends_together: sequence % 2 == 0,
                };
                clock.calls.insert((vec![0, 1], "world".to_owned(), sequence), times);
            }
        }
        clocks
    }

    #[test]
    fn machines_get_a_common_clock() {
        for ahead in [-3.0, 0.25, 7200.0] {
            let found = offsets(&ranks(["a", "b"], ahead));
            assert_eq!(found[0], Offset { seconds: 0.0, error: Some(0.0) });
            let error = found[1].error.unwrap();
            assert!((found[1].seconds - ahead).abs() < 4e-6, "{found:?} for {ahead}");
            assert!((found[1].seconds - ahead).abs() <= error && error < 4e-4, "{found:?}");
        }
    }

    #[test]
    fn ranks_of_one_machine_share_a_clock() {
        let offset = offsets(&ranks(["a", "a"], 0.0))[1];
        assert_eq!(offset, Offset { seconds: 0.0, error: Some(0.0) });
        let apart = offsets(&ranks(["localhost", "localhost"], 5.0))[1];
        assert!((apart.seconds - 5.0).abs() < 4e-6, "{apart:?}");
    }

    #[test]
    fn no_common_collectives_means_no_offset() {
        let mut clocks = ranks(["a", "b"], 1.0);
        clocks[1].calls.clear();
        assert_eq!(offsets(&clocks)[1], Offset { seconds: 0.0, error: None });
    }
}
