use super::witness::{Witness, flight};
use crate::flight::{Flight, Record};
use std::collections::BTreeMap;

/// A rank that arrives last at most operations, so that the other ranks spend their time waiting.
#[derive(Clone, Debug, PartialEq)]
pub struct Lag {
    /// The rank in the world.
    pub rank: usize,
    /// Number of operations with a late arrival that counts.
    pub late: usize,
    /// Number of operations examined.
    pub operations: usize,
    /// Seconds that punctual arrivals of this rank would have saved.
    pub seconds: f64,
    /// `seconds` as a fraction of the examined time.
    pub share: f64,
}

const LEAST_SHARE: f64 = 0.25;

/// Minimum ratio of this rank's cost to any other rank's. If all ranks are late in turn, the machine is busy.
const LEAST_RATIO: f64 = 4.0;

/// Minimum time that the operations span, in seconds: in less, other programs may make any rank look slow.
const LEAST_TIME: f64 = 1.0;

const LEAST_OFTEN: usize = 3;

const LEAST_LATE: f64 = 0.005;

type Operation<'a> = (&'a str, &'a [usize], u64);

fn seconds(record: &Record) -> Option<f64> {
    Some(record.finished?.checked_sub(record.started?)?.as_secs_f64())
}

fn span(flight: &Flight) -> Option<f64> {
    let first = flight.records.iter().find_map(|record| record.started)?;
    let last = flight.records.iter().filter_map(|record| record.finished).max()?;
    Some(last.checked_sub(first)?.as_secs_f64())
}

impl Lag {
    /// Returns the rank that the others keep waiting for, if any; witness `i` is world rank `i`. Operations end at
    /// about the same time on all ranks, so the rank that spent the least time in one arrived last.
    pub fn find(witnesses: &[Witness]) -> Option<Lag> {
        let flights = || (0..witnesses.len()).filter_map(|rank| flight(witnesses, rank));
        let time = flights().filter_map(span).fold(f64::INFINITY, f64::min);
        let mut by_operation: BTreeMap<Operation<'_>, Vec<(usize, f64)>> = BTreeMap::new();
        for flight in flights() {
            for record in &flight.records {
                let group = flight.groups.iter().find(|group| group.name == *record.group);
                let (Some(group), Some(seconds)) = (group, seconds(record)) else { continue };
                let key = (group.name.as_str(), group.ranks.as_slice(), record.sequence);
                by_operation.entry(key).or_default().push((flight.rank, seconds));
            }
        }
        by_operation.retain(|(_, ranks, _), known| ranks.len() > 1 && known.len() == ranks.len());
        let operations = by_operation.len();
        let mut lags: BTreeMap<usize, (usize, f64)> = BTreeMap::new();
        for mut known in by_operation.into_values() {
            known.sort_by(|a, b| a.1.total_cmp(&b.1));
            let [(rank, last), (_, before), ..] = known[..] else { continue };
            let lag = lags.entry(rank).or_default();
            if before - last >= LEAST_LATE * time {
                *lag = (lag.0 + 1, lag.1 + before - last);
            }
        }
        let (rank, (late, seconds)) = lags.iter().max_by(|(_, a), (_, b)| a.1.total_cmp(&b.1))?;
        let others = lags.iter().filter(|(other, _)| *other != rank);
        let most = others.map(|(_, (_, seconds))| *seconds).fold(0.0, f64::max);
        let share = seconds / time;
        let counts = time >= LEAST_TIME
            && share >= LEAST_SHARE
            && *seconds >= LEAST_RATIO * most
            && *late >= LEAST_OFTEN;
        counts.then_some(Lag { rank: *rank, late: *late, operations, seconds: *seconds, share })
    }
}
