use super::ports::Ports;
use crate::backend::WorkerStart;
use crate::recorder::DEFAULT_CAPACITY;
use crate::sync::lock;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const JOIN_TIMEOUT: Duration = Duration::from_secs(300);

pub(super) const PAUSE: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];

pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);

const LINGER: Duration = Duration::from_secs(10);

/// Algorithm for large transfers. The results have the same bits in all cases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ring {
    /// Use the ring if it reduces traffic between machines: several machines, one of them with several ranks.
    #[default]
    Auto,
    /// Use the ring.
    Always,
    /// Send directly from rank to rank.
    Never,
}

/// Protection of TCP traffic between ranks after the handshake, both control messages and data.
///
/// Each direction of each connection has its own key, derived from the job's secret and from random numbers
/// of both sides. There is no forward secrecy: anyone who learns the secret can read traffic that was
/// recorded earlier. The seal does not cover data that ranks on one machine read from each other's memory,
/// nor traffic of NCCL or MPI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Seal {
    /// No protection: anyone between two ranks can read and change their traffic.
    #[default]
    Off,
    /// AES-128-GCM: anyone without the key cannot read the contents, and changes, repetitions and omissions
    /// are detected.
    Encrypt,
}

impl Seal {
    /// Returns whether traffic is not sealed.
    pub fn is_off(&self) -> bool {
        *self == Seal::Off
    }
}

impl FromStr for Seal {
    type Err = String;

    fn from_str(text: &str) -> Result<Seal, String> {
        let all = [Seal::Off, Seal::Encrypt];
        let found = all.into_iter().find(|seal| seal.to_string() == text);
        found.ok_or_else(|| "use off or encrypt".to_owned())
    }
}

impl fmt::Display for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The secret that only the ranks of a job know, and the key of every handshake. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    key: Vec<u8>,
    is_open: bool,
}

impl Secret {
    /// Wraps a secret that was given to the ranks.
    pub fn new(secret: impl Into<Vec<u8>>) -> Secret {
        Secret { key: secret.into(), is_open: false }
    }

    /// Derives a key from the name of the job. It separates jobs but authenticates nobody, because anyone can derive
    /// it. Ranks accept it only on a loopback address, or with [`JoinOptions::open`].
    pub fn open(job: &str) -> Secret {
        Secret { key: [b"open job ", job.as_bytes()].concat(), is_open: true }
    }

