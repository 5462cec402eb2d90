//! The number of ranks, their connection, and the check that they were started alike.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

#[cfg(feature = "mpi")]
use kiln_collectives::mpi::{Mpi, MpiOptions};
use kiln_collectives::tcp::{Arrivals, JoinOptions, Secret, TcpCommunicator};
use kiln_collectives::{Buffer, Communicator, DType, Label, Phase, WorkerStart};
use kiln_shard::{Mesh, ShardError, Strategy, memory};
use sha2::{Digest, Sha256};

use crate::error::{Result, TrainError};
use kiln_config::device::{DeviceError, ResolvedDevice, share_gpu};
use kiln_config::{CommBackend, CommSection, Config};
use kiln_launch::place::RankEnv;

/// Returns the number of ranks: that of the launcher if there is a `place`, else `ranks`, else that of `config`.
///
/// # Errors
///
/// If `config` requires other processes and there are none, or the reverse.
pub fn ranks_of(config: &Config, place: Option<&RankEnv>, ranks: Option<usize>) -> Result<usize> {
    let backend = config.comm.backend;
    match place {
        None if backend == CommBackend::Tcp => Err(TrainError::usage(
            "comm.backend = \"tcp\" needs one process per rank: start them with `kiln launch`, \
             or use \"auto\"",
        )),
        None if backend == CommBackend::Mpi => Err(TrainError::usage(
            "comm.backend = \"mpi\" needs several processes: start them with `mpirun`, or use \"auto\"",
        )),
        None => Ok(ranks.unwrap_or(config.train.ranks)),
        Some(place) if backend == CommBackend::Local => Err(TrainError::usage(format!(
            "comm.backend = \"local\", but this process is rank {} of {}: use \"auto\", or \
             start one process without a launcher",
            place.rank, place.world_size
        ))),
        Some(place) => size_of(place, ranks),
    }
}

/// Returns the number of ranks of the job at `place`; a different number in `ranks` is an error.
pub fn size_of(place: &RankEnv, ranks: Option<usize>) -> Result<usize> {
    match ranks {
        Some(ranks) if ranks != place.world_size => Err(TrainError::usage(format!(
            "--ranks {ranks}, but the launcher has started {} processes, and each is a rank: remove --ranks, \
             or start {ranks} processes",
            place.world_size
        ))),
        _ => Ok(place.world_size),
    }
}

/// Ranks that are connected.
pub struct World {
    communicator: Arc<dyn Communicator>,
    /// The sockets that NCCL needs to connect.
    #[cfg(feature = "cuda")]
    sockets: Option<Arc<TcpCommunicator>>,
    #[cfg(feature = "mpi")]
    mpi: Option<Mpi>,
}

impl World {
    /// Wraps a communicator that was created elsewhere.
    pub fn given(communicator: Arc<dyn Communicator>) -> Self {
        World {
            communicator,
            #[cfg(feature = "cuda")]
            sockets: None,
            #[cfg(feature = "mpi")]
            mpi: None,
        }
    }

    /// Leaves the other ranks, which may hang, without waiting, after this rank has failed and notified them.
    pub fn give_up(&self) {
        #[cfg(feature = "mpi")]
        if let Some(mpi) = &self.mpi {
            mpi.give_up();
        }
    }

    /// Returns the communicator of all ranks.
    pub fn communicator(&self) -> Arc<dyn Communicator> {
        self.communicator.clone()
    }

    /// Compares the devices of all ranks, of which this rank has `device`, and connects GPUs through NCCL. Collective.
    /// Call it once the ranks know that they were started alike, if a GPU was requested or may have been chosen.
    ///
    /// # Errors
    ///
    /// If some ranks have GPUs and others do not, if ranks share a GPU, or if NCCL cannot connect them.
    pub fn settle_on(&self, device: &ResolvedDevice, comm: &CommSection) -> Result<()> {
        agree_on_devices(&*self.communicator, device, comm.timeout())?;
        #[cfg(feature = "cuda")]
        if let Some(index) = device.cuda_index() {
            use kiln_collectives::nccl::{self, NcclOptions};
            let Some(sockets) = &self.sockets else { return Err(DeviceError::NoTransport.into()) };
            let (connect_timeout, timeout) = (comm.join_timeout(), comm.timeout());
            if !comm.seal.is_off() && self.communicator.rank() == 0 {
                tracing::warn!(
                    "comm.seal = \"{}\" covers messages between ranks over TCP; weights and gradients on \
                     GPUs travel through NCCL, which it does not cover",
                    comm.seal
                );
            }
            let options = NcclOptions { device: index, connect_timeout, timeout };
            nccl::attach(sockets, &options).map_err(|source| TrainError::Nccl {
                rank: self.communicator.rank(),
                index,
                source: Box::new(source),
            })?;
        }
        Ok(())
    }
}

