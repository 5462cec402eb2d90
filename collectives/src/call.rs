//! One rank's call of an operation: the facts that all ranks must agree on, and the checks on them.

use crate::buffer::{Buffer, Location};
use crate::dtype::DType;
use crate::label::Label;
use crate::operation::Operation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::Arc;

/// One of the buffers of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Argument {
    /// The buffer that this rank contributes.
    Input,
    /// The buffer that the operation fills.
    Output,
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Argument::Input => "input",
            Argument::Output => "output",
        })
    }
}

/// A wrong argument that one rank can recognize without the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum ArgumentError {
    /// The buffer whose length follows from the other one has another length.
    #[error("{buffer} has {actual} elements, needs {expected}")]
    Length {
        /// The buffer with the wrong length.
        buffer: Argument,
        /// Elements needed.
        expected: usize,
        /// Elements passed.
        actual: usize,
    },
    /// Input and output hold different types.
    #[error("input is {input} but output is {output}")]
    DType {
        /// Type of the input.
        input: DType,
        /// Type of the output.
        output: DType,
    },
    /// One of input and output is on the host, the other one on a GPU.
    #[error("input is on {input} but output is on {output}")]
    Location {
        /// Where the input is.
        input: Location,
        /// Where the output is.
        output: Location,
    },
    /// The buffers are on several GPUs, and this backend cannot move data between them.
    #[error("the buffers are on different GPUs")]
    OtherDevice,
    /// The backend cannot move the memory of GPUs.
    #[error(
        "the buffers are on a GPU, and this backend has no transport for device memory (processes \
         need NCCL, which is the feature `cuda`; ranks as threads of one process need none)"
    )]
    NoDeviceTransport,
    /// The GPU has no arithmetic for the type.
    #[error("this GPU cannot sum {dtype}")]
    NoDeviceSum {
        /// The type that was passed.
        dtype: DType,
    },
    /// The root of a broadcast is not a rank of the group.
    #[error("root {root} is not a rank of a group of {world_size}")]
    Root {
        /// The root that was passed.
        root: usize,
        /// Ranks in the group.
        world_size: usize,
    },
    /// The type can be moved but not summed.
    #[error("{dtype} cannot be summed")]
    NoSum {
        /// The type that was passed.
        dtype: DType,
    },
    /// A planned group does not fit into the group it is split from.
    #[error("cannot place rank {rank} of {world_size} in a group of {group_size}")]
    GroupSize {
        /// Rank in the group being split.
        rank: usize,
        /// Ranks in the group being split.
        world_size: usize,
        /// Ranks the new group should have.
        group_size: usize,
    },
}

/// The color and the key that a rank passed to a split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SplitKey {
    pub(crate) color: Option<u32>,
    pub(crate) key: i64,
}

/// One rank's call of one operation, as compared with those of the other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Call {
    /// Kind of operation.
    pub operation: Operation,
    /// Element type; `u8` for operations without payload.
    pub dtype: DType,
    /// Elements of the full tensor: output of all-gather, input of reduce-scatter, the buffer
    /// otherwise.
    pub count: usize,
    /// Where the buffers are; the host for operations without payload.
    pub location: Location,
    /// Root of a broadcast.
    pub root: Option<usize>,
    /// What the operation is for.
    pub label: Label,
    /// What the calling rank itself found wrong with its arguments.
    pub problem: Option<ArgumentError>,
    #[serde(rename = "place")]
    pub(crate) split_key: Option<SplitKey>,
}

impl Call {
    fn new(operation: Operation, label: Label, dtype: DType, count: usize) -> Call {
        let location = Location::Host;
        Call { operation, dtype, count, location, root: None, label, problem: None, split_key: None }
    }

    fn at(mut self, buffer: &Buffer) -> Call {
        self.location = buffer.location();
        self
    }

    /// Marks a call with buffers on a GPU as one that the backend cannot run.
    pub(crate) fn on_host_only(mut self) -> Call {
        if self.location == Location::Device {
            self.problem = self.problem.or(Some(ArgumentError::NoDeviceTransport));
        }
        self
    }

    /// A call that reads `input` and fills `output`; `count` is that of the longer one.
    fn from_to(operation: Operation, label: Label, input: &Buffer, output: &Buffer, count: usize) -> Call {
        let mut call = Call::new(operation, label, input.dtype(), count).at(input);
        call.problem = check_dtypes(input, output).or_else(|| check_locations(input, output));
        call
    }

    pub(crate) fn all_gather(label: Label, input: &Buffer, output: &Buffer, world_size: usize) -> Call {
        let mut call = Call::from_to(Operation::AllGather, label, input, output, output.len());
        let length = || check_length(Argument::Output, output, input.len(), world_size);
        call.problem = call.problem.or_else(length);
        call
    }

    pub(crate) fn reduce_scatter(label: Label, input: &Buffer, output: &Buffer, world_size: usize) -> Call {
        let mut call = Call::from_to(Operation::ReduceScatter, label, input, output, input.len());
        let length = || check_length(Argument::Input, input, output.len(), world_size);
        call.problem = call.problem.or_else(length).or_else(|| check_sum(input));
        call
    }

    pub(crate) fn all_reduce(label: Label, buffer: &Buffer) -> Call {
        let mut call = Call::new(Operation::AllReduce, label, buffer.dtype(), buffer.len()).at(buffer);
        call.problem = check_sum(buffer);
        call
    }

    pub(crate) fn broadcast(label: Label, buffer: &Buffer, root: usize, world_size: usize) -> Call {
        let mut call = Call::new(Operation::Broadcast, label, buffer.dtype(), buffer.len()).at(buffer);
        call.root = Some(root);
        call.problem = (root >= world_size).then_some(ArgumentError::Root { root, world_size });
        call
    }

