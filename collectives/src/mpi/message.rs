//! The messages of the processes to each other, besides the data.

use crate::call::{Call, CallSite};
use crate::error::{Abort, CommError};
use crate::flight::Flight;
use crate::label::Label;
use crate::operation::Operation;
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Number of a group: the same on all its ranks, and no other group has it. It is also the MPI tag of the
/// group's data; 0 is the tag of messages.
pub(super) type Number = i32;

/// A group that a split makes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct NewGroup {
    pub(super) number: Number,
    pub(super) name: String,
    pub(super) world_ranks: Vec<usize>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// About one group: from one of its ranks to the first one, or back.
    Group { number: Number, notice: Notice },
    /// All groups of a world fail.
    Abort { world: Number, cause: Cause },
    /// Asks for the receiver's flight recorder of this world.
    Question { request: u64, world: Number, from: usize },
    /// The answer; `None` from a process that is not in the world.
    Answer { request: u64, rank: usize, flight: Option<Box<Flight>> },
    /// The sender's last message.
    Goodbye,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Notice {
    /// To the first rank: the sender has issued this call.
    Called { sequence: u64, rank: usize, call: Call },
    /// To the first rank: this group cannot go on.
    Trouble(Cause),
    /// From the first rank: all ranks have issued this operation, and their calls agree. A split makes
    /// `groups`.
    Run { sequence: u64, groups: Vec<NewGroup> },
    /// From the first rank: the group has failed, and no further operation will run.
    Failed(Cause),
}

/// Why a group has failed. Every operation that it hits turns it into an error.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Cause {
    Abort {
        origin: String,
        rank: usize,
        world_rank: usize,
        reason: String,
        /// Whether it fails all groups of the world.
        everywhere: bool,
    },
    Mismatch {
        sequence: u64,
        calls: Vec<Call>,
    },
    TimedOut {
        sequence: u64,
        operation: Operation,
        label: Label,
        rank: usize,
        waited: Duration,
        missing: Vec<usize>,
        verdict: Verdict,
    },
}

impl Cause {
    pub(super) fn error(&self, site: &CallSite) -> CommError {
        match self {
            Cause::Abort { origin, rank, world_rank, reason, .. } => Abort {
                origin: Arc::from(origin.as_str()),
                rank: *rank,
                world_rank: *world_rank,
                reason: Arc::from(reason.as_str()),
            }
            .error(site),
            Cause::Mismatch { sequence, calls } => CommError::Mismatch {
                group: Arc::clone(&site.group),
                sequence: *sequence,
                calls: calls.iter().cloned().map(Some).collect(),
            },
            Cause::TimedOut { sequence, operation, label, rank, waited, missing, verdict } => {
                CommError::TimedOut {
                    operation: *operation,
                    sequence: *sequence,
                    label: label.clone(),
                    group: Arc::clone(&site.group),
                    rank: *rank,
                    waited: *waited,
                    missing: missing.clone(),
                    verdict: Box::new(verdict.clone()),
                }
            }
        }
    }
}

const CONFIG: bincode::config::Configuration = bincode::config::standard();

impl Message {
    pub(super) fn encode(&self) -> Result<Vec<u8>, String> {
        bincode::serde::encode_to_vec(self, CONFIG).map_err(|error| error.to_string())
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Message, String> {
        let decoded = bincode::serde::decode_from_slice(bytes, CONFIG);
        decoded.map(|(message, _)| message).map_err(|error| error.to_string())
    }
}
