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

/// Interval at which each side sends a heartbeat.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

/// The description, in messages, of a rank whose connection closed without a goodbye.
pub(super) const DIED: &str = "died: its connection closed without a goodbye";

/// The state that all threads of the rendezvous share and wait on.
pub(super) type Registry = Monitor<State>;

#[derive(Default)]
pub(super) struct State {
    pub(super) ranks: Vec<Presence>,
    /// Reason why the world has failed.
    pub(super) world: Option<Cause>,
    /// Reasons why individual groups have failed.
    pub(super) groups: HashMap<GroupNumber, Cause>,
    /// Answers and their times of arrival, by the number of the question.
    pub(super) reports: HashMap<u64, BTreeMap<usize, (Instant, Flight)>>,
    pub(super) next_request: u64,
    /// The ranks that gave up, with their own reasons.
    pub(super) aborts: BTreeMap<usize, Abort>,
    /// True once all ranks have arrived and have received each other's addresses.
    pub(super) joined: bool,
    /// Reason why the ranks stopped waiting for missing ranks.
    pub(super) called_off: Option<CalledOff>,
    /// Refused callers that claimed to be a missing rank, at most one per rank.
    pub(super) refused: BTreeMap<usize, Refused>,
    /// True once rank 0 has finished; ends the rendezvous's threads.
    pub(super) closed: bool,
}

/// The presence of a rank.
pub(super) enum Presence {
    /// The rank has not arrived yet.
    Absent,
    Present {
        writer: Mutex<Writer>,
        info: RankInfo,
        /// Arrival time of the rank's last message.
        heard: Instant,
    },
    /// The rank has said goodbye.
    Left,
    /// The rank's connection ended without a goodbye.
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

    /// Returns whether the world or any of its groups has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.world.is_some() || !self.groups.is_empty()
    }

    /// Returns the ranks that are not present.
    pub(super) fn missing(&self) -> Vec<usize> {
        let ranks = self.ranks.iter().enumerate();
        ranks.filter(|(_, rank)| !rank.is_present()).map(|(rank, _)| rank).collect()
    }

    /// Returns the address of each rank if all ranks are present.
    pub(super) fn addresses(&self) -> Option<Vec<RankInfo>> {
        let info = |rank: &Presence| match rank {
            Presence::Present { info, .. } => Some(info.clone()),
            _ => None,
        };
        // Checked first, because this is called for each arriving rank and rarely needs the copies.
        self.ranks.iter().all(Presence::is_present).then(|| self.ranks.iter().filter_map(info).collect())
    }

    /// Sends a message to all ranks that are present. Does not wait for a rank that cannot receive it.
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
