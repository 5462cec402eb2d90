//! The target of a plan: the ranks, their memory, their speed, and the links between them.

use kiln_collectives::Operation;
use kiln_shard::Mesh;

use super::Gathers;
use super::clock::{Axis, LinkSpeed, Speed};
use kiln_config::Precision;
use kiln_config::device::DataSheet;
use kiln_config::links::{Link, Links};

/// Returns the share of its FLOP/s that a GPU's matrix products reach in training. A GPU with more than 500
/// TFLOP/s (NVIDIA's since Hopper) is limited by its power. Both numbers were chosen to match most of the runs
/// in `train/kiln/tests/cli/published.rs`. They are below what the best shapes of bf16 products reach alone, 87 % on
/// an A100, 80 % on an H100 and 78 % on a B200 (Stas Bekman, "Maximum Achievable Matmul FLOPS",
/// github.com/stas00/ml-engineering).
pub fn products_share(flops: f64) -> f64 {
    if flops > 500e12 { 0.64 } else { 0.78 }
}

/// Share of a data sheet's bandwidth that all other operations reach, chosen to match the same runs: operations
/// are short, and each reads what another has written.
const STREAMING: f64 = 0.52;
/// Share of the links' bandwidth that collectives of large buffers reach.
const LINKS: f64 = 0.8;
/// Fixed latency in seconds of a collective among the GPUs of a machine, and of each further step of its ring.
const GPU_LATENCY_S: f64 = 20e-6;
const HOP_S: f64 = 2e-6;
/// Bandwidth in GB/s of a 400 Gbit/s network adapter; every GPU of a machine has one.
const ADAPTER: f64 = 50.0;

/// Default share of the memory that a recommendation leaves free: no plan knows exactly how much the driver, its
/// libraries and the pages of an allocator need.
pub const MARGIN: f64 = 0.05;

/// Bytes of a GPU that the CUDA driver and its libraries use; not yet measured.
const DRIVER: u64 = 3 << 28;
/// Bytes that NCCL uses for a rank that is not alone; not yet measured.
const NCCL: u64 = 3 << 28;

/// Bytes of a process beyond the counted bytes of its ranks: code, tokenizer, stacks.
const PROCESS: u64 = 56 << 20;
/// Size of the pages that the allocator keeps between blocks, relative to the counted bytes: 5 to 8 % in a control
/// group of 2 GiB.
const BETWEEN_BLOCKS: f64 = 0.07;

/// Returns how many bytes `processes` processes use in addition to the `counted` bytes of their ranks.
pub fn beside_blocks(counted: u64, processes: u64) -> u64 {
    PROCESS.saturating_mul(processes).saturating_add((counted as f64 * BETWEEN_BLOCKS) as u64)
}

/// The cores of a machine, shared by its ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// FLOP/s of all ranks of the machine together in matrix products.
    pub flops: f64,
    /// Bytes that all ranks together read and write per second.
    pub bandwidth: f64,
}

/// The hardware that computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Hardware {
    /// GPUs with this data sheet, one per rank.
    Gpu(DataSheet),
    /// GPUs of unknown type: only their memory is known, and their speed if the user has set it.
    Unknown {
        /// FLOP/s of matrix products.
        flops: Option<f64>,
        /// Memory bandwidth in bytes per second.
        bandwidth: Option<f64>,
    },
    /// The cores of this machine; `None` if their speed has not been measured.
    Cpu(Option<Cores>),
}

/// The target of a plan.
#[derive(Clone, Debug)]
pub struct Target {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of machines.
    pub nodes: usize,
    /// The hardware that computes.
    pub hardware: Hardware,
    /// Memory in bytes: of each GPU, or of the machine whose cores compute; `None` if unknown.
    pub memory: Option<u64>,
    /// Share of the memory, from 0 to 1, that a recommendation leaves free: [`MARGIN`] by default.
    pub margin: f64,
    /// Measured links, which override those of data sheets.
    pub links: Links,
    /// Transport between ranks, as in [`Link::backend`]; "local" for threads of one process.
    pub backend: &'static str,
}

impl Target {
    /// Returns whether the host computes.
    pub fn on_host(&self) -> bool {
        matches!(self.hardware, Hardware::Cpu(_))
    }

    /// Returns the bytes that a recommended run may use; `None` if the memory is unknown.
    pub fn usable(&self) -> Option<u64> {
        self.memory.map(|memory| (memory as f64 * (1.0 - self.margin)) as u64)
    }

    /// Returns the buffers that ranks gather weights into.
    pub fn gathers(&self) -> Gathers {
        if self.backend == "local" { Gathers::Shared } else { Gathers::Pooled }
    }

    /// Returns the number of ranks per machine.
    pub fn ranks_per_node(&self) -> usize {
        self.ranks.div_ceil(self.nodes.max(1))
    }

    /// Returns the bytes of a rank's GPU that the driver, its libraries and NCCL use.
    pub fn driver(&self) -> u64 {
        match (self.on_host(), self.ranks) {
            (true, _) => 0,
            (false, 0 | 1) => DRIVER,
            (false, _) => DRIVER + NCCL,
        }
    }

    /// Returns the FLOP/s of one rank against which its MFU is measured.
    pub fn peak_flops(&self, precision: Precision) -> Option<f64> {
        match self.hardware {
            Hardware::Gpu(sheet) => Some(sheet.peak_flops(precision)),
            Hardware::Unknown { flops, .. } => flops,
            Hardware::Cpu(cores) => cores.map(|cores| cores.flops / self.ranks_per_node() as f64),
        }
    }

    /// Returns the speed of a rank of `mesh`; `None` if it is unknown.
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

    /// Returns the links that a collective of `ranks` ranks uses.
    fn link(&self, operation: Operation, axis: Axis, ranks: usize) -> LinkSpeed {
        if ranks < 2 {
            return LinkSpeed::INSTANT;
        }
        // A shard group fills machines one after the other; replicas are on different machines.
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
            // PCIe is assumed.
            Hardware::Unknown { .. } => 32.0,
            Hardware::Cpu(_) => return LinkSpeed::INSTANT,
        };
        // A collective that crosses machines runs as many rings as a machine has adapters, one per GPU. But the
        // replica groups of a machine's ranks run at the same time, and share the adapters.
        let across = match axis {
            Axis::Replicate => ADAPTER,
            _ => ADAPTER * per_node as f64,
        };
        let bandwidth = if nodes > 1 { inside.min(across) } else { inside };
        LinkSpeed { latency_s: GPU_LATENCY_S + HOP_S * ranks as f64, bytes_per_s: LINKS * bandwidth * 1e9 }
    }
}
