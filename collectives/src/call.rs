//! One rank's call of an operation: its arguments, their checks, and the comparison with other ranks' calls.

use crate::buffer::Location;
use crate::dtype::DType;
use crate::label::{Label, text};
use crate::operation::Operation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
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

/// An invalid argument that a rank can detect without the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum ArgumentError {
    /// The lengths of the two buffers do not match.
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
    /// One of input and output is on the host, and one on a GPU.
    #[error("input is on {input} but output is on {output}")]
    Location {
        /// Location of the input.
        input: Location,
        /// Location of the output.
        output: Location,
    },
    /// The buffers are on different GPUs, between which this backend cannot move data.
    #[error("the buffers are on different GPUs")]
    OtherDevice,
    /// The backend cannot move GPU memory.
    #[error(
        "the buffers are on a GPU, and this backend has no transport for device memory (processes \
         need NCCL, which is the feature `cuda`; ranks as threads of one process need none)"
    )]
    NoDeviceTransport,
    /// The GPU has no arithmetic for the type.
    #[error("this GPU cannot sum {dtype}")]
    NoDeviceSum {
        /// Type of the buffer.
        dtype: DType,
    },
    /// The root of a broadcast is not a rank of the group.
    #[error("root {root} is not a rank of a group of {world_size}")]
    Root {
        /// Requested root.
        root: usize,
        /// Number of ranks in the group.
        world_size: usize,
    },
    /// The type can be moved but not summed.
    #[error("{dtype} cannot be summed")]
    NoSum {
        /// Type of the buffer.
        dtype: DType,
    },
    /// The planned size of a new group does not fit the group being split.
    #[error("cannot place rank {rank} of {world_size} in a group of {group_size}")]
    GroupSize {
        /// Rank in the group being split.
        rank: usize,
        /// Number of ranks in the group being split.
        world_size: usize,
        /// Planned size of the new group.
        group_size: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SplitKey {
    pub(crate) color: Option<u32>,
    pub(crate) key: i64,
}

/// One rank's call, in the form that is compared with the other ranks' calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Call {
    /// Kind of operation.
    pub operation: Operation,
    /// Element type; `u8` for operations without payload.
    pub dtype: DType,
    /// Elements of the full tensor: the output of an all-gather, the input of a reduce-scatter, else the buffer.
    pub count: usize,
    /// Location of the buffers; the host for operations without payload.
    pub location: Location,
    /// Root of a broadcast.
    pub root: Option<usize>,
    /// Purpose of the operation.
    pub label: Label,
    /// The error that the calling rank found in its arguments.
    pub problem: Option<ArgumentError>,
    #[serde(rename = "place")]
    pub(crate) split_key: Option<SplitKey>,
}

impl Call {
    pub(crate) fn new(operation: Operation, label: Label, dtype: DType, count: usize) -> Call {
        let location = Location::Host;
        Call { operation, dtype, count, location, root: None, label, problem: None, split_key: None }
    }

    /// Marks a call with buffers on a GPU as unsupported.
    pub(crate) fn on_host_only(mut self) -> Call {
        if self.location == Location::Device {
            self.problem = self.problem.or(Some(ArgumentError::NoDeviceTransport));
        }
        self
    }

    pub(crate) fn barrier(label: Label) -> Call {
        Call::new(Operation::Barrier, label, DType::U8, 0)
    }

    pub(crate) fn split(label: Label, color: Option<u32>, key: i64) -> Call {
        let mut call = Call::new(Operation::Split, label, DType::U8, 0);
        call.split_key = Some(SplitKey { color, key });
        call
    }

    /// Compares the calls of all ranks, in rank order. Returns the name and ranks of each group that a split creates,
    /// or `None` if the calls differ or one is invalid.
    pub fn agree(calls: &[Call]) -> Option<Vec<(Arc<str>, Vec<usize>)>> {
        if calls.iter().any(|call| call.problem.is_some()) {
            return None;
        }
        // Splits compare names only within a color, so each color has its own reference.
        let mut references: BTreeMap<Option<u32>, &Call> = BTreeMap::new();
        let agree = calls.iter().all(|call| {
            let color = call.split_key.and_then(|split| split.color);
            call.agrees_with(&calls[0]) && call.agrees_with(references.entry(color).or_insert(call))
        });
        let groups = partition(calls.iter().map(|call| call.split_key)).into_values();
        let named = |ranks: Vec<usize>| (Arc::clone(&calls[ranks[0]].label.scope), ranks);
        agree.then(|| groups.map(named).collect())
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.count as u64).saturating_mul(self.dtype.size() as u64)
    }

    pub(crate) fn agrees_with(&self, other: &Call) -> bool {
        let same_scope = match (self.split_key, other.split_key) {
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

/// Groups the ranks of a split by color, each group in its new order. `keys` has one entry per rank.
pub(crate) fn partition(keys: impl Iterator<Item = Option<SplitKey>>) -> BTreeMap<u32, Vec<usize>> {
    let mut groups: BTreeMap<u32, Vec<(i64, usize)>> = BTreeMap::new();
    for (rank, key) in keys.enumerate() {
        if let Some(SplitKey { color: Some(color), key }) = key {
            groups.entry(color).or_default().push((key, rank));
        }
    }
    let order = |mut ranks: Vec<(i64, usize)>| {
        ranks.sort_unstable();
        ranks.into_iter().map(|(_, rank)| rank).collect()
    };
    groups.into_iter().map(|(color, ranks)| (color, order(ranks))).collect()
}

/// Identifies one call by one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallSite {
    /// Name of the group.
    #[serde(with = "text")]
    pub group: Arc<str>,
    /// Sequence number of the operation within its group.
    pub sequence: u64,
    /// The rank in the group.
    pub rank: usize,
    /// Kind of operation.
    pub operation: Operation,
    /// Purpose of the operation.
    pub label: Label,
}

impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CallSite { group, sequence, operation, label, .. } = self;
        write!(f, "{operation} {sequence} of group \"{group}\" for {label}")
    }
}

/// Lists the call of each rank; ranks with equal calls share an entry.
pub(crate) fn list_calls<'a>(calls: impl Iterator<Item = (usize, &'a Call)>) -> String {
    list_distinct(calls.map(|(rank, call)| (rank, format!("called {call}"))), |text, _| text)
}

/// Lists each distinct value, formatted by `text`, with the ranks that have it.
pub(crate) fn list_distinct<T: PartialEq>(
    said: impl IntoIterator<Item = (usize, T)>,
    text: impl for<'a> Fn(&'a T, usize) -> &'a str,
) -> String {
    let mut distinct: Vec<(T, Vec<usize>)> = Vec::new();
    for (rank, said) in said {
        match distinct.iter_mut().find(|(known, _)| *known == said) {
            Some((_, ranks)) => ranks.push(rank),
            None => distinct.push((said, vec![rank])),
        }
    }
    let part = |(said, ranks): &(T, Vec<usize>)| format!("{} {}", list_ranks(ranks), text(said, ranks.len()));
    distinct.iter().map(part).collect::<Vec<_>>().join("; ")
}

/// Formats ranks, such as `rank 2` or `ranks 0, 1, 3`.
pub(crate) fn list_ranks(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, numbers.join(", "))
}
