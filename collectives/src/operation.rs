//! The operations of a group, and the bytes that each sends.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Every rank gets the inputs of all ranks, in rank order.
    AllGather,
    /// Every rank gets its chunk of the sum of all inputs.
    ReduceScatter,
    /// Every rank gets the sum of all buffers.
    AllReduce,
    /// Every rank gets the root's buffer.
    Broadcast,
    /// Every rank waits until all have arrived.
    Barrier,
    /// The group is divided into smaller groups.
    Split,
}

impl Operation {
    /// Returns the bytes that `rank` sends in a ring algorithm for a full tensor of `bytes` bytes (an all-gather's
    /// output, a reduce-scatter's input, else the buffer). All-gather and reduce-scatter send `(n-1)/n` of it, and
    /// all-reduce twice that, rounded down. In a broadcast, all ranks but the one before the root send the buffer once.
    /// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    pub fn ring_bytes(self, bytes: u64, rank: usize, world_size: usize, root: usize) -> u64 {
        let world = (world_size as u128).max(1);
        let others = world - 1;
        let bytes_wide = u128::from(bytes);
        let sent = match self {
            Operation::AllGather | Operation::ReduceScatter => others * (bytes_wide / world),
            Operation::AllReduce => 2 * others * bytes_wide / world,
            Operation::Broadcast => {
                let is_last = (rank as u128 + 1) % world == root as u128 % world;
                if is_last { 0 } else { bytes_wide }
            }
            Operation::Barrier | Operation::Split => 0,
        };
        u64::try_from(sent).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_volumes() {
        let sent = |operation: Operation, bytes, rank| operation.ring_bytes(bytes, rank, 4, 1);
        assert_eq!(sent(Operation::AllGather, 400, 0), 300);
        assert_eq!(sent(Operation::ReduceScatter, 400, 0), 300);
        assert_eq!(sent(Operation::AllReduce, 400, 0), 600);
        assert_eq!(sent(Operation::AllReduce, 5, 0), 7);
        assert_eq!(sent(Operation::Barrier, 0, 0), 0);
        let broadcast: Vec<u64> = (0..4).map(|r| sent(Operation::Broadcast, 400, r)).collect();
        assert_eq!(broadcast, [0, 400, 400, 400]);
    }

    #[test]
    fn one_rank_sends_nothing() {
        for operation in [
            Operation::AllGather,
            Operation::ReduceScatter,
            Operation::AllReduce,
            Operation::Broadcast,
            Operation::Barrier,
            Operation::Split,
        ] {
            assert_eq!(operation.ring_bytes(64, 0, 1, 0), 0, "{operation}");
        }
    }
}
