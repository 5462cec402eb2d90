use std::time::Duration;

use kiln_collectives::{Buffer, DType, Label, Phase};
use kiln_shard::{Engine, ShardError};

use kiln_train::error::{Result, TrainError};

/// Returns the bytes of rank `root` on all ranks. Waits without a time limit. Collective.
pub(super) fn share(engine: &Engine, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
    let world = engine.world();
    if world.world_size() == 1 {
        return Ok(bytes);
    }
    let is_root = world.rank() == root;
    let send = |buffer: Buffer| {
        let work = world.broadcast(Label::new("debugger", Phase::Other), buffer, root);
        work.wait(Duration::MAX).map_err(|error| TrainError::from(ShardError::from(error)))
    };
    let length = if is_root { bytes.len() as u64 } else { 0 };
    let length = send(Buffer::from_slice(&length.to_le_bytes()))?;
    let length = length.as_bytes().try_into().map_or(0, u64::from_le_bytes) as usize;
    if length == 0 {
        return Ok(Vec::new());
    }
    let mine = if is_root { Buffer::from_slice(&bytes) } else { Buffer::zeros(DType::U8, length) };
    Ok(send(mine)?.as_bytes().to_vec())
}

/// Returns the bytes of every rank, in rank order, on rank 0. The other ranks get an empty list and hold only
/// one rank's bytes at a time. Collective.
pub(super) fn collect(engine: &Engine, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    let (rank, ranks) = (engine.world().rank(), engine.world().world_size());
    let mut mine = Some(bytes);
    let mut all = Vec::new();
    for root in 0..ranks {
        let bytes = if root == rank { mine.take().unwrap_or_default() } else { Vec::new() };
        let bytes = share(engine, bytes, root)?;
        if rank == 0 {
            all.push(bytes);
        }
    }
    Ok(all)
}
