//! What the rendezvous knows of the ranks and of what has failed, and how it talks to all ranks.

use super::channel::Writer;
use super::frame;
use super::message::{CalledOff, GroupNumber, RankInfo, ToRank};
use super::refused::Refused;
use crate::error::{Abort, Cause};
use crate::flight::Flight;
use crate::sync::{Monitor, lock};
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How often each side says that it is alive.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

/// How a rank ended whose connection closed without a goodbye, as messages say it.
pub(super) const DIED: &str = "died: its connection closed without a goodbye";

/// What all threads of the rendezvous share and wait on.
pub(super) type Registry = Monitor<State>;

#[derive(Default)]
pub(super) struct State {
    pub(super) ranks: Vec<Presence>,
    /// Why the world has failed.
    pub(super) world: Option<Cause>,
    /// Why single groups have failed.
    pub(super) groups: HashMap<GroupNumber, Cause>,
    /// Answers by the number of their question, each with the time of its arrival.
    pub(super) reports: HashMap<u64, BTreeMap<usize, (Instant, Flight)>>,
    pub(super) next_request: u64,
    /// The ranks that gave up, with their own words.
    pub(super) aborts: BTreeMap<usize, Abort>,
    /// All ranks have come and have been told how to reach each other.
    pub(super) joined: bool,
    /// Why nobody waits for missing ranks any longer.
    pub(super) called_off: Option<CalledOff>,
    /// Callers that were refused in the place of a rank that has not come, at most one for each rank.
    pub(super) refused: BTreeMap<usize, Refused>,
    /// Rank 0 is done, so the threads end.
    pub(super) closed: bool,
}

/// What the rendezvous knows of a rank.
pub(super) enum Presence {
    /// It has not come yet.
    Absent,
    Present {
        writer: Mutex<Writer>,
        info: RankInfo,
        /// When its last message arrived.
        heard: Instant,
    },
    /// It has said goodbye.
    Left,
    /// Its connection ended without a goodbye.
    Gone,
}

impl Presence {
    pub(super) fn is_present(&self) -> bool {
        matches!(self, Presence::Present { .. })
    }
}

impl State {
    pub(super) fn new(world_size: usize) -> State {
        State { ranks: (0..world_size).map(|_| Presence::Absent).collect(), ..State::default() }
    }

    /// Whether the world or a group of it has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.world.is_some() || !self.groups.is_empty()
    }

    /// The ranks that are not present.
    pub(super) fn missing(&self) -> Vec<usize> {
        let ranks = self.ranks.iter().enumerate();
        ranks.filter(|(_, rank)| !rank.is_present()).map(|(rank, _)| rank).collect()
    }

    /// How to reach each rank, if all of them are present.
    pub(super) fn addresses(&self) -> Option<Vec<RankInfo>> {
        let info = |rank: &Presence| match rank {
            Presence::Present { info, .. } => Some(info.clone()),
            _ => None,
        };
        // Checked first, because this is called for each rank that comes and rarely needs the copies.
        self.ranks.iter().all(Presence::is_present).then(|| self.ranks.iter().filter_map(info).collect())
    }

    /// Sends a message to all ranks that are present. Does not wait for a rank that cannot take it.
    pub(super) fn send_all(&self, message: &ToRank) {
        let frame = match frame::encode(message, frame::MESSAGE_LIMIT) {
            Ok(frame) => frame,
            Err(error) => return tracing::warn!("the rendezvous cannot send: {error}"),
        };
        for rank in &self.ranks {
            if let Presence::Present { writer, .. } = rank {
                let _ = lock(writer).deliver(&frame);
            }
        }
    }
}