    /// Generates a secret for a new job, as hexadecimal text.
    ///
    /// # Errors
    ///
    /// Fails if the system cannot provide randomness.
    pub fn generate() -> io::Result<String> {
        Ok(random::<32>()?.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.key
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// The ranks that have arrived at a rendezvous. Clones share the data.
#[derive(Clone, Debug, Default)]
pub struct Arrivals(Arc<Mutex<BTreeMap<usize, IpAddr>>>);

impl Arrivals {
    /// Returns the ranks that are present, with the addresses that they connected from.
    pub fn ranks(&self) -> BTreeMap<usize, IpAddr> {
        lock(&self.0).clone()
    }

    pub(super) fn come(&self, rank: usize, from: IpAddr) {
        lock(&self.0).insert(rank, from);
    }

    pub(super) fn leave(&self, rank: usize) {
        lock(&self.0).remove(&rank);
    }
}

/// Options of a process that joins a world.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// This process's rank.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// Host name or address of the machine of rank 0, which hosts the rendezvous.
    pub host: String,
    /// Port of the rendezvous on `host`.
    pub port: u16,
    /// True if another program owns `port`. The rendezvous then uses the first free one of the next 16 ports.
    pub shared_port: bool,
    /// Ports on which ranks listen for each other; `None` lets the system choose.
    pub ports: Option<Ports>,
    /// Name of the job; ranks of other jobs are refused.
    pub job: String,
    /// Key of every handshake.
    pub secret: Secret,
    /// True if the network is closed, so that [`Secret::open`] is acceptable beyond loopback addresses.
    pub open: bool,
    /// Protection of traffic. Must be equal on all ranks; requires a secret other than [`Secret::open`].
    pub seal: Seal,
    /// Name of this rank's machine, equal for ranks that share a machine.
    pub node: String,
    /// Time limit for all ranks to arrive.
    pub timeout: Duration,
    /// Set to true to stop this process. Until all ranks have arrived, this ends the wait on every rank.
    pub stop: Option<Arc<AtomicBool>>,
    /// Time for which a finished rank 0 keeps the rendezvous open for unfinished ranks.
    pub linger: Duration,
    /// Algorithm for large transfers.
    pub ring: Ring,
    /// True if ranks on one machine read large data from each other's memory, where allowed. Must be equal on all ranks
    /// of a machine.
    pub read_memory: bool,
    /// Number of records that the flight recorder keeps.
    pub recorder_capacity: usize,
    /// Called first on every worker thread, with the world rank.
    pub on_worker_start: Option<WorkerStart>,
    /// The ranks that have arrived; filled only on rank 0.
    pub arrivals: Arrivals,
    /// The rendezvous's listening socket, if rank 0 opened it beforehand.
    pub(super) listener: Option<Arc<TcpListener>>,
    /// True if all ranks are in this process, so that a peer's memory may be the process's own.
    pub(super) in_one_process: bool,
}

impl JoinOptions {
    /// Returns options for `rank` of `world_size`, with the rendezvous at `host:port`, an open secret and defaults.
    pub fn new(rank: usize, world_size: usize, host: impl Into<String>, port: u16) -> JoinOptions {
        let job = "kiln".to_owned();
        JoinOptions {
            rank,
            world_size,
            host: host.into(),
            port,
            shared_port: false,
            ports: None,
            secret: Secret::open(&job),
            open: false,
            seal: Seal::Off,
            job,
            node: "node0".into(),
            timeout: JOIN_TIMEOUT,
            stop: None,
            linger: LINGER,
            ring: Ring::Auto,
            read_memory: true,
            recorder_capacity: DEFAULT_CAPACITY,
            on_worker_start: None,
            arrivals: Arrivals::default(),
            listener: None,
            in_one_process: false,
        }
    }

    pub(super) fn near(&self) -> Option<u16> {
        self.shared_port.then_some(self.port)
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    pub(super) fn pause(&self, time: Duration) -> Result<(), JoinError> {
        let until = Instant::now() + time;
        loop {
            if self.is_stopped() {
                return Err(JoinError::Stopped { by: self.rank });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(LOOK_EVERY));
        }
    }
}

/// The reason why a process could not join its world.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The rank is not less than the world size.
    #[error("cannot join as rank {rank} of {world_size}: ranks count from 0 to world size - 1")]
    Rank {
        /// Rank given.
        rank: usize,
        /// World size given.
        world_size: usize,
    },
    /// The ranks have no secret, and other machines can connect to them.
    #[error(
        "rank {rank} has no secret, and {host}, where the ranks meet, is not a loopback address: anyone who \
         reaches it could take a rank's place. Set KILN_JOB_SECRET to the same random text for all \
         ranks on all machines (`openssl rand -hex 32` makes one); or, if everyone on this network may \
         join, say so with comm.open = true"
    )]
    OpenSecret {
        /// This rank.
        rank: usize,
        /// Machine of rank 0.
        host: String,
    },
    /// Traffic would be sealed with keys that anyone can derive.
    #[error(
        "rank {rank} has no secret, so comm.seal = \"{seal}\" would protect nothing: set KILN_JOB_SECRET to \
         the same random text for all ranks on all machines (`openssl rand -hex 32` makes one)"
    )]
    SealWithoutSecret {
        /// This rank.
        rank: usize,
        /// Requested seal.
        seal: Seal,
    },
    /// The name of the machine of rank 0 cannot be resolved.
    #[error("cannot find {host}, the machine of rank 0: {source}; check MASTER_ADDR")]
    Resolve {
        /// Name given.
        host: String,
        /// The system's reason.
        source: io::Error,
    },
    /// Rank 0 cannot open its port.
    #[error(
        "rank 0 cannot listen on {address}: {source}; choose another port with MASTER_PORT, or \
         check whether an earlier run is still alive"
    )]
    Listen {
        /// Address tried.
        address: String,
        /// The system's reason.
        source: io::Error,
    },
    /// No port is free on which other ranks could reach this rank.
    #[error(
        "rank {rank} cannot listen on {address}: ports {ports} (comm.ports) are all taken. Each rank of a \
         machine needs one: list more ports, or find what uses them, such as an earlier run"
    )]
    PortsTaken {
        /// This rank.
        rank: usize,
        /// The permitted ports.
        ports: Ports,
        /// The address on which the ports were tried.
        address: IpAddr,
    },
    /// Not all ranks arrived in time, or this rank found no rendezvous.
    #[error("rank {rank} waited {:.1} s for the other ranks at {address}: {reason}", .waited.as_secs_f64())]
    Incomplete {
        /// This rank.
        rank: usize,
        /// Address of the rendezvous.
        address: String,
        /// Time that this rank waited.
        waited: Duration,
        /// The missing ranks, or why the rendezvous cannot be reached.
        reason: String,
        /// Missing ranks, if known.
        missing: Vec<usize>,
        /// True if this rank or a refused caller has a different secret than the rendezvous.
        distrust: bool,
    },
    /// A rank received a stop request before all ranks had arrived.
    #[error("rank {by} received a stop request before all ranks had arrived")]
    Stopped {
        /// The rank that received the request.
        by: usize,
    },
    /// A rank of this job has different settings, so the others stopped waiting for it.
    #[error("{refused}")]
    OtherSettings {
        /// The rank, its address and the mismatch, as a sentence.
        refused: String,
    },
    /// The rendezvous knows the secret and refuses this rank.
    #[error("the rendezvous at {address} refused rank {rank}: {reason}")]
    Refused {
        /// This rank.
        rank: usize,
        /// Address of the rendezvous.
        address: String,
        /// The reason that the rendezvous gave.
        reason: String,
    },
    /// A call of the operating system failed.
    #[error("rank {rank} cannot {operation}: {source}")]
    Io {
        /// This rank.
        rank: usize,
        /// The attempted operation.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}
