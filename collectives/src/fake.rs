//! One rank of a world whose other ranks do not exist.

use crate::backend::RankShared;
use crate::buffer::Buffer;
use crate::call::{ArgumentError, Call, CallSite};
use crate::communicator::Communicator;
use crate::dtype::DType;
use crate::error::{Abort, CommError};
use crate::flight::Flight;
use crate::label::{Label, Phase};
use crate::recorder::{GroupId, Recorder};
use crate::sync::lock;
use crate::work::Work;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Records operations instead of running them; every operation completes at once.
///
/// It shows what one rank of a large world would communicate, for planning. Results are those of a world
/// whose other ranks contribute nothing:
///
/// * all-gather copies the input into this rank's chunk of the output and leaves the rest;
/// * reduce-scatter copies this rank's chunk of the input;
/// * all-reduce and broadcast return the buffer as it is.
///
/// Arguments are checked as in a real world.
pub struct FakeCommunicator {
    rank: usize,
    world_size: usize,
    name: Arc<str>,
    split_sizes: HashMap<String, usize>,
    shared: Arc<RankShared>,
    group: GroupId,
    /// Number of the next operation.
    next: AtomicU64,
    /// Set once any group of this world has been aborted.
    abort: Arc<Mutex<Option<Abort>>>,
}

impl FakeCommunicator {
    /// Makes rank `rank` of a world of `world_size` ranks, named `"world"`.
    ///
    /// # Panics
    ///
    /// If `rank` is not less than `world_size`.
    pub fn new(rank: usize, world_size: usize) -> FakeCommunicator {
        assert!(rank < world_size, "rank {rank} is not in a world of {world_size} ranks");
        let (name, recorder) = (Arc::from("world"), Arc::<Recorder>::default());
        let group = recorder.join(&name, &(0..world_size).collect::<Vec<_>>());
        FakeCommunicator {
            rank,
            world_size,
            name,
            split_sizes: HashMap::new(),
            shared: Arc::new(RankShared { world_rank: rank, world_size, recorder, on_worker_start: None }),
            group,
            next: AtomicU64::new(0),
            abort: Arc::default(),
        }
    }

    /// Sets how many ranks the groups split off under a name have.
    ///
    /// A split cannot know the colors that the other ranks pass. Without a size under its name, the new group
    /// has one rank. With size `n` of `w` ranks, this rank's number in the new group follows from its color:
    /// groups of `n` consecutive ranks if `color == rank / n`, else groups of every `w / n`-th rank if
    /// `color == rank % (w / n)`, else the key is the number. A split that fits none of these fails with
    /// [`CommError::Invalid`].
    pub fn with_split_sizes(mut self, sizes: HashMap<String, usize>) -> FakeCommunicator {
        self.split_sizes = sizes;
        self
    }

    /// Numbers, records and checks a call.
    fn record(&self, call: &Call) -> Result<(), CommError> {
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let recorder = &self.shared.recorder;
        let record = recorder.enqueued(self.group, sequence, call, self.rank);
        recorder.started(record);
        let site = CallSite {
            group: Arc::clone(&self.name),
            sequence,
            rank: self.rank,
            operation: call.operation,
            label: call.label.clone(),
        };
        if let Some(abort) = &*lock(&self.abort) {
            return Err(abort.error(&site));
        }
        if let Some(problem) = call.problem {
            return Err(CommError::invalid(&site, problem));
        }
        recorder.finished(record);
        Ok(())
    }

    fn run(&self, call: Call, result: impl FnOnce() -> Buffer) -> Work {
        Work::ready(self.record(&call.on_host_only()).map(|()| result()))
    }

    /// This rank's number in a new group of `size` ranks; see [`FakeCommunicator::with_split_sizes`].
    fn new_rank(&self, size: usize, color: u32, key: i64) -> Option<usize> {
        if size == 0 || size > self.world_size {
            return None;
        }
        let color = usize::try_from(color).ok()?;
        let groups = self.world_size / size;
        if color == self.rank / size {
            Some(self.rank % size)
        } else if color == self.rank % groups && self.rank / groups < size {
            Some(self.rank / groups)
        } else {
            usize::try_from(key).ok().filter(|rank| *rank < size)
        }
    }
}

impl Communicator for FakeCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn backend(&self) -> &'static str {
        "fake"
    }

    fn all_gather(&self, label: Label, input: Arc<Buffer>, mut output: Buffer) -> Work {
        let call = Call::all_gather(label, &input, &output, self.world_size);
        self.run(call, || {
            let start = self.rank * input.size_in_bytes();
            output.as_bytes_mut()[start..start + input.size_in_bytes()].copy_from_slice(input.as_bytes());
            output
        })
    }

    fn reduce_scatter(&self, label: Label, input: Arc<Buffer>, mut output: Buffer) -> Work {
        let call = Call::reduce_scatter(label, &input, &output, self.world_size);
        self.run(call, || {
            let start = self.rank * output.size_in_bytes();
            let end = start + output.size_in_bytes();
            output.as_bytes_mut().copy_from_slice(&input.as_bytes()[start..end]);
            output
        })
    }

    fn all_reduce(&self, label: Label, buffer: Buffer) -> Work {
        self.run(Call::all_reduce(label, &buffer), || buffer)
    }

    fn broadcast(&self, label: Label, buffer: Buffer, root: usize) -> Work {
        let call = Call::broadcast(label, &buffer, root, self.world_size);
        self.run(call, || buffer)
    }

    fn barrier(&self, label: Label) -> Work {
        self.run(Call::barrier(label), || Buffer::zeros(DType::U8, 0))
    }

    fn split_within(
        &self,
        name: &str,
        color: Option<u32>,
        key: i64,
        _: Duration,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let mut call = Call::split(Label::new(name, Phase::Init), color, key);
        let size = self.split_sizes.get(name).copied();
        let (world_size, rank) = match (size, color) {
            (Some(size), Some(color)) => (size, self.new_rank(size, color, key)),
            _ => (1, Some(0)),
        };
        if rank.is_none() {
            call.problem = Some(ArgumentError::GroupSize {
                rank: self.rank,
                world_size: self.world_size,
                group_size: world_size,
            });
        }
        self.record(&call)?;
        let Some((rank, _)) = rank.zip(color) else {
            return Ok(None);
        };
        let name = Arc::from(name);
        // The world ranks of the other members are not known here.
        let others = self.shared.recorder.join(&name, &(0..world_size).collect::<Vec<_>>());
        Ok(Some(Arc::new(FakeCommunicator {
            rank,
            world_size,
            name,
            split_sizes: self.split_sizes.clone(),
            shared: Arc::clone(&self.shared),
            group: others,
            next: AtomicU64::new(0),
            abort: Arc::clone(&self.abort),
        })))
    }

    fn abort(&self, reason: &str) {
        lock(&self.abort).get_or_insert(Abort {
            origin: Arc::clone(&self.name),
            rank: self.rank,
            world_rank: self.shared.world_rank,
            reason: Arc::from(reason),
        });
    }

    fn nodes(&self) -> Vec<usize> {
        vec![0; self.world_size]
    }

    fn flight(&self) -> Flight {
        self.shared.flight(self.backend(), String::new())
    }

    fn recorder(&self) -> &Arc<Recorder> {
        &self.shared.recorder
    }
}

impl fmt::Debug for FakeCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self as &dyn Communicator).fmt(f)
    }
}
