//! Ranks that are processes each choose a device; here they compare their choices.

use std::time::Duration;

use kiln_collectives::Communicator;

use super::ranks::gather;
use crate::device::{DeviceError, ResolvedDevice, share_gpu};
use crate::error::TrainError;

/// Fails unless all ranks have chosen a GPU, and each another one, or all the CPU. Collective.
pub(crate) fn agree(
    world: &dyn Communicator,
    selected: &ResolvedDevice,
    timeout: Duration,
) -> Result<(), TrainError> {
    let mut mine = vec![u8::from(selected.is_gpu())];
    mine.extend(selected.id());
    let chosen = gather(world, "device", &mine, timeout)?;
    Ok(compare(&chosen.iter().map(Vec::as_slice).collect::<Vec<_>>(), share_gpu())?)
}

/// `chosen` has, for each rank, a byte that says whether it has a GPU, and the GPU's id.
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
    use super::{DeviceError, compare};

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
}
