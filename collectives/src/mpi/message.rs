//! The messages between processes, other than buffers.

use crate::call::Call;
use crate::error::Cause;
use crate::flight::Flight;
use serde::{Deserialize, Serialize};

/// Number of a group: unique, and the same on all ranks of the group. It is also the MPI tag of the group's
/// data; tag 0 is for messages.
pub(super) type Number = i32;

/// A group that a split creates.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct NewGroup {
    pub(super) number: Number,
    pub(super) name: String,
    pub(super) world_ranks: Vec<usize>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// About one group: from a rank to the group's first rank, or from the first rank.
    Group { number: Number, notice: Notice },
    /// Fails all groups of a world.
    Abort { world: Number, failure: Failure },
    /// Asks for the receiver's flight recorder of `world`.
    Question { request: u64, world: Number, from: usize },
    /// Answers a question; `flight` is `None` if the answering process is not in the world.
    Answer { request: u64, rank: usize, flight: Option<Box<Flight>> },
    /// The sender's last message.
    Goodbye,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Notice {
    /// To the first rank: the sender has issued this call.
    Called { sequence: u64, rank: usize, call: Call },
    /// To the first rank: this group cannot continue.
    Trouble(Failure),
    /// From the first rank: all ranks have issued this operation, and their calls agree. A split creates
    /// `groups`.
    Run { sequence: u64, groups: Vec<NewGroup> },
    /// From the first rank: the group has failed, and no further operation will run.
    Failed(Failure),
}

/// The reason why a group has failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Failure {
    pub(super) cause: Cause,
    /// True if all groups of the world fail.
    pub(super) everywhere: bool,
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
