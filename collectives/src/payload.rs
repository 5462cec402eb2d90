//! The buffers of an operation, and the checks that need no other ranks.

use crate::buffer::Buffer;
use crate::call::{Argument, ArgumentError, Call};
use crate::label::Label;
use crate::operation::Operation;
use std::sync::Arc;

/// The buffers of an operation.
pub enum Payload {
    /// An all-gather.
    AllGather {
        /// This rank's chunk.
        input: Arc<Buffer>,
        /// The buffer for the chunks of all ranks.
        output: Buffer,
    },
    /// A reduce-scatter.
    ReduceScatter {
        /// This rank's addend.
        input: Arc<Buffer>,
        /// The buffer for this rank's chunk of the sum.
        output: Buffer,
    },
    /// An all-reduce.
    AllReduce {
        /// This rank's addend, replaced by the sum.
        buffer: Buffer,
    },
    /// A broadcast.
    Broadcast {
        /// The buffer to send on rank `root`, else the buffer to overwrite.
        buffer: Buffer,
        /// The rank that sends.
        root: usize,
    },
    /// A barrier, a split, or a call with invalid arguments, which is posted so that all ranks learn of the error.
    Nothing,
}

impl Payload {
    /// Returns the call that has these buffers, or a barrier's, in a group of `world_size` ranks.
    pub(crate) fn call(&self, label: Label, world_size: usize) -> Call {
        let (operation, buffer, count, problem) = match self {
            Payload::AllGather { input, output } => {
                let length = || check_length(Argument::Output, output, input, world_size);
                let problem = check_pair(input, output).or_else(length);
                (Operation::AllGather, &**input, output.len(), problem)
            }
            Payload::ReduceScatter { input, output } => {
                let length = || check_length(Argument::Input, input, output, world_size);
                let problem = check_pair(input, output).or_else(length).or_else(|| check_sum(input));
                (Operation::ReduceScatter, &**input, input.len(), problem)
            }
            Payload::AllReduce { buffer } => (Operation::AllReduce, buffer, buffer.len(), check_sum(buffer)),
            Payload::Broadcast { buffer, root } => {
                let root = *root;
                let problem = (root >= world_size).then_some(ArgumentError::Root { root, world_size });
                (Operation::Broadcast, buffer, buffer.len(), problem)
            }
            Payload::Nothing => return Call::barrier(label),
        };
        let mut call = Call::new(operation, label, buffer.dtype(), count);
        (call.location, call.problem) = (buffer.location(), problem);
        if let Payload::Broadcast { root, .. } = self {
            call.root = Some(*root);
        }
        call
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn output(&self) -> Option<&Buffer> {
        match self {
            Payload::AllGather { output: buffer, .. }
            | Payload::ReduceScatter { output: buffer, .. }
            | Payload::AllReduce { buffer }
            | Payload::Broadcast { buffer, .. } => Some(buffer),
            Payload::Nothing => None,
        }
    }
}

fn check_pair(input: &Buffer, output: &Buffer) -> Option<ArgumentError> {
    if input.dtype() != output.dtype() {
        return Some(ArgumentError::DType { input: input.dtype(), output: output.dtype() });
    }
    let (from, to) = (input.location(), output.location());
    if from != to {
        return Some(ArgumentError::Location { input: from, output: to });
    }
    (!input.is_beside(output)).then_some(ArgumentError::OtherDevice)
}

fn check_length(name: Argument, full: &Buffer, shard: &Buffer, world_size: usize) -> Option<ArgumentError> {
    let expected = shard.len().saturating_mul(world_size);
    (full.len() != expected).then(|| ArgumentError::Length { buffer: name, expected, actual: full.len() })
}

fn check_sum(buffer: &Buffer) -> Option<ArgumentError> {
    let dtype = buffer.dtype();
    (!dtype.has_sum()).then_some(ArgumentError::NoSum { dtype })
}
