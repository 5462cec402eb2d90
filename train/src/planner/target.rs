//! What a plan is for: the ranks, their memory, their speed, and the links between them.

use kiln_collectives::Operation;
use kiln_shard::Mesh;

use super::Gathers;
use super::clock::{Axis, LinkSpeed, Speed};
use crate::config::Precision;
use crate::device::DataSheet;
use crate::links::{Link, Links};

/// The share of its FLOP/s that a GPU's products of matrices reach in training. One that could do more than 500
/// TFLOP/s (NVIDIA's since Hopper) is held back by its limit of power. Both numbers are those with which most of the
/// runs in `train/tests/cli/published.rs` are met. They are below what the best shapes of bf16 products reach alone,
/// 87 % on an A100, 80 % on an H100 and 78 % on a B200 (Stas Bekman, "Maximum Achievable Matmul FLOPS",
/// github.com/stas00/ml-engineering).
pub fn products_share(flops: f64) -> f64 {
    if flops > 500e12 { 0.64 } else { 0.78 }
}

/// The share of a data sheet's bandwidth that everything else reaches, by the same runs: operations are short, and
/// write what others read.
const STREAMING: f64 = 0.52;
/// The share of their links that collectives of large buffers reach.
const LINKS: f64 = 0.8;
/// Seconds that a collective takes among GPUs of a machine, and for each step of its ring beyond.
const GPU_LATENCY_S: f64 = 20e-6;
const HOP_S: f64 = 2e-6;
/// GB/s of a network adapter of 400 Gbit/s, of which every GPU of a machine has one.
const ADAPTER: f64 = 50.0;

/// The share of the memory that a recommendation leaves free, unless the user sets another. The driver, its libraries
/// and the pages of an allocator take amounts that no plan knows to the byte.
pub const MARGIN: f64 = 0.05;

/// What the CUDA driver and its libraries take of a GPU: measured on none yet.
const DRIVER: u64 = 3 << 28;
/// What NCCL takes for a rank that has others: measured on none yet.
const NCCL: u64 = 3 << 28;

/// What a process holds besides what its ranks are counted to hold: code, tokenizer, stacks.
const PROCESS: u64 = 56 << 20;
/// Pages that the allocator keeps between blocks, as a share of what is counted: 5 to 8 % in a control group
/// of 2 GiB.
const BETWEEN_BLOCKS: f64 = 0.07;

/// Bytes that so many processes have besides the `counted` bytes of their ranks.
pub fn beside_blocks(counted: u64, processes: u64) -> u64 {
    PROCESS.saturating_mul(processes).saturating_add((counted as f64 * BETWEEN_BLOCKS) as u64)
}

/// A machine's cores, as ranks share them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// FLOP/s of all ranks of the machine in products of matrices.
    pub flops: f64,
    /// Bytes per second that they read and write together.
    pub bandwidth: f64,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Hardware {
    /// GPUs of this data sheet, one for each rank.
    Gpu(DataSheet),
    /// GPUs of which only the memory is known, and what was said of their speed.
    Unknown {
        /// FLOP/s.
        flops: Option<f64>,
        /// Bytes per second.
        bandwidth: Option<f64>,
    },
    /// The cores of this machine, whose speed is known once it was measured.
    Cpu(Option<Cores>),
}

/// What a plan is for.
#[derive(Clone, Debug)]
pub struct Target {
    /// Ranks.
    pub ranks: usize,
    /// Machines.
    pub nodes: usize,
    /// What computes.
    pub hardware: Hardware,
    /// Bytes of memory: of each GPU, or of the machine whose cores compute; `None` if nobody knows.
    pub memory: Option<u64>,
    /// Share of the memory, from 0 to 1, that a recommendation leaves free: [`MARGIN`] by default.
    pub margin: f64,
    /// Measured links, which count before those of data sheets.
    pub links: Links,
    /// What ranks communicate through, as in [`Link::backend`]; "local" for threads of one process.
    pub backend: &'static str,
}

impl Target {
    /// Whether the host computes.
    pub fn on_host(&self) -> bool {
        matches!(self.hardware, Hardware::Cpu(_))
    }

