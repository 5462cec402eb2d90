//! Requests to a process of a run, and its replies.

use std::io;

use kiln_collectives::{Flight, StepTimeline, Witness};
use serde::{Deserialize, Serialize};

use super::socket::MOST_RANKS;

/// A request to a process: one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Asks for the current state of the process's ranks.
    Status {
        /// True to include the call stacks of threads.
        stacks: bool,
        /// True to include ranks of other processes.
        all: bool,
    },
    /// Asks for the last complete step of the process's ranks.
    Timeline,
    /// Requests a rank's prompt. Further lines are [`Typed`], and further replies are [`Reply::Prompt`].
    Attach {
        /// The rank; `None` for any held rank.
        rank: Option<usize>,
    },
}

/// A message to a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToPrompt {
    /// Text to show.
    Text(String),
    /// The run waits for a line, with this text as the prompt.
    Ask(String),
    /// The run continues and reads lines at the end of a step.
    Running,
    /// The run is over.
    End,
}

/// A line typed at a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Typed {
    pub typed: String,
}

/// Maximum size of a request or a typed line, in bytes.
pub const MOST_REQUEST: usize = 64 * 1024;

impl Typed {
    /// Wraps `line`.
    ///
    /// # Errors
    ///
    /// Returns [`InvalidInput`](io::ErrorKind::InvalidInput) if the line is too long.
    pub fn new(line: &str) -> io::Result<Self> {
        let typed = Typed { typed: line.to_owned() };
        if serde_json::to_vec(&typed)?.len() >= MOST_REQUEST {
            let problem = format!("a line has at most {MOST_REQUEST} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        Ok(typed)
    }
}

/// A reply of a process: one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Status(Box<ProcessStatus>),
    /// The last complete step of each rank of the process.
    Timeline(Vec<StepTimeline>),
    /// A message to the prompt.
    Prompt(ToPrompt),
    /// The request was refused, for this reason.
    Refused(String),
}

impl Reply {
    /// Returns true if the ranks are consistent. Readers use them as indices and as lengths of lists.
    pub(super) fn is_sound(&self) -> bool {
        let Reply::Status(status) = self else { return true };
        let world_size = status.world_size;
        let is_group = |ranks: &[usize]| {
            let mut ranks = ranks.to_vec();
            ranks.sort_unstable();
            ranks.is_sorted_by(|a, b| a < b) && ranks.last().is_none_or(|last| *last < world_size)
        };
        let is_flight = |flight: &Flight| {
            flight.rank < world_size && flight.groups.iter().all(|group| is_group(&group.ranks))
        };
        let known = status.all.iter().flatten();
        world_size <= MOST_RANKS
            && status.ranks.iter().all(|rank| rank.rank < world_size && is_flight(&rank.flight))
            && status.held.iter().all(|rank| *rank < world_size)
            && status.all.as_ref().is_none_or(|all| all.len() <= world_size)
            && known.into_iter().all(|known| !matches!(known, Known::Answered(flight) if !is_flight(flight)))
    }
}

/// The status of a process.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessStatus {
    pub world_size: usize,
    /// Optimizer steps of the run.
    pub steps: u64,
    /// Maximum seconds that a rank may wait in one collective; `None` without a limit.
    pub deadline_s: Option<f64>,
    pub ranks: Vec<RankStatus>,
    /// Ranks held at a prompt or breakpoint.
    #[serde(default)]
    pub held: Vec<usize>,
    /// Descriptions of the places where ranks are held, if this process serves the prompt.
    #[serde(default)]
    pub held_at: Vec<String>,
    /// Knowledge about all ranks, if requested and available.
    pub all: Option<Vec<Known>>,
    /// Call stacks of the process's threads, if requested.
    pub threads: Option<Vec<Thread>>,
}

/// The status of a rank.
#[derive(Debug, Serialize, Deserialize)]
pub struct RankStatus {
    pub rank: usize,
    /// Current optimizer step; 0 before the first one.
    pub step: u64,
    /// Last step saved in a complete checkpoint; 0 if there is none.
    pub saved: u64,
    /// Loss of the last finished step; `None` if there is none, or if it is NaN.
    pub loss: Option<f64>,
    /// Tokens of all ranks per second in the same step.
    pub tokens_per_s: Option<f64>,
    /// Seconds of the longest recent step.
    pub longest_step_s: Option<f64>,
    /// Bytes that the rank holds; `None` where they are not counted, as on a GPU.
    pub bytes: Option<u64>,
    /// Maximum bytes that the rank has held.
    pub peak_bytes: Option<u64>,
    pub flight: Flight,
}

/// Rank 0's knowledge of a rank, in a form that can be sent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Known {
    Answered(Box<Flight>),
    /// Seconds since the rank's last message.
    Silent(f64),
    Halted,
    /// The rank is gone, for this reason.
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

/// A thread and its call stack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    pub id: i32,
    pub name: String,
    /// Function names, innermost first, which the client looks up; or other information about the thread.
    pub calls: Vec<String>,
    /// Addresses in the functions.
    pub addresses: Vec<u64>,
    /// The reason why the call stack is unknown.
    pub problem: Option<String>,
}
