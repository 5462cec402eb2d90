//! Latency and bandwidth between neighbours in the ring of ranks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_collectives::{Buffer, Communicator, DType, Label, Phase};
use kiln_shard::ShardError;
use serde::{Deserialize, Serialize};

use crate::bench::median;
use crate::findings::{Findings, Stage};
use kiln_train::error::Result;
use kiln_train::world;

const COMM: Stage = Stage::Comm;

const BYTES: usize = 4 << 20;

/// Numbers of exchanges of a few bytes and of [`BYTES`]. The quickest exchange of each kind counts.
const EXCHANGES: [usize; 2] = [30, 4];

const SLOW: f64 = 4.0;

const LISTED: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Measured {
    ranks: [usize; 2],
    is_local: bool,
    latency_s: f64,
    bytes_per_s: f64,
}

/// Returns the pair of neighbours that includes `rank` in round `turn`; in a round, every rank is in at most one pair.
fn pair_of(rank: usize, ranks: usize, turn: usize) -> Option<[usize; 2]> {
    let pairs = if ranks == 2 { 1 } else { ranks };
    let turn_of = |pair: usize| if pair + 1 == ranks && ranks % 2 == 1 { 2 } else { pair % 2 };
    let pair = |first: usize| [first, (first + 1) % ranks];
    (0..pairs).filter(|first| turn_of(*first) == turn).map(pair).find(|pair| pair.contains(&rank))
}

/// Measures the links of the ring; rank 0 reports them. Collective.
pub(super) fn examine(world: &dyn Communicator, timeout: Duration, findings: &mut Findings) -> Result<()> {
    let (rank, ranks, nodes) = (world.rank(), world.world_size(), world.nodes());
    let mut mine = Vec::new();
    for turn in 0..ranks.clamp(1, 3) {
        let pair = if ranks > 1 { pair_of(rank, ranks, turn) } else { None };
        let color = pair.and_then(|[first, _]| u32::try_from(first).ok());
        // A rank without a pair in this turn still takes part in the split, which is collective.
        let key = i64::from(pair.is_some_and(|[first, _]| first != rank));
        let group = world.split_within("link", color, key, timeout).map_err(ShardError::from)?;
        if let (Some(group), Some(ranks)) = (group, pair) {
            let [latency_s, slowest] = [1, BYTES].map(|bytes| exchange(&*group, bytes, timeout));
            let (latency_s, transfer_s) = (latency_s?, slowest?);
            let is_local = nodes[ranks[0]] == nodes[ranks[1]];
            if rank == ranks[0] {
                let bytes_per_s = BYTES as f64 / (transfer_s - latency_s).max(1e-9);
                mine.push(Measured { ranks, is_local, latency_s, bytes_per_s });
            }
        }
    }
    let gathered = serde_json::to_vec(&mine).unwrap_or_default();
    let gathered = world::gather(world, "links", &gathered, timeout)?;
    if rank == 0 {
        let read = |bytes: &Vec<u8>| serde_json::from_slice::<Vec<Measured>>(bytes).unwrap_or_default();
        report(&gathered.iter().flat_map(read).collect::<Vec<_>>(), findings);
    }
    Ok(())
}

fn exchange(pair: &dyn Communicator, bytes: usize, timeout: Duration) -> Result<f64, ShardError> {
    let input = Arc::new(Buffer::zeros(DType::U8, bytes));
    let mut quickest = f64::INFINITY;
    for _ in 0..EXCHANGES[usize::from(bytes > 1)] {
        let output = Buffer::zeros(DType::U8, bytes * pair.world_size());
        let start = Instant::now();
        let work = pair.all_gather(Label::new("link", Phase::Init), input.clone(), output);
        work.wait(timeout)?;
        quickest = quickest.min(start.elapsed().as_secs_f64());
    }
    Ok(quickest)
}

fn report(links: &[Measured], findings: &mut Findings) {
    let usual = |is_local: bool| {
        median(links.iter().filter(|link| link.is_local == is_local).map(|link| link.bytes_per_s).collect())
    };
    let usual = [usual(false), usual(true)];
    for link in links {
        let Measured { ranks: [a, b], is_local, latency_s, bytes_per_s } = *link;
        let detail = format!(
            "{a} - {b}: {:.0} us, {:.2} GB/s{}",
            latency_s * 1e6,
            bytes_per_s / 1e9,
            if is_local { ", on one machine" } else { "" }
        );
        let usual = usual[usize::from(is_local)];
        if bytes_per_s * SLOW < usual {
            let detail = format!("{detail}, while others have {:.2} GB/s", usual / 1e9);
            let fix = "check the network of these machines, and whether another program uses it";
            findings.warn(COMM, "link", detail, fix);
        } else if links.len() <= LISTED {
            findings.ok(COMM, "link", detail);
        }
    }
    if links.len() > LISTED {
        let [least, most] = [f64::min, f64::max]
            .map(|choose| links.iter().map(|link| link.bytes_per_s).reduce(choose).unwrap_or_default() / 1e9);
        findings.ok(COMM, "link", format!("{} of them, {least:.2} to {most:.2} GB/s", links.len()));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_link_has_a_turn() {
        for ranks in 2..9 {
            let mut pairs = BTreeSet::new();
            for turn in 0..3 {
                let mut met = BTreeSet::new();
                for rank in 0..ranks {
                    let Some(pair) = pair_of(rank, ranks, turn) else { continue };
                    assert_eq!(pair_of(pair[0], ranks, turn), Some(pair));
                    assert_eq!(pair_of(pair[1], ranks, turn), Some(pair));
                    met.insert(pair);
                }
                let of_turn: Vec<_> = met.iter().flatten().collect();
                assert_eq!(of_turn.len(), of_turn.iter().collect::<BTreeSet<_>>().len());
                pairs.extend(met);
            }
            assert_eq!(pairs.len(), if ranks == 2 { 1 } else { ranks }, "{ranks} ranks");
        }
    }

    #[test]
    fn slow_link_is_named() {
        let link =
            |a, bytes_per_s, is_local| Measured { ranks: [a, a + 1], is_local, latency_s: 1e-5, bytes_per_s };
        let links = [link(0, 9e9, true), link(1, 1e9, false), link(2, 1e8, false), link(3, 1e9, false)];
        let mut findings = Findings::default();
        report(&links, &mut findings);
        let warned: Vec<_> = findings.0.iter().filter(|check| check.fix.is_some()).collect();
        assert_eq!(warned.len(), 1);
        assert!(
            warned[0].detail.starts_with("2 - 3: 10 us, 0.10 GB/s, while others have 1.00"),
            "{warned:?}"
        );
    }
}