    /// Bytes that a recommended run may take; `None` if the memory is not known.
    pub fn usable(&self) -> Option<u64> {
        self.memory.map(|memory| (memory as f64 * (1.0 - self.margin)) as u64)
    }

    /// Where ranks gather weights to.
    pub fn gathers(&self) -> Gathers {
        if self.backend == "local" { Gathers::Shared } else { Gathers::Pooled }
    }

    /// Ranks of a machine.
    pub fn ranks_per_node(&self) -> usize {
        self.ranks.div_ceil(self.nodes.max(1))
    }

    /// Bytes of a rank's GPU that the driver, its libraries and NCCL take.
    pub fn driver(&self) -> u64 {
        match (self.on_host(), self.ranks) {
            (true, _) => 0,
            (false, 0 | 1) => DRIVER,
            (false, _) => DRIVER + NCCL,
        }
    }

    /// FLOP/s of one rank that its MFU is measured against.
    pub fn peak_flops(&self, precision: Precision) -> Option<f64> {
        match self.hardware {
            Hardware::Gpu(sheet) => Some(sheet.peak_flops(precision)),
            Hardware::Unknown { flops, .. } => flops,
            Hardware::Cpu(cores) => cores.map(|cores| cores.flops / self.ranks_per_node() as f64),
        }
    }

    /// How fast a rank of `mesh` is; `None` if that is not known.
    pub fn speed(&self, mesh: &Mesh, precision: Precision) -> Option<Speed> {
        let peak = self.peak_flops(precision)?;
        let (flops, memory) = match self.hardware {
            Hardware::Gpu(sheet) => (products_share(peak) * peak, STREAMING * sheet.bandwidth * 1e9),
            Hardware::Unknown { bandwidth, .. } => {
                (products_share(peak) * peak, STREAMING * bandwidth.unwrap_or(f64::INFINITY))
            }
            Hardware::Cpu(cores) => {
                let bandwidth = cores.map_or(f64::INFINITY, |cores| cores.bandwidth);
                (peak, bandwidth / self.ranks_per_node() as f64)
            }
        };
        let axes = [
            (Axis::Shard, mesh.shard_size()),
            (Axis::Replicate, mesh.replicate_size()),
            (Axis::World, mesh.world_size()),
        ];
        let mut links = Vec::new();
        for (axis, ranks) in axes {
            for operation in [Operation::AllGather, Operation::ReduceScatter, Operation::AllReduce] {
                links.push((operation, axis, self.link(operation, axis, ranks)));
            }
        }
        Some(Speed { flops, memory, overlaps: !self.on_host(), links })
    }

    /// The links that a collective of `ranks` ranks goes over.
    fn link(&self, operation: Operation, axis: Axis, ranks: usize) -> LinkSpeed {
        if ranks < 2 {
            return LinkSpeed::INSTANT;
        }
        // A shard group fills machines one after the other; replicas are one on each.
        let per_node = self.ranks_per_node();
        let nodes = match axis {
            Axis::Shard => ranks.div_ceil(per_node),
            Axis::Replicate => ranks.min(self.nodes),
            Axis::World => self.nodes,
        };
        let is_of = |link: &&Link| link.operation == operation && link.backend == self.backend;
        let close = |link: &&Link| (link.nodes.abs_diff(nodes), link.ranks.abs_diff(ranks));
        if let Some(link) = self.links.links.iter().filter(is_of).min_by_key(close) {
            return LinkSpeed { latency_s: link.latency_s, bytes_per_s: link.bytes_per_s };
        }
        let inside = match self.hardware {
            Hardware::Gpu(sheet) => sheet.link,
            // PCIe.
            Hardware::Unknown { .. } => 32.0,
            Hardware::Cpu(_) => return LinkSpeed::INSTANT,
        };
        // The rings of a collective inside machines use all adapters of a machine; the groups of replicas
        // that cross machines at the same time share them.
        let across = match axis {
            Axis::Replicate => ADAPTER,
            _ => ADAPTER * per_node as f64,
        };
        let bandwidth = if nodes > 1 { inside.min(across) } else { inside };
        LinkSpeed { latency_s: GPU_LATENCY_S + HOP_S * ranks as f64, bytes_per_s: LINKS * bandwidth * 1e9 }
    }
}
