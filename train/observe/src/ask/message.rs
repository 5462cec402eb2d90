//! What a process of a run is asked, and what it says.

use std::io;

use kiln_collectives::{Flight, StepTimeline, Witness};
use serde::{Deserialize, Serialize};

use super::socket::MOST_RANKS;

/// What a process is asked: one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// What are your ranks doing?
    Status {
        /// And your threads?
        stacks: bool,
        /// And the ranks of other processes, as far as you can ask them?
        all: bool,
    },
    /// What have your ranks done in the last step that has ended?
    Timeline,
    /// Give me the prompt of a rank. From here on, every line is a [`Typed`], and every reply a prompt's.
    Attach {
        /// The rank; whichever is held without.
        rank: Option<usize>,
    },
}

/// What a prompt is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToPrompt {
    /// Something to show.
    Text(String),
    /// A line is waited for; this comes before it.
    Ask(String),
    /// The run goes on; lines are read at the end of a step.
    Running,
    /// The run is over.
    End,
}

/// A line that was typed at a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Typed {
    pub typed: String,
}

/// Bytes of a request, and of a line for a prompt.
pub const MOST_REQUEST: usize = 64 * 1024;

impl Typed {
    /// `line`, if a process reads as much.
    ///
    /// # Errors
    ///
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) if the line is too long.
    pub fn new(line: &str) -> io::Result<Self> {
        let typed = Typed { typed: line.to_owned() };
        match serde_json::to_vec(&typed)?.len() < MOST_REQUEST {
            true => Ok(typed),
            false => {
                let problem = format!("a line has at most {MOST_REQUEST} bytes");
                Err(io::Error::new(io::ErrorKind::InvalidInput, problem))
            }
        }
    }
}

/// What a process says: one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Status(Box<ProcessStatus>),
    /// Of each of its ranks that has ended a step.
    Timeline(Vec<StepTimeline>),
    /// For the prompt.
    Prompt(ToPrompt),
    /// The request is not answered; the reason is for people.
    Refused(String),
}

impl Reply {
    /// Returns whether the numbers of ranks are consistent. Readers allocate lists of that length, and compare each rank
    /// with the others of its groups.
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

/// A process of a run, in its own words.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessStatus {
    pub world_size: usize,
    /// Optimizer steps of the run.
    pub steps: u64,
    /// Seconds that a rank may wait for the others in one collective; `None` if there is no limit.
    pub deadline_s: Option<f64>,
    pub ranks: Vec<RankStatus>,
    /// Ranks of the run that somebody holds.
    #[serde(default)]
    pub held: Vec<usize>,
    /// Where those are held whose prompt this process has, in words.
    #[serde(default)]
    pub held_at: Vec<String>,
    /// What is known of all ranks, if that was asked for and this process can ask them.
    pub all: Option<Vec<Known>>,
    /// What its threads are in the middle of, if that was asked for.
    pub threads: Option<Vec<Thread>>,
}

/// A rank, in the words of its process.
#[derive(Debug, Serialize, Deserialize)]
pub struct RankStatus {
    pub rank: usize,
    /// The optimizer step that it is in; 0 before the first one.
    pub step: u64,
    /// The step whose end is in a complete checkpoint; 0 if there is none.
    pub saved: u64,
    /// Loss of the last step whose outcome is known; `None` if there is none, or it is not a number.
    pub loss: Option<f64>,
    /// Tokens of all ranks per second in that step.
    pub tokens_per_s: Option<f64>,
    /// Seconds of the longest step of late.
    pub longest_step_s: Option<f64>,
    /// Bytes that the rank holds now; `None` where nobody counts them, as on a GPU.
    pub bytes: Option<u64>,
    /// The most bytes that it has held.
    pub peak_bytes: Option<u64>,
    pub flight: Flight,
}

/// What rank 0 has found out of a rank, in a form that can be sent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Known {
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
pub struct Thread {
    pub id: i32,
    pub name: String,
    /// Functions, the innermost one first; or what is known instead. Whoever asks finds them by the addresses.
    pub calls: Vec<String>,
    /// Addresses in the functions.
    pub addresses: Vec<u64>,
    /// Why there are no functions, if there are none.
    pub problem: Option<String>,
}