    pub(crate) fn barrier(label: Label) -> Call {
        Call::new(Operation::Barrier, label, DType::U8, 0)
    }

    pub(crate) fn split(label: Label, color: Option<u32>, key: i64) -> Call {
        let mut call = Call::new(Operation::Split, label, DType::U8, 0);
        call.split_key = Some(SplitKey { color, key });
        call
    }

    /// Size of the full tensor in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        // usize has at most 64 bits on every target Rust supports.
        (self.count as u64).saturating_mul(self.dtype.size() as u64)
    }

    /// Whether `self` and `other` can be calls of the same operation.
    pub(crate) fn agrees_with(&self, other: &Call) -> bool {
        let same_scope = match (self.split_key, other.split_key) {
            // Ranks that end up in different groups may name them differently.
            (Some(mine), Some(theirs)) if mine.color != theirs.color => true,
            _ => self.label.scope == other.label.scope,
        };
        same_scope
            && self.operation == other.operation
            && self.dtype == other.dtype
            && self.count == other.count
            && self.location == other.location
            && self.root == other.root
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation)?;
        if !matches!(self.operation, Operation::Barrier | Operation::Split) {
            write!(f, " of {} {}", self.count, self.dtype)?;
        }
        if self.location == Location::Device {
            write!(f, " on {}", self.location)?;
        }
        if let Some(root) = self.root {
            write!(f, " from root {root}")?;
        }
        if let Some(color) = self.split_key.and_then(|split| split.color) {
            write!(f, " with color {color}")?;
        }
        write!(f, " for {}", self.label)?;
        if let Some(problem) = self.problem {
            write!(f, " [invalid: {problem}]")?;
        }
        Ok(())
    }
}

/// Whether all calls are valid and of the same operation.
pub(crate) fn calls_agree(calls: &[Call]) -> bool {
    if calls.iter().any(|call| call.problem.is_some()) {
        return false;
    }
    // Splits compare names within a color only, so each color has its own reference.
    let mut references: BTreeMap<Option<u32>, &Call> = BTreeMap::new();
    let Some(first) = calls.first() else {
        return true;
    };
    calls.iter().all(|call| {
        let color = call.split_key.and_then(|split| split.color);
        call.agrees_with(first) && call.agrees_with(references.entry(color).or_insert(call))
    })
}

/// The ranks of each new group of a split, in their new order.
pub(crate) fn partition(calls: &[Call]) -> BTreeMap<u32, Vec<usize>> {
    let mut groups: BTreeMap<u32, Vec<(i64, usize)>> = BTreeMap::new();
    for (rank, call) in calls.iter().enumerate() {
        if let Some((color, key)) = call.split_key.and_then(|split| Some((split.color?, split.key))) {
            groups.entry(color).or_default().push((key, rank));
        }
    }
    groups
        .into_iter()
        .map(|(color, mut ranks)| {
            ranks.sort_unstable();
            (color, ranks.into_iter().map(|(_, rank)| rank).collect())
        })
        .collect()
}

fn check_dtypes(input: &Buffer, output: &Buffer) -> Option<ArgumentError> {
    (input.dtype() != output.dtype())
        .then(|| ArgumentError::DType { input: input.dtype(), output: output.dtype() })
}

/// Checks that input and output are both on the host or both on the same GPU.
fn check_locations(input: &Buffer, output: &Buffer) -> Option<ArgumentError> {
    let (from, to) = (input.location(), output.location());
    if from != to {
        return Some(ArgumentError::Location { input: from, output: to });
    }
    (!input.is_beside(output)).then_some(ArgumentError::OtherDevice)
}

fn check_length(name: Argument, full: &Buffer, shard: usize, world_size: usize) -> Option<ArgumentError> {
    let expected = shard.saturating_mul(world_size);
    (full.len() != expected).then(|| ArgumentError::Length { buffer: name, expected, actual: full.len() })
}

fn check_sum(buffer: &Buffer) -> Option<ArgumentError> {
    let dtype = buffer.dtype();
    (!dtype.has_sum()).then_some(ArgumentError::NoSum { dtype })
}

/// Identifies one call of one rank, as errors name it.
#[derive(Clone, Debug)]
pub struct CallSite {
    pub group: Arc<str>,
    pub sequence: u64,
    pub rank: usize,
    pub operation: Operation,
    pub label: Label,
}

/// The calls that are known, with the ranks that made them.
pub(crate) fn known(calls: &[Option<Call>]) -> impl Iterator<Item = (usize, Call)> {
    calls.iter().enumerate().filter_map(|(rank, call)| Some((rank, call.clone()?)))
}

/// Lists the call of each rank; ranks with the same call share an entry.
pub(crate) fn list_calls(calls: impl IntoIterator<Item = (usize, Call)>) -> String {
    let mut distinct: Vec<(String, Vec<usize>)> = Vec::new();
    for (rank, call) in calls {
        let call = call.to_string();
        match distinct.iter_mut().find(|(known, _)| *known == call) {
            Some((_, ranks)) => ranks.push(rank),
            None => distinct.push((call, vec![rank])),
        }
    }
    let parts: Vec<String> =
        distinct.iter().map(|(call, ranks)| format!("{} called {call}", list_ranks(ranks))).collect();
    parts.join("; ")
}

/// Such as `rank 2` or `ranks 0, 1, 3`.
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    let mut text = String::from(if ranks.len() == 1 { "rank " } else { "ranks " });
    for (index, rank) in ranks.iter().enumerate() {
        let separator = if index == 0 { "" } else { ", " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{rank}");
    }
    text
}