/// Connects to the other ranks, as the rank at `place`; no rank waits once `stop` is true. Rank 0 records `arrivals`.
pub fn join(
    place: &RankEnv,
    comm: &CommSection,
    stop: Option<&Arc<AtomicBool>>,
    arrivals: &Arrivals,
) -> Result<World> {
    if comm.backend == CommBackend::Mpi {
        return join_mpi(place);
    }
    check_ports(place, comm)?;
    let mut options = JoinOptions::new(place.rank, place.world_size, &place.master.host, place.master.port);
    options.shared_port = place.master.shared_port;
    options.secret = match &place.secret {
        Some(secret) => Secret::new(secret.0.as_str()),
        None => Secret::open(&place.meeting),
    };
    options.ports = comm.ports;
    options.open = comm.open;
    options.seal = comm.seal;
    options.job.clone_from(&place.meeting);
    options.node.clone_from(&place.node);
    options.timeout = comm.join_timeout();
    options.stop = stop.cloned();
    options.arrivals = arrivals.clone();
    options.on_worker_start = Some(WorkerStart::new(memory::bind_to_rank));
    let sockets = Arc::new(TcpCommunicator::join(options)?);
    Ok(World {
        communicator: sockets.clone(),
        #[cfg(feature = "cuda")]
        sockets: Some(sockets),
        #[cfg(feature = "mpi")]
        mpi: None,
    })
}

fn check_ports(place: &RankEnv, comm: &CommSection) -> Result<()> {
    let ranks = place.local_world_size;
    match comm.ports {
        Some(ports) if ports.count() < ranks => Err(TrainError::usage(format!(
            "comm.ports = \"{ports}\" has fewer ports than this machine has ranks: {} for {ranks}, and each \
             needs one; list more ports",
            ports.count()
        ))),
        _ => Ok(()),
    }
}

#[cfg(feature = "mpi")]
fn join_mpi(place: &RankEnv) -> Result<World> {
    let mpi = Mpi::start()?;
    if (mpi.rank(), mpi.world_size()) != (place.rank, place.world_size) {
        return Err(TrainError::usage(format!(
            "MPI says that this process is rank {} of {}, but {} says rank {} of {}: start the \
             ranks with mpirun, and leave the variables of other launchers unset",
            mpi.rank(),
            mpi.world_size(),
            place.source,
            place.rank,
            place.world_size
        )));
    }
    let on_worker_start = Some(WorkerStart::new(memory::bind_to_rank));
    let world = mpi.world(MpiOptions { on_worker_start, ..MpiOptions::default() });
    Ok(World { mpi: Some(mpi), ..World::given(Arc::new(world)) })
}

#[cfg(not(feature = "mpi"))]
fn join_mpi(_: &RankEnv) -> Result<World> {
    Err(TrainError::usage(
        "comm.backend = \"mpi\", but this program was built without MPI: build it with \
         `--features mpi`, or use \"tcp\"",
    ))
}

/// Fails unless `told` is the same text on all ranks; the error names the ranks that differ from rank 0. Collective.
pub fn agree(world: &dyn Communicator, told: &str, timeout: Duration) -> Result<()> {
    let digests = gather(world, "configuration", &Sha256::digest(told), timeout)?;
    let ranks: Vec<_> = (0..digests.len()).filter(|rank| digests[*rank] != digests[0]).collect();
    if ranks.is_empty() { Ok(()) } else { Err(TrainError::OtherConfig(ranks)) }
}

/// Gathers the `bytes` of each rank, in rank order; their lengths may differ. Collective.
pub fn gather(
    world: &dyn Communicator,
    what: &'static str,
    bytes: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>, ShardError> {
    let gather = |bytes: &[u8]| -> Result<Vec<Vec<u8>>, ShardError> {
        let all = Buffer::zeros(DType::U8, bytes.len() * world.world_size());
        let mine = Arc::new(Buffer::from_slice(bytes));
        let all = world.all_gather(Label::new(what, Phase::Init), mine, all).wait(timeout)?;
        Ok(all.as_bytes().chunks(bytes.len().max(1)).map(<[u8]>::to_vec).collect())
    };
    let lengths = gather(&(bytes.len() as u64).to_le_bytes())?;
    let length = |of: &Vec<u8>| of.iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte));
    let lengths: Vec<usize> = lengths.iter().map(length).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
    let mut mine = bytes.to_vec();
    mine.resize(longest, 0);
    let mut all = gather(&mine)?;
    all.iter_mut().zip(lengths).for_each(|(bytes, length)| bytes.truncate(length));
    Ok(all)
}

