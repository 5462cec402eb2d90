//! Variables that a shell may have inherited: they describe other ranks, which have not been started.

use super::role::{Role, Source};
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

/// The warning about a process that may wait in vain for other ranks, because a shell has inherited its place: a shell
/// inside `salloc`, or one opened in a container. `None` for any but the first rank or node, and where nothing points to a
/// shell. `has_terminal`: whether a person types the input of this process.
pub(super) fn inherited(role: &Role, lookup: &Lookup, has_terminal: bool) -> Option<String> {
    let (source, (0, count), unit) = (match role {
        Role::Rank(place) => (place.source, (place.rank, place.world_size), "rank"),
        Role::Node(node) => (node.source, (node.node_rank, node.nodes), "node"),
        Role::Alone(_) => return None,
    }) else {
        return None;
    };
    let (variable, starts_all) = match source {
        Source::Slurm => ("SLURM_PROCID", "put srun before the command"),
        Source::JobSet => ("JOB_COMPLETION_INDEX", "start the job's pods with this command"),
        _ => return None,
    };
    // The name that salloc gives a job by default.
    let is_interactive = lookup("SLURM_JOB_NAME").is_some_and(|name| name == "interactive");
    if count < 2 || !(has_terminal || (source == Source::Slurm && is_interactive)) {
        return None;
    }
    Some(format!(
        "this process is {unit} 0 of {count} because {source} has set {variable}=0 in this shell, and it waits for the \
         other {unit}s. To start them all, {starts_all}; to run alone: env -u {variable} kiln …"
    ))
}
