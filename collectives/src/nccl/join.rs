//! How the ranks of a group come to use NCCL together.

use super::NcclError;
use super::cuda::Context;
use super::gpu::{Gpu, Server};
use super::library::{Comm, Library};
use super::transport::Nccl;
use crate::buffer::Buffer;
use crate::communicator::Communicator;
use crate::dtype::DType;
use crate::label::{Label, Phase};
use crate::local::LocalEnd;
use crate::member::{End, Member};
use crate::tcp::TcpEnd;
use cubecl_common::device::DeviceId;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use std::sync::Arc;
use std::time::Duration;

/// Settings of [`attach`].
#[derive(Clone, Debug)]
pub struct NcclOptions {
    /// Number of the GPU among those that CUDA names.
    pub device: usize,
    /// How long the ranks may take to meet. Default 5 minutes.
    pub connect_timeout: Duration,
    /// How long an operation may take, from the call to its end on the GPU. Default 10 minutes.
    pub timeout: Duration,
}

impl NcclOptions {
    /// The defaults, on this GPU.
    pub fn new(device: usize) -> NcclOptions {
        NcclOptions {
            device,
            connect_timeout: Duration::from_secs(300),
            timeout: Duration::from_secs(600),
        }
    }
}

/// Backends that NCCL can be added to.
pub trait Control: End {}

impl Control for TcpEnd {}

/// For a world of one rank, or threads with a GPU each.
impl Control for LocalEnd {}

/// Bytes that a rank tells the others about itself: whether it is ready, its process and its GPU.
const CARD: usize = 9;

/// Adds NCCL to a group: its buffers may be on a GPU from now on, and so may those of the groups split
/// off it. Collective: every rank of `group` calls it, once.
///
/// # Errors
///
/// [`NcclError`] on every rank if one cannot use NCCL; on that rank with the reason. After
/// [`NcclOptions::connect_timeout`] at the latest. The group itself goes on without NCCL.
pub fn attach<E: Control>(group: &Member<E>, options: &NcclOptions) -> Result<(), NcclError> {
    let timeout = options.connect_timeout;
    let prepared = prepare(options);
    let cards = exchange(group, prepared.is_ok(), options)?;
    let gpu = prepared?;
    let of = |is_meant: &dyn Fn(&[u8]) -> bool| {
        let ranks = cards.chunks(CARD).enumerate().filter(|(_, card)| is_meant(card));
        ranks.map(|(rank, _)| rank).collect::<Vec<usize>>()
    };
    let unable = of(&|card| card[0] == 0);
    if !unable.is_empty() {
        return Err(NcclError::Peers { ranks: unable });
    }
    let (nodes, own) = (group.nodes(), group.rank());
    let mut same = of(&|card| card[1..] == cards[own * CARD + 1..(own + 1) * CARD]);
    same.retain(|rank| nodes[*rank] == nodes[own]);
    if same.len() > 1 {
        return Err(NcclError::SharedDevice { ranks: same, index: options.device });
    }
    let comm = meet(&gpu, group, timeout)?;
    tracing::debug!(
        version = gpu.library.version(),
        place = gpu.library.place,
        "NCCL is connected"
    );
    let nccl = Nccl::start(Arc::new(gpu), comm, group.guardian())?;
    group.set_transport(Arc::new(nccl)).map_err(|_| NcclError::Attached)
}

/// What this rank can find out alone.
fn prepare(options: &NcclOptions) -> Result<Gpu, NcclError> {
    let count = CudaRuntime::enumerate_all_devices().len();
    if count == 0 {
        return Err(NcclError::NoDriver);
    }
    let index = options.device;
    let Some(number) = u16::try_from(index).ok().filter(|_| index < count) else {
        return Err(NcclError::NoDevice { index, count });
    };
    let library = Library::find()?;
    let context = Context::of(index)?;
    let id = DeviceId { type_id: 0, index_id: number };
    let device = DeviceHandle::<Server>::new(id);
    Ok(Gpu { library, context, device, id, limit: options.timeout })
}

/// Tells all ranks whether this one is ready, and where it is.
fn exchange(
    group: &dyn Communicator,
    is_ready: bool,
    options: &NcclOptions,
) -> Result<Vec<u8>, NcclError> {
    let mut card = vec![u8::from(is_ready)];
    card.extend(std::process::id().to_le_bytes());
    // No machine has that many GPUs.
    card.extend(u32::try_from(options.device).unwrap_or(u32::MAX).to_le_bytes());
    let output = Buffer::zeros(DType::U8, CARD * group.world_size());
    let label = Label::new("NCCL", Phase::Init);
    let work = group.all_gather(label, Arc::new(Buffer::from_slice(&card)), output);
    Ok(work.wait(options.connect_timeout)?.as_bytes().to_vec())
}

/// Connects all ranks of `group` by an id that the first one makes.
pub(super) fn meet(
    gpu: &Gpu,
    group: &dyn Communicator,
    timeout: Duration,
) -> Result<Comm, NcclError> {
    let made = if group.rank() == 0 { gpu.library.unique_id() } else { Ok([0; 128]) };
    // Nothing but zeros is no id: the others must not wait for a rank that has none.
    let buffer = Buffer::from_slice(&made.clone().unwrap_or([0; 128]));
    let work = group.broadcast(Label::new("NCCL id", Phase::Init), buffer, 0);
    let sent = work.wait(timeout)?;
    made?;
    let mut id = [0; 128];
    id.copy_from_slice(sent.as_bytes());
    if id == [0; 128] {
        return Err(NcclError::Peers { ranks: vec![0] });
    }
    gpu.connect(group.world_size(), &id, group.rank(), timeout)
}
