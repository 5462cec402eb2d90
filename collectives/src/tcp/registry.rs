//! The rendezvous's records of ranks and failures, and its messages to all ranks.

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

/// Interval between heartbeats of each side.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

/// Describes a rank whose connection closed without a goodbye.
pub(super) const DIED: &str = "died: its connection closed without a goodbye";

/// The state that all threads of the rendezvous share and wait on.
pub(super) type Registry = Monitor<State>;

#[derive(Default)]
pub(super) struct State {
    pub(super) ranks: Vec<Presence>,
    pub(super) world: Option<Cause>,
    pub(super) groups: HashMap<GroupNumber, Cause>,
    pub(super) reports: HashMap<u64, BTreeMap<usize, (Instant, Flight)>>,
    pub(super) next_request: u64,
    pub(super) aborts: BTreeMap<usize, Abort>,
    /// True once all ranks have each other's addresses.
    pub(super) joined: bool,
    pub(super) called_off: Option<CalledOff>,
    /// Refused callers that claimed to be a missing rank, at most one per rank.
    pub(super) refused: BTreeMap<usize, Refused>,
    /// True once rank 0 has finished; ends the rendezvous's threads.
    pub(super) closed: bool,
}

pub(super) enum Presence {
    Absent,
    Present {
        writer: Mutex<Writer>,
        info: RankInfo,
        /// Arrival time of the rank's last message.
        heard: Instant,
    },
    Left,
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

    pub(super) fn has_failed(&self) -> bool {
        self.world.is_some() || !self.groups.is_empty()
    }

    pub(super) fn missing(&self) -> Vec<usize> {
        let ranks = self.ranks.iter().enumerate();
        ranks.filter(|(_, rank)| !rank.is_present()).map(|(rank, _)| rank).collect()
    }

    pub(super) fn addresses(&self) -> Option<Vec<RankInfo>> {
        let info = |rank: &Presence| match rank {
            Presence::Present { info, .. } => Some(info.clone()),
            _ => None,
        };
        self.ranks.iter().all(Presence::is_present).then(|| self.ranks.iter().filter_map(info).collect())
    }

    /// Does not wait for a rank that cannot receive.
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
