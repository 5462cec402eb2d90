//! What a process of a run is asked, and what it says.

use kiln_collectives::{Flight, Witness};
use serde::{Deserialize, Serialize};

use super::prompt::ToPrompt;

/// What a process is asked: one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// What are your ranks doing?
    Status {
        /// And your threads?
        stacks: bool,
        /// And the ranks of other processes, as far as you can ask them?
        all: bool,
    },
    /// Give me the prompt of a rank. From here on, every line is a [`Typed`], and every reply a prompt's.
    Attach {
        /// The rank; whichever is held without.
        rank: Option<usize>,
    },
}

/// A line that was typed at a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Typed {
    pub(crate) typed: String,
}

/// What a process says: one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    Status(Box<ProcessStatus>),
    /// For the prompt.
    Prompt(ToPrompt),
    /// The request is not answered; the reason is for people.
    Refused(String),
}

/// A process of a run, in its own words.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ProcessStatus {
    pub(crate) world_size: usize,
    /// Optimizer steps of the run.
    pub(crate) steps: u64,
    /// Seconds that a rank may wait for the others in one collective; `None` if there is no limit.
    pub(crate) deadline_s: Option<f64>,
    pub(crate) ranks: Vec<RankStatus>,
    /// Ranks of the run that somebody holds.
    #[serde(default)]
    pub(crate) held: Vec<usize>,
    /// Where those are held whose prompt this process has, in words.
    #[serde(default)]
    pub(crate) held_at: Vec<String>,
    /// What is known of all ranks, if that was asked for and this process can ask them.
    pub(crate) all: Option<Vec<Known>>,
    /// What its threads are in the middle of, if that was asked for.
    pub(crate) threads: Option<Vec<Thread>>,
}

/// A rank, in the words of its process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RankStatus {
    pub(crate) rank: usize,
    /// The optimizer step that it is in; 0 before the first one.
    pub(crate) step: u64,
    /// The step whose end is in a complete checkpoint; 0 if there is none.
    pub(crate) saved: u64,
    /// Loss of the last step whose outcome is known; `None` if there is none, or it is not a number.
    pub(crate) loss: Option<f64>,
    /// Tokens of all ranks per second in that step.
    pub(crate) tokens_per_s: Option<f64>,
    /// Seconds of the longest step of late.
    pub(crate) longest_step_s: Option<f64>,
    /// Bytes that the rank holds now; `None` where nobody counts them, as on a GPU.
    pub(crate) bytes: Option<u64>,
    /// The most bytes that it has held.
    pub(crate) peak_bytes: Option<u64>,
    pub(crate) flight: Flight,
}

/// What rank 0 has found out of a rank, in a form that can be sent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Known {
    Answered(Box<Flight>),
    /// Seconds since its last message.
    Silent(f64),
    Halted,
    /// The reason.
    Gone(String),
}

impl From<Witness> for Known {
    fn from(witness: Witness) -> Self {
        match witness {
            Witness::Answered(flight) => Known::Answered(flight),
            Witness::Silent { seconds } => Known::Silent(seconds),
            Witness::Halted => Known::Halted,
            Witness::Gone { reason } => Known::Gone(reason),
        }
    }
}

impl From<Known> for Witness {
    fn from(known: Known) -> Self {
        match known {
            Known::Answered(flight) => Witness::Answered(flight),
            Known::Silent(seconds) => Witness::Silent { seconds },
            Known::Halted => Witness::Halted,
            Known::Gone(reason) => Witness::Gone { reason },
        }
    }
}

/// A thread, and what it is in the middle of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Thread {
    pub(crate) id: i32,
    pub(crate) name: String,
    /// Functions, the innermost one first; or what is known instead. Whoever asks finds them by the addresses.
    pub(crate) calls: Vec<String>,
    /// Addresses in the functions.
    pub(crate) addresses: Vec<u64>,
    /// Why there are no functions, if there are none.
    pub(crate) problem: Option<String>,
}
