use crate::backend::Backend;
use crate::buffer::Buffer;
use crate::communicator::Communicator;
use crate::dtype::DType;
use crate::label::{Label, Phase};
use crate::local::LocalBackend;
use crate::nccl::cuda::Context;
use crate::nccl::error::NcclError;
use crate::nccl::gpu::{Gpu, Server};
use crate::nccl::library::Library;
use crate::nccl::transport::Nccl;
use crate::process_group::ProcessGroup;
use crate::tcp::TcpBackend;
use cubecl_common::device::DeviceId;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use std::sync::Arc;
use std::time::Duration;

/// Settings of [`attach`].
#[derive(Clone, Debug)]
pub struct NcclOptions {
    /// CUDA's number of the GPU.
    pub device: usize,
    /// Time limit for the ranks to connect. Default 5 minutes.
    pub connect_timeout: Duration,
    /// Time limit of an operation, from the call to its end on the GPU. Default 10 minutes.
    pub timeout: Duration,
}

impl NcclOptions {
    /// Returns the defaults for GPU `device`.
    pub fn new(device: usize) -> NcclOptions {
        NcclOptions { device, connect_timeout: Duration::from_secs(300), timeout: Duration::from_secs(600) }
    }
}

/// A backend to which NCCL can be added.
pub trait ControlBackend: Backend {}

impl ControlBackend for TcpBackend {}

/// Supports a world of one rank, or of threads with one GPU each.
impl ControlBackend for LocalBackend {}

/// Bytes that a rank sends about itself: readiness, process and GPU.
const IDENTITY: usize = 9;

/// Adds NCCL to a group and its later splits, for buffers on a GPU. Every rank of `group` must call it once.
///
/// # Errors
///
/// [`NcclError`] on every rank if any rank cannot use NCCL; that rank's error has the reason. Returned within
/// [`NcclOptions::connect_timeout`]. The group continues without NCCL.
pub fn attach<B: ControlBackend>(group: &ProcessGroup<B>, options: &NcclOptions) -> Result<(), NcclError> {
    let timeout = options.connect_timeout;
    let prepared = prepare(options);
    let identities = exchange_identities(group, prepared.is_ok(), options)?;
    let gpu = prepared?;
    let of = |is_meant: &dyn Fn(&[u8]) -> bool| {
        let ranks = identities.chunks(IDENTITY).enumerate().filter(|(_, one)| is_meant(one));
        ranks.map(|(rank, _)| rank).collect::<Vec<usize>>()
    };
    let unable = of(&|identity| identity[0] == 0);
    if !unable.is_empty() {
        return Err(NcclError::Peers { ranks: unable });
    }
    let (nodes, own) = (group.nodes(), group.rank());
    let mut same = of(&|identity| identity[1..] == identities[own * IDENTITY + 1..(own + 1) * IDENTITY]);
    same.retain(|rank| nodes[*rank] == nodes[own]);
    if same.len() > 1 {
        return Err(NcclError::SharedDevice { ranks: same, index: options.device });
    }
    let comm = gpu.connect(group, timeout)?;
    tracing::debug!(version = gpu.library.version(), place = gpu.library.place, "NCCL is connected");
    let nccl = Nccl::start(Arc::new(gpu), comm, group.control())?;
    group.set_nccl(nccl).map_err(|_| NcclError::Attached)
}

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

fn exchange_identities(
    group: &dyn Communicator,
    is_ready: bool,
    options: &NcclOptions,
) -> Result<Vec<u8>, NcclError> {
    let mut identity = vec![u8::from(is_ready)];
    identity.extend(std::process::id().to_le_bytes());
    identity.extend(u32::try_from(options.device).unwrap_or(u32::MAX).to_le_bytes());
    let output = Buffer::zeros(DType::U8, IDENTITY * group.world_size());
    let label = Label::new("NCCL", Phase::Init);
    let work = group.all_gather(label, Arc::new(Buffer::from_slice(&identity)), output);
    Ok(work.wait(options.connect_timeout)?.as_bytes().to_vec())
}
