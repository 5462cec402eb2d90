//! Finds out, on the rendezvous, why a rank cannot continue: asks all ranks and compares their answers.

use super::message::{GroupName, GroupNumber, ToRank, Trouble, TroubleKind};
use super::registry::{DIED, Presence, Registry, State};
use crate::call::Call;
use crate::diagnosis::Witness;
use crate::error::{Abort, Cause, CommError};
use crate::flight::{Flight, GroupFlight};
use crate::verdict::Verdict;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const GRACE: Duration = Duration::from_secs(3);

const EXPLANATION: Duration = Duration::from_millis(500);

pub(super) fn death(rank: usize) -> Cause {
    let reason = format!("it {DIED}").into();
    Cause::Abort(Abort { group: "world".into(), rank, world_rank: rank, reason })
}

/// Returns the cause of `trouble`, and the group that fails (`None` for all groups).
pub(super) fn find_cause(registry: &Registry, trouble: Trouble) -> (Option<GroupNumber>, Cause) {
    let Trouble { group, site, kind } = &trouble;
    let error = match kind {
        TroubleKind::TimedOut { waited } => {
            let flights = collect(registry, at(&trouble), GRACE);
            let missing = missing(&trouble, &flights);
            let witnesses = witnesses(registry, flights);
            let verdict = Verdict::for_wait(&witnesses, &group.name, &group.ranks, site.sequence);
            CommError::TimedOut { site: site.clone(), waited: *waited, missing, verdict: Box::new(verdict) }
        }
        TroubleKind::Mismatch => {
            let calls = calls(&trouble, &collect(registry, at(&trouble), GRACE));
            CommError::Mismatch { group: Arc::clone(&site.group), sequence: site.sequence, calls }
        }
        TroubleKind::Lost { peer, left, reason } => return lost(registry, group, *peer, *left, reason),
    };
    (Some(group.number), Cause::Error(error))
}

fn lost(
    registry: &Registry,
    group: &GroupName,
    peer: usize,
    left: bool,
    reason: &str,
) -> (Option<GroupNumber>, Cause) {
    let world_rank = group.ranks.get(peer).copied().unwrap_or(peer);
    // A failing rank leaves groups and reports its reason in any order; a dying process closes them in any order.
    let patience = if left { EXPLANATION } else { GRACE };
    let gone = |state: &State| matches!(state.ranks.get(world_rank), Some(Presence::Gone));
    let explained = |state: &State| gone(state) || state.aborts.contains_key(&world_rank);
    let state = registry.wait_until(registry.lock(), patience, explained);
    if let Some(abort) = state.aborts.get(&world_rank) {
        return (None, Cause::Abort(abort.clone()));
    }
    if gone(&state) {
        return (None, death(world_rank));
    }
    drop(state);
    let (ended, reason) = match left {
        true => (Some(group.number), format!("rank {peer} left the group")),
        false => (None, format!("the connection to it broke: {reason}")),
    };
    (ended, Cause::Abort(group.abort_by(peer, reason)))
}

pub(super) fn ask_all(registry: &Registry, patience: Duration) -> Vec<Witness> {
    let flights = collect(registry, None, patience);
    witnesses(registry, flights)
}

/// The operation in trouble, which every rank should have issued by now.
fn at(trouble: &Trouble) -> Option<(GroupName, u64)> {
    Some((trouble.group.clone(), trouble.site.sequence))
}

/// Returns the flights that arrive within `patience`, each advanced to the present.
fn collect(registry: &Registry, at: Option<(GroupName, u64)>, patience: Duration) -> BTreeMap<usize, Flight> {
    let mut state = registry.lock();
    let request = state.next_request;
    state.next_request += 1;
    state.reports.insert(request, BTreeMap::new());
    state.send_all(&ToRank::Collect { request, at });
    let answered = |state: &State| {
        let answers = state.reports.get(&request);
        let has = |rank: &usize| answers.is_some_and(|answers| answers.contains_key(rank));
        let ranks = state.ranks.iter().enumerate();
        ranks.filter(|(_, rank)| rank.is_present()).all(|(rank, _)| has(&rank))
    };
    let mut state = registry.wait_until(state, patience, answered);
    let answers = state.reports.remove(&request).unwrap_or_default();
    as_of(Instant::now(), answers)
}

/// Advances flights to `now`. Otherwise, a rank that answers late would seem to have spent more time in an operation
/// than a rank that entered it earlier but answered sooner.
fn as_of(now: Instant, answers: BTreeMap<usize, (Instant, Flight)>) -> BTreeMap<usize, Flight> {
    let age = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
    answers.into_iter().map(|(rank, (at, flight))| (rank, flight.later(age(at)))).collect()
}

fn witnesses(registry: &Registry, mut flights: BTreeMap<usize, Flight>) -> Vec<Witness> {
    let now = Instant::now();
    let state = registry.lock();
    let ranks = state.ranks.iter().enumerate();
    ranks
        .map(|(rank, presence)| match (flights.remove(&rank), presence) {
            (Some(flight), _) => Witness::Answered(Box::new(flight)),
            (None, Presence::Present { heard, .. }) => {
                Witness::Silent { seconds: now.duration_since(*heard).as_secs_f64() }
            }
            (None, Presence::Left) => Witness::Gone { reason: "has left the run".into() },
            (None, Presence::Gone | Presence::Absent) => Witness::Gone { reason: DIED.into() },
        })
        .collect()
}

fn view<'a>(flight: &'a Flight, group: &GroupName) -> Option<&'a GroupFlight> {
    flight.groups.iter().find(|view| view.name == group.name && view.ranks == group.ranks)
}

fn missing(trouble: &Trouble, flights: &BTreeMap<usize, Flight>) -> Vec<usize> {
    let issued = |world_rank: &usize| {
        let view = flights.get(world_rank).and_then(|flight| view(flight, &trouble.group));
        view.is_some_and(|view| view.issued > trouble.site.sequence)
    };
    let ranks = trouble.group.ranks.iter().enumerate();
    ranks.filter(|(_, world_rank)| !issued(world_rank)).map(|(rank, _)| rank).collect()
}

fn calls(trouble: &Trouble, flights: &BTreeMap<usize, Flight>) -> Vec<Option<Call>> {
    let call = |world_rank: &usize| {
        let view = view(flights.get(world_rank)?, &trouble.group)?;
        let pending = view.pending.iter().find(|pending| pending.sequence == trouble.site.sequence)?;
        Some(pending.call.clone())
    };
    trouble.group.ranks.iter().map(call).collect()
}
