//! How the rendezvous finds out why a rank cannot go on: it asks all ranks and compares their answers.

use super::message::{Cause, GroupName, GroupNumber, Site, ToRank, Trouble};
use super::registry::{DIED, Presence, Registry, State};
use crate::call::Call;
use crate::diagnosis::Witness;
use crate::flight::{Flight, GroupFlight};
use crate::sync::{lock, wait_until};
use crate::verdict::Verdict;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long ranks may take to answer.
pub(super) const GRACE: Duration = Duration::from_secs(3);

/// How long a rank that has left a group may take to say why.
const EXPLANATION: Duration = Duration::from_millis(500);

/// The group that a trouble is about; `None` if it is about the world as a whole.
pub(super) fn group_of(trouble: &Trouble) -> Option<GroupNumber> {
    match trouble {
        Trouble::Abort { .. } => None,
        Trouble::TimedOut { site, .. } | Trouble::Mismatch { site } | Trouble::Lost { site, .. } => {
            Some(site.group.number)
        }
    }
}

/// The cause of failure when a rank has died.
pub(super) fn death(rank: usize) -> Cause {
    abort("world", rank, rank, format!("it {DIED}"))
}

/// The cause that a rank gives itself when it aborts.
pub(super) fn own_words(world_rank: usize, trouble: &Trouble) -> Option<Cause> {
    match trouble {
        Trouble::Abort { group, rank, reason } => Some(abort(&group.name, *rank, world_rank, reason.clone())),
        _ => None,
    }
}

/// Finds the cause of `trouble`, and the group that it ends (`None` for all).
pub(super) fn find_cause(registry: &Registry, rank: usize, trouble: Trouble) -> (Option<GroupNumber>, Cause) {
    match trouble {
        Trouble::Abort { group, rank: member, reason } => (None, abort(&group.name, member, rank, reason)),
        Trouble::TimedOut { site, waited } => {
            let flights = collect(registry, &site);
            let missing = missing(&site, &flights);
            let group = &site.group;
            let witnesses = witnesses(registry, flights);
            let verdict = Verdict::of_wait(&witnesses, &group.name, &group.ranks, site.sequence);
            (Some(site.group.number), Cause::TimedOut { site, waited, missing, verdict })
        }
        Trouble::Mismatch { site } => {
            let flights = collect(registry, &site);
            let calls = calls(&site, &flights);
            let Site { group, sequence, .. } = site;
            (Some(group.number), Cause::Mismatch { group: group.name, sequence, calls })
        }
        Trouble::Lost { site, peer, left, reason } => lost(registry, &site, peer, left, &reason),
    }
}

/// A connection between two ranks has ended: because one of them died, left, or lost its network.
fn lost(
    registry: &Registry,
    site: &Site,
    peer: usize,
    left: bool,
    reason: &str,
) -> (Option<GroupNumber>, Cause) {
    let world_rank = site.group.ranks.get(peer).copied().unwrap_or(peer);
    // A rank that fails leaves its groups and gives its reason in any order. A dying process closes its
    // connections in any order.
    let patience = if left { EXPLANATION } else { GRACE };
    let gone = |state: &State| matches!(state.ranks.get(world_rank), Some(Presence::Gone));
    let explained = |state: &State| gone(state) || state.aborts.contains_key(&world_rank);
    let state = wait_until(&registry.changed, lock(&registry.state), patience, explained);
    if let Some(cause) = state.aborts.get(&world_rank) {
        return (None, cause.clone());
    }
    if gone(&state) {
        return (None, death(world_rank));
    }
    drop(state);
    if left {
        let reason = format!("rank {peer} left the group");
        return (Some(site.group.number), abort(&site.group.name, peer, world_rank, reason));
    }
    let reason = format!("the connection to it broke: {reason}");
    (None, abort(&site.group.name, peer, world_rank, reason))
}

fn abort(origin: &str, rank: usize, world_rank: usize, reason: String) -> Cause {
    Cause::Abort { origin: origin.to_owned(), rank, world_rank, reason }
}

/// Asks all ranks for their flight recorders; returns those that answered in time, all as of this moment.
fn collect(registry: &Registry, site: &Site) -> BTreeMap<usize, Flight> {
    let at = Some((site.group.clone(), site.sequence));
    let request = registry.ask(|request| ToRank::Collect { request, at: at.clone() });
    let answered = |state: &State| {
        let answers = state.reports.get(&request);
        let has = |rank: &usize| answers.is_some_and(|answers| answers.contains_key(rank));
        let ranks = state.ranks.iter().enumerate();
        ranks.filter(|(_, rank)| rank.is_present()).all(|(rank, _)| has(&rank))
    };
    let mut state = wait_until(&registry.changed, lock(&registry.state), GRACE, answered);
    let answers = state.reports.remove(&request).unwrap_or_default();
    as_of(Instant::now(), answers)
}

/// Advances flights that were taken at different times to `now`. A rank that answers at the end of a pause
/// says how long it has been in an operation by then, and the others have been in it for longer than they
/// said earlier.
fn as_of(now: Instant, answers: BTreeMap<usize, (Instant, Flight)>) -> BTreeMap<usize, Flight> {
    let age = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
    answers.into_iter().map(|(rank, (at, flight))| (rank, flight.later(age(at)))).collect()
}

fn witnesses(registry: &Registry, mut flights: BTreeMap<usize, Flight>) -> Vec<Witness> {
    let now = Instant::now();
    let state = lock(&registry.state);
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

/// The view that `flight` has of `group`.
fn view<'a>(flight: &'a Flight, group: &GroupName) -> Option<&'a GroupFlight> {
    flight.groups.iter().find(|view| view.name == group.name && view.ranks == group.ranks)
}

/// Ranks of the group that are not known to have issued the operation.
fn missing(site: &Site, flights: &BTreeMap<usize, Flight>) -> Vec<usize> {
    let issued = |world_rank: &usize| {
        let view = flights.get(world_rank).and_then(|flight| view(flight, &site.group));
        view.is_some_and(|view| view.issued > site.sequence)
    };
    let members = site.group.ranks.iter().enumerate();
    members.filter(|(_, world_rank)| !issued(world_rank)).map(|(rank, _)| rank).collect()
}

/// What each member of the group called.
fn calls(site: &Site, flights: &BTreeMap<usize, Flight>) -> Vec<Option<Call>> {
    let call = |world_rank: &usize| {
        let view = view(flights.get(world_rank)?, &site.group)?;
        let pending = view.pending.iter().find(|pending| pending.sequence == site.sequence)?;
        Some(pending.call.clone())
    };
    site.group.ranks.iter().map(call).collect()
}
