use crate::backend::{GroupRank, RankShared, empty};
use crate::buffer::Buffer;
use crate::call::{ArgumentError, Call};
use crate::communicator::{Communicator, SplitResult};
use crate::error::{Abort, CommError};
use crate::flight::Flight;
use crate::holds::Holds;
use crate::label::{Label, Phase};
use crate::payload::Payload;
use crate::rank_view::RankView;
use crate::recorder::{DEFAULT_CAPACITY, GroupId, Recorder};
use crate::sync::lock;
use crate::work::Work;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A single rank of an imaginary world: records operations, checks arguments, and completes immediately. For planning.
///
/// * All-gather copies the input into this rank's chunk of the output and leaves the rest.
/// * Reduce-scatter copies this rank's chunk of the input.
/// * All-reduce and broadcast return the buffer unchanged.
pub struct FakeCommunicator {
    identity: GroupRank,
    split_sizes: HashMap<String, usize>,
    group: GroupId,
    next: AtomicU64,
    abort: Arc<Mutex<Option<Abort>>>,
}

impl FakeCommunicator {
    /// Creates rank `rank` of a world of `world_size` ranks, named `"world"`.
    ///
    /// # Panics
    ///
    /// Panics if `rank` is not less than `world_size`.
    pub fn new(rank: usize, world_size: usize) -> FakeCommunicator {
        assert!(rank < world_size, "rank {rank} is not in a world of {world_size} ranks");
        let shared = RankShared::new(rank, world_size, "", DEFAULT_CAPACITY, Arc::default(), None);
        FakeCommunicator::join("world", rank, world_size, shared)
    }

    fn join(name: &str, rank: usize, world_size: usize, shared: Arc<RankShared>) -> FakeCommunicator {
        let identity = GroupRank { name: name.into(), rank, world_ranks: (0..world_size).collect(), shared };
        FakeCommunicator {
            group: identity.shared.recorder.join(&identity.name, &identity.world_ranks),
            identity,
            split_sizes: HashMap::new(),
            next: AtomicU64::new(0),
            abort: Arc::default(),
        }
    }

    /// Sets the number of ranks in groups that are split off, by group name; 1 for other names. In a group of `n` of
    /// `w` ranks, this rank's number follows from the color: `n` consecutive ranks if `color == rank / n`, every `w /
    /// n`-th rank if
    /// `color == rank % (w / n)`; otherwise it is the key. A split that matches none of these fails with
    /// [`CommError::Invalid`].
    pub fn with_split_sizes(mut self, sizes: HashMap<String, usize>) -> FakeCommunicator {
        self.split_sizes = sizes;
        self
    }

    fn record(&self, call: &Call) -> Result<(), CommError> {
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let recorder = self.recorder();
        let record = recorder.enqueued(self.group, sequence, call, self.identity.rank);
        recorder.started(record);
        let site = self.identity.site(sequence, call.operation, call.label.clone());
        if let Some(by) = lock(&self.abort).clone() {
            return Err(CommError::Aborted { site, by });
        }
        if let Some(problem) = call.problem {
            return Err(CommError::Invalid { site, problem });
        }
        recorder.finished(record);
        Ok(())
    }

    fn run(&self, label: Label, payload: Payload) -> Work {
        let call = payload.call(label, self.world_size()).on_host_only();
        Work::ready(self.record(&call).map(|()| match payload {
            Payload::AllGather { input, mut output } => {
                let start = self.identity.rank * input.size_in_bytes();
                let chunk = &mut output.as_bytes_mut()[start..start + input.size_in_bytes()];
                chunk.copy_from_slice(input.as_bytes());
                output
            }
            Payload::ReduceScatter { input, mut output } => {
                let start = self.identity.rank * output.size_in_bytes();
                let chunk = &input.as_bytes()[start..start + output.size_in_bytes()];
                output.as_bytes_mut().copy_from_slice(chunk);
                output
            }
            Payload::AllReduce { buffer } | Payload::Broadcast { buffer, .. } => buffer,
            Payload::Nothing => empty(),
        }))
    }

