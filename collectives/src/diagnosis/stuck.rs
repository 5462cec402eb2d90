//! Finds the operation in which the ranks are stuck, from the ranks' flights.

use super::witness::{GroupKey, Witness, flight, view};
use crate::call::Call;
use crate::flight::Record;
use std::collections::BTreeSet;

#[derive(Clone, Copy)]
pub(super) struct Stuck<'a> {
    pub(super) group: GroupKey<'a>,
    pub(super) sequence: u64,
}

impl<'a> Stuck<'a> {
    pub(super) fn calls(&self, witnesses: &'a [Witness]) -> Vec<Option<&'a Call>> {
        self.group
            .1
            .iter()
            .map(|rank| {
                let group = view(witnesses, *rank, self.group)?;
                let pending = group.pending.iter().find(|p| p.sequence == self.sequence)?;
                Some(&pending.call)
            })
            .collect()
    }

    pub(super) fn waiting(&self, witnesses: &[Witness]) -> Vec<usize> {
        let calls = self.calls(witnesses);
        let ranks = self.group.1.iter().zip(calls);
        ranks.filter(|(_, call)| call.is_some()).map(|(rank, _)| *rank).collect()
    }

    /// Returns the world ranks that answered but have not issued the operation.
    pub(super) fn missing(&self, witnesses: &[Witness]) -> Vec<usize> {
        let has_not = |rank: &&usize| {
            flight(witnesses, **rank).is_some()
                && view(witnesses, **rank, self.group).is_none_or(|group| group.issued <= self.sequence)
        };
        self.group.1.iter().filter(has_not).copied().collect()
    }

    pub(super) fn record(&self, witnesses: &'a [Witness], rank: usize) -> Option<&'a Record> {
        let records = flight(witnesses, rank)?.records.iter();
        records.rev().find(|record| record.sequence == self.sequence && *record.group == *self.group.0)
    }

    fn ages(&self, witnesses: &[Witness]) -> Option<Vec<(usize, f64)>> {
        self.group.1.iter().map(|rank| Some((*rank, self.age(witnesses, *rank)?))).collect()
    }

    fn age(&self, witnesses: &[Witness], rank: usize) -> Option<f64> {
        let pending = &view(witnesses, rank, self.group)?.pending;
        let pending = pending.iter().find(|pending| pending.sequence == self.sequence);
        let recorded = || {
            let entered = self.record(witnesses, rank)?.enqueued?.as_secs_f64();
            let clock = flight(witnesses, rank)?.clock;
            (clock >= entered).then_some(clock - entered)
        };
        pending.map(|pending| pending.seconds).or_else(recorded)
    }

    /// Returns the late world ranks, and the seconds between first and last arrival. A late rank has been in the
    /// operation for less than half of the first rank's time.
    pub(super) fn late(&self, witnesses: &[Witness]) -> Option<(Vec<usize>, f64)> {
        let ages = self.ages(witnesses)?;
        let age = |(_, age): &(usize, f64)| *age;
        let longest = ages.iter().map(age).fold(0.0, f64::max);
        let shortest = ages.iter().map(age).fold(longest, f64::min);
        let late: Vec<usize> =
            ages.iter().filter(|(_, age)| *age < longest / 2.0).map(|(rank, _)| *rank).collect();
        (!late.is_empty()).then_some((late, longest - shortest))
    }

    /// Returns world ranks whose processes did not run for more than half of the first rank's waiting time, and the
    /// longest of these stalls in seconds.
    pub(super) fn stalled(&self, witnesses: &[Witness]) -> Option<(Vec<usize>, f64)> {
        let ranks = || self.group.1.iter().copied();
        let longest = ranks().filter_map(|rank| self.age(witnesses, rank)).fold(0.0, f64::max);
        let stalls = ranks().filter_map(|rank| {
            let stall = flight(witnesses, rank)?.stall?;
            let counts = stall.seconds > longest / 2.0 && stall.ago < longest;
            counts.then_some((rank, stall.seconds))
        });
        let (ranks, seconds): (Vec<usize>, Vec<f64>) = stalls.unzip();
        (!ranks.is_empty()).then(|| (ranks, seconds.into_iter().fold(0.0, f64::max)))
    }

    /// Returns a name such as `#1085 all_gather(block 7)`, followed by the group unless it is the world.
    pub(super) fn name(&self, witnesses: &[Witness]) -> String {
        let pending = self.calls(witnesses).into_iter().flatten().next();
        let recorded = || self.group.1.iter().find_map(|rank| self.record(witnesses, *rank));
        let call = pending.map(|call| (call.operation, &call.label));
        let call = call.or_else(|| recorded().map(|record| (record.operation, &record.label)));
        let call = call.map(|(operation, label)| format!("{operation}({})", label.scope)).unwrap_or_default();
        format!("#{} {call}{}", self.sequence, self.group_suffix())
    }

    pub(super) fn group_suffix(&self) -> String {
        match self.group.0 {
            "world" => String::new(),
            name => format!(" of group \"{name}\""),
        }
    }
}

/// Finds the operation at the end of the chain of waits that begins with the oldest wait.
pub(super) fn find_stuck(witnesses: &[Witness]) -> Option<Stuck<'_>> {
    let heads = (0..witnesses.len()).flat_map(|rank| heads_of(witnesses, rank));
    Some(follow(witnesses, oldest_first(heads).next()?))
}

/// Follows the chain of waits to an operation whose missing ranks wait in no other operation.
pub(super) fn follow<'a>(witnesses: &'a [Witness], mut current: Stuck<'a>) -> Stuck<'a> {
    let mut visited: BTreeSet<(String, Vec<usize>, u64)> = BTreeSet::new();
    loop {
        current.sequence = first_pending(witnesses, current.group).unwrap_or(current.sequence);
        let key = (current.group.0.to_owned(), current.group.1.to_vec(), current.sequence);
        if !visited.insert(key) {
            return current;
        }
        let elsewhere = current.missing(witnesses).into_iter().find_map(|rank| {
            oldest_first(heads_of(witnesses, rank)).find(|stuck| stuck.group != current.group)
        });
        match elsewhere {
            Some(next) => current = next,
            None => return current,
        }
    }
}

/// Returns the first pending operation of each of the rank's groups, with the seconds since its call.
pub(super) fn heads_of(witnesses: &[Witness], rank: usize) -> impl Iterator<Item = (f64, Stuck<'_>)> {
    let groups = flight(witnesses, rank).map_or(&[][..], |flight| &flight.groups);
    groups.iter().filter_map(|group| {
        let first = group.pending.first()?;
        Some((first.seconds, Stuck { group: (&group.name, &group.ranks), sequence: first.sequence }))
    })
}

fn oldest_first<'a>(heads: impl Iterator<Item = (f64, Stuck<'a>)>) -> impl Iterator<Item = Stuck<'a>> {
    let mut heads: Vec<_> = heads.collect();
    heads.sort_by(|a, b| b.0.total_cmp(&a.0));
    heads.into_iter().map(|(_, stuck)| stuck)
}

fn first_pending(witnesses: &[Witness], group: GroupKey<'_>) -> Option<u64> {
    let of_rank = |rank: &usize| Some(view(witnesses, *rank, group)?.pending.first()?.sequence);
    group.1.iter().filter_map(of_rank).min()
}
