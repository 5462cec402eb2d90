//! A common clock for the ranks of several machines.
//!
//! Times of a rank are on the monotonic clock of its machine, which ranks of one machine share. For another
//! machine, the difference of the two clocks is estimated from the collectives of the trace, as NTP estimates
//! it from messages that go to a server and back (Mills, "Internet time synchronization: the network time
//! protocol", 1991).
//!
//! A collective in which every rank needs data from every other rank cannot end on any rank before it has
//! begun on all of them. Let `θ` be the offset by which the clock of machine A is ahead of that of machine B,
//! `s` the last start of a collective on the ranks of a machine and `e` its first end there, both on the
//! machine's own clock. The end on A comes after the start on B, and the end on B after the start on A:
//!
//! ```text
//! s_A - e_B  ≤  θ  ≤  e_A - s_B
//! ```
//!
//! That holds for every collective, so `θ` lies in the intersection of these intervals, whatever the network
//! does. The width of an interval is the time from the last start to the end on A plus the same on B: NTP's
//! round trip. Within the intersection, the estimate is the median of `e_A - e_B` over the all-reduces and
//! barriers, which end on all ranks at about the same time; as a median, it is not affected by single ranks
//! that wake up late. The error bound is the distance from the estimate to the farther end of the
//! intersection. It assumes that the clocks do not drift apart during the trace; two quartz clocks may drift
//! by some 10 µs per second.

use std::collections::BTreeMap;

/// Identifies a collective that all ranks of a group take part in: the ranks, the group's name, and its
/// number there.
pub(super) type CallKey = (Vec<usize>, String, u64);

/// The times of a collective on one rank, in seconds on the monotonic clock of its machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallTimes {
    pub(super) started: f64,
    pub(super) finished: f64,
    /// True if the collective ends on all ranks at about the same time.
    pub(super) ends_together: bool,
}

/// The data about the clock of one rank.
pub(super) struct RankClock<'a> {
    pub(super) node: &'a str,
    /// Collectives in which every rank needs data from every other rank.
    pub(super) calls: BTreeMap<CallKey, CallTimes>,
}

/// The offset by which a rank's clock is ahead of that of the first rank, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Offset {
    pub(super) seconds: f64,
    /// The error bound; `None` if there is no data for one.
    pub(super) error: Option<f64>,
}

/// Clocks of one machine may seem apart by this much: times are read slightly before or after the events.
const TOLERANCE: f64 = 1e-3;

/// Returns the offset by which the clock of each rank is ahead of the first one's.
pub(super) fn offsets(ranks: &[RankClock<'_>]) -> Vec<Offset> {
    // Ranks that name the same machine share one, unless their clocks prove that two machines have the same
    // name.
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

/// The constraints of collectives on the difference of two clocks.
struct Difference {
    low: f64,
    high: f64,
    /// Differences of the ends of collectives that end together.
    together: Vec<f64>,
    /// Differences of the ends of all collectives.
    all: Vec<f64>,
}

impl Difference {
    fn estimate(mut self) -> Offset {
        let median = median(if self.together.is_empty() { &mut self.all } else { &mut self.together });
        // Not `clamp`, which panics: drifting clocks may make the intersection empty.
        let seconds = median.min(self.high).max(self.low.min(self.high));
        let error = (seconds - self.low).abs().max((self.high - seconds).abs());
        Offset { seconds, error: Some(error) }
    }
}

/// Returns the offset by which the clock of the ranks `ahead` is ahead of that of the ranks `of`; `None` if
/// they have no collective in common.
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

/// Returns the last start and the first end of every collective on some ranks.
fn machine_calls<'a>(ranks: &'a [RankClock<'_>], machine: &[usize]) -> BTreeMap<&'a CallKey, CallTimes> {
    let mut calls: BTreeMap<&CallKey, CallTimes> = BTreeMap::new();
    for (key, times) in machine.iter().flat_map(|index| &ranks[*index].calls) {
        let known = calls.entry(key).or_insert(*times);
        known.started = known.started.max(times.started);
        known.finished = known.finished.min(times.finished);
    }
    calls
}

/// Returns the median; for an even number of values, the lower middle one; NaN if there are none.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns collectives of two ranks, each a second apart; the clock of the second rank is `ahead`.
    fn ranks<'a>(nodes: [&'a str; 2], ahead: f64) -> Vec<RankClock<'a>> {
        let mut clocks: Vec<_> =
            nodes.iter().map(|node| RankClock { node, calls: BTreeMap::new() }).collect();
        for sequence in 0..9_u64 {
            let begun = 100.0 + sequence as f64;
            // Which rank is late, and how late ends are noticed, varies between collectives.
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
            // In the narrowest interval, one rank is 0.2 ms late.
            assert!((found[1].seconds - ahead).abs() <= error && error < 4e-4, "{found:?}");
        }
    }

    #[test]
    fn ranks_of_one_machine_share_a_clock() {
        let offset = offsets(&ranks(["a", "a"], 0.0))[1];
        assert_eq!(offset, Offset { seconds: 0.0, error: Some(0.0) });
        // Containers on different machines may have the same name.
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
