//! Variables that imply several ranks, in a process without a place of its own.

use super::vars::{Lookup, MAX_RANKS};

/// Variables with a number of ranks, the variables without which they mean nothing, and the launchers that
/// set both.
const SIZES: [(&str, &str, &str); 4] = [
    ("WORLD_SIZE", "RANK", "kiln launch or torchrun"),
    ("SLURM_NTASKS", "SLURM_PROCID", "srun"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),
    ("PMI_SIZE", "PMI_RANK", "mpiexec"),
];

/// Returns a remark about a process that runs alone although its environment implies several ranks.
pub(super) fn remark(lookup: &Lookup) -> Option<String> {
    SIZES.iter().find_map(|(size, rank, launcher)| {
        let ranks: usize = lookup(size)?.trim().parse().ok()?;
        let is_stray = (2..=MAX_RANKS).contains(&ranks) && lookup(rank).is_none();
        is_stray.then(|| {
            format!(
                "{size}={ranks} is set, but {rank} is not: this process runs by itself, not as one of \
                 {ranks}. Start it with {launcher}, which sets both, or unset {size}"
            )
        })
    })
}
