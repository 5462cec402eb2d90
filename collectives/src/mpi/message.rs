//! The messages between processes, other than buffers.

use crate::call::Call;
use crate::error::Cause;
use crate::flight::Flight;
use serde::{Deserialize, Serialize};

/// Unique number of a group, equal on all its ranks. Also the MPI tag of its data; tag 0 is for messages.
pub(super) type Number = i32;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct NewGroup {
    pub(super) number: Number,
    pub(super) name: String,
    pub(super) world_ranks: Vec<usize>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    Group { number: Number, notice: Notice },
    Abort { world: Number, failure: Failure },
    Question { request: u64, world: Number, from: usize },
    Answer { request: u64, rank: usize, flight: Option<Box<Flight>> },
    Goodbye,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Notice {
    /// To the first rank: the sender has issued this call.
    Called { sequence: u64, rank: usize, call: Call },
    /// To the first rank: this group cannot continue.
    Trouble(Failure),
    /// From the first rank: all ranks have issued this operation and agree. A split creates `groups`.
    Run { sequence: u64, groups: Vec<NewGroup> },
    /// From the first rank: the group has failed, and no further operation will run.
    Failed(Failure),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Failure {
    pub(super) cause: Cause,
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