/// Returns the size of a strategy's shard groups: `given`, or the ranks of a machine for a hybrid strategy.
pub fn shard_size(
    strategy: Strategy,
    given: Option<usize>,
    world: &dyn Communicator,
) -> Result<Option<usize>> {
    if !strategy.is_hybrid() || given.is_some() {
        return Ok(given);
    }
    let size = Mesh::shard_size_of_nodes(strategy, &world.nodes());
    Ok(Some(size.map_err(|error| TrainError::usage(error.to_string()))?))
}

/// Fails unless all ranks have different GPUs, or all the CPU. Rank 0 warns if GPUs compute differently. Collective.
fn agree_on_devices(world: &dyn Communicator, selected: &ResolvedDevice, timeout: Duration) -> Result<()> {
    let mut mine = vec![u8::from(selected.is_gpu())];
    mine.extend(selected.id());
    let length = mine.len();
    mine.extend(selected.fingerprint().as_bytes());
    let all = gather(world, "device", &mine, timeout)?;
    let (chosen, fingerprints): (Vec<_>, Vec<_>) = all.iter().map(|of_rank| of_rank.split_at(length)).unzip();
    compare(&chosen, share_gpu())?;
    if world.rank() == 0 {
        different(&fingerprints).into_iter().for_each(|warning| tracing::warn!("{warning}"));
    }
    Ok(())
}

/// Returns a warning if ranks have a different GPU, driver or library, by fingerprint, from rank 0.
fn different(fingerprints: &[&[u8]]) -> Option<String> {
    let ranks: Vec<_> =
        (0..fingerprints.len()).filter(|rank| fingerprints[*rank] != fingerprints[0]).collect();
    let text = |rank: usize| String::from_utf8_lossy(fingerprints[rank]);
    let first = text(*ranks.first()?);
    Some(format!(
        "ranks {ranks:?} have a different GPU, driver or library from rank 0: results may differ in the last bits, and \
         cuBLASLt may lack an algorithm on some ranks only. Use the same GPUs and software on all machines. \
         Rank {}: {first}. Rank 0: {}",
        ranks[0],
        text(0)
    ))
}

/// Compares the devices of ranks: `chosen` has a byte, 0 without a GPU, and the GPU's id for each rank.
fn compare(chosen: &[&[u8]], share: bool) -> Result<(), DeviceError> {
    let (gpu, cpu): (Vec<_>, Vec<_>) = (0..chosen.len()).partition(|rank| chosen[*rank][0] != 0);
    if !gpu.is_empty() && !cpu.is_empty() {
        return Err(DeviceError::Mixed { gpu, cpu });
    }
    for rank in gpu.iter().filter(|_| !share) {
        let ranks: Vec<_> = gpu.iter().copied().filter(|other| chosen[*other] == chosen[*rank]).collect();
        if ranks.len() > 1 {
            return Err(DeviceError::SharedGpu { ranks });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{DeviceError, compare, different};

    #[test]
    fn ranks_have_all_a_gpu_of_their_own_or_all_the_cpu() {
        let (cpu, a, b): (&[u8], &[u8], &[u8]) = (&[0, 0], &[1, 7], &[1, 8]);
        assert_eq!(compare(&[cpu, cpu, cpu], false), Ok(()));
        assert_eq!(compare(&[a, b], false), Ok(()));
        assert_eq!(compare(&[a, a], true), Ok(()));
        let mixed = DeviceError::Mixed { gpu: vec![1, 3], cpu: vec![0, 2] };
        assert_eq!(compare(&[cpu, a, cpu, b], false), Err(mixed.clone()));
        assert_eq!(compare(&[cpu, a, cpu, b], true), Err(mixed));
        let shared = DeviceError::SharedGpu { ranks: vec![1, 2] };
        assert_eq!(compare(&[b, a, a], false), Err(shared));
    }

    #[test]
    fn ranks_that_compute_in_another_way_are_named() {
        let (old, new): (&[u8], &[u8]) = (b"H100, cuBLASLt 130000", b"H100, cuBLASLt 130100");
        assert_eq!(different(&[old, old]), None);
        let warning = different(&[old, new, old, new]).unwrap_or_default();
        assert!(
            warning.starts_with("ranks [1, 3] have a different GPU, driver or library from rank 0"),
            "{warning}"
        );
        let end = "Rank 1: H100, cuBLASLt 130100. Rank 0: H100, cuBLASLt 130000";
        assert!(warning.ends_with(end), "{warning}");
    }
}