    /// Returns this rank's number in a new group of `size` ranks; see [`FakeCommunicator::with_split_sizes`].
    fn new_rank(&self, size: usize, color: u32, key: i64) -> Option<usize> {
        let rank = self.identity.rank;
        if size == 0 || size > self.world_size() {
            return None;
        }
        let color = usize::try_from(color).ok()?;
        let groups = self.world_size() / size;
        if color == rank / size {
            Some(rank % size)
        } else if color == rank % groups && rank / groups < size {
            Some(rank / groups)
        } else {
            usize::try_from(key).ok().filter(|rank| *rank < size)
        }
    }
}

impl Communicator for FakeCommunicator {
    fn rank(&self) -> usize {
        self.identity.rank
    }

    fn world_size(&self) -> usize {
        self.identity.world_ranks.len()
    }

    fn name(&self) -> &str {
        &self.identity.name
    }

    fn backend(&self) -> &'static str {
        "fake"
    }

    fn is_one_process(&self) -> bool {
        false
    }

    fn all_gather(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        self.run(label, Payload::AllGather { input, output })
    }

    fn reduce_scatter(&self, label: Label, input: Arc<Buffer>, output: Buffer) -> Work {
        self.run(label, Payload::ReduceScatter { input, output })
    }

    fn all_reduce(&self, label: Label, buffer: Buffer) -> Work {
        self.run(label, Payload::AllReduce { buffer })
    }

    fn broadcast(&self, label: Label, buffer: Buffer, root: usize) -> Work {
        self.run(label, Payload::Broadcast { buffer, root })
    }

    fn barrier(&self, label: Label) -> Work {
        self.run(label, Payload::Nothing)
    }

    fn split_within(&self, name: &str, color: Option<u32>, key: i64, _: Duration) -> SplitResult {
        let mut call = Call::split(Label::new(name, Phase::Init), color, key);
        let size = self.split_sizes.get(name).copied();
        let (group_size, new_rank) = match (size, color) {
            (Some(size), Some(color)) => (size, self.new_rank(size, color, key)),
            _ => (1, Some(0)),
        };
        if new_rank.is_none() {
            let (rank, world_size) = (self.identity.rank, self.world_size());
            call.problem = Some(ArgumentError::GroupSize { rank, world_size, group_size });
        }
        self.record(&call)?;
        let shared = || Arc::clone(&self.identity.shared);
        let new = new_rank.zip(color).map(|(rank, _)| FakeCommunicator {
            split_sizes: self.split_sizes.clone(),
            abort: Arc::clone(&self.abort),
            ..FakeCommunicator::join(name, rank, group_size, shared())
        });
        Ok(new.map(|group| Arc::new(group) as _))
    }

    fn abort(&self, reason: &str) {
        lock(&self.abort).get_or_insert(self.identity.abort(reason));
    }

    fn hold(&self, is_held: bool) {
        let shared = &self.identity.shared;
        shared.holds.set(shared.world_rank, is_held);
    }

    fn shares_holds(&self) -> bool {
        true
    }

    fn holds(&self) -> &Holds {
        &self.identity.shared.holds
    }

    fn failure(&self) -> Option<CommError> {
        None
    }

    fn nodes(&self) -> Vec<usize> {
        vec![0; self.world_size()]
    }

    fn flight(&self) -> Flight {
        self.identity.shared.flight(self.backend(), usize::MAX)
    }

    fn recorder(&self) -> &Arc<Recorder> {
        &self.identity.shared.recorder
    }

    fn view(&self) -> RankView {
        RankView::new(Arc::clone(&self.identity.shared), self.backend(), None)
    }
}

impl fmt::Debug for FakeCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self as &dyn Communicator).fmt(f)
    }
}
