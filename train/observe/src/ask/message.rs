//! Requests to a process of a run, and its replies.

use std::io;

use kiln_collectives::{Flight, StepTimeline, Witness};
use serde::{Deserialize, Serialize};

use super::socket::MOST_RANKS;

/// A request to a process: one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Asks what the ranks of this process are doing.
    Status {
        /// Includes the threads of the process.
        stacks: bool,
        /// Includes the ranks of other processes, if this process can ask those.
        all: bool,
    },
    /// Asks for the last complete step of the process's ranks.
    Timeline,
    /// Requests the prompt of a rank. From then on, every line is a [`Typed`], and every reply a prompt's.
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
    /// The run continues; lines are read at the end of a step.
    Running,
    /// The run is over.
    End,
}

/// A line typed at a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Typed {
    pub typed: String,
}

/// Maximum size in bytes of a request, and of a line for a prompt.
pub const MOST_REQUEST: usize = 64 * 1024;

impl Typed {
    /// Wraps `line`.
    ///
    /// # Errors
    ///
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) if the line is too long.
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
    /// The last complete step of each rank of the process that has completed a step.
    Timeline(Vec<StepTimeline>),
    /// A message to the prompt.
    Prompt(ToPrompt),
    /// The request was refused; the reason is for people.
    Refused(String),
}

impl Reply {
    /// Returns true if the numbers of ranks are consistent. Readers allocate lists of that length, and
    /// compare each rank with the others of its groups.
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

/// The status of a process, as it reports it.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessStatus {
    pub world_size: usize,
    /// Number of optimizer steps of the run.
    pub steps: u64,
    /// Seconds that a rank may wait for the others in one collective; `None` if there is no limit.
    pub deadline_s: Option<f64>,
    pub ranks: Vec<RankStatus>,
    /// Ranks of the run that are held at a prompt or breakpoint.
    #[serde(default)]
    pub held: Vec<usize>,
    /// The places where ranks are held, as text, for ranks whose prompt this process serves.
    #[serde(default)]
    pub held_at: Vec<String>,
    /// Information about all ranks, if requested and if this process can ask them.
    pub all: Option<Vec<Known>>,
    /// The call stacks of the process's threads, if requested.
    pub threads: Option<Vec<Thread>>,
}

/// The status of a rank, as its process reports it.
#[derive(Debug, Serialize, Deserialize)]
pub struct RankStatus {
    pub rank: usize,
    /// The current optimizer step; 0 before the first one.
    pub step: u64,
    /// The last step saved in a complete checkpoint; 0 if there is none.
    pub saved: u64,
    /// Loss of the last step whose outcome is known; `None` if there is none, or if it is NaN.
    pub loss: Option<f64>,
    /// Tokens of all ranks per second in the step of `loss`.
    pub tokens_per_s: Option<f64>,
    /// Seconds taken by the longest recent step.
    pub longest_step_s: Option<f64>,
    /// Bytes that the rank holds now; `None` where they are not counted, as on a GPU.
    pub bytes: Option<u64>,
    /// The most bytes that the rank has held.
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
    /// Names of functions, innermost first, or other information instead. The client looks up the names from the
    /// addresses.
    pub calls: Vec<String>,
    /// Addresses in the functions.
    pub addresses: Vec<u64>,
    /// The reason why the call stack is unknown; `None` if it is known.
    pub problem: Option<String>,
}
