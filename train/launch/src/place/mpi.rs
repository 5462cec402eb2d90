//! Ranks started by an MPI launcher. Kiln needs no MPI for that: it only reads its place.

use super::role::{EnvError, Finding, Role, Source};
use super::vars::{MAX_RANKS, Ranks, Rest, Vars, master, meets_on_loopback, port_of_job};

pub(super) const OPEN_MPI: &[&str] = &[
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "PMIX_HOSTNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
];

pub(super) const PMI: &[&str] = &[
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_RANK",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_RANKID",
    "PALS_LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
];

/// Names of a rank's local number and of the matching size in Hydra (MPICH, Intel MPI), Cray PMI and PALS.
const LOCAL: [(&str, &str); 3] = [
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
];

pub(super) fn read_open_mpi(vars: &Vars) -> Result<Finding, EnvError> {
    let Some(rank) = vars.number("OMPI_COMM_WORLD_RANK")? else {
        return Ok(Finding::Skipped("OMPI_COMM_WORLD_RANK is not set".to_owned()));
    };
    let needed = |name: &'static str| {
        vars.needed(name, "OMPI_COMM_WORLD_RANK needs it; start this program with mpirun itself")
    };
    let ranks = Ranks {
        rank: ("OMPI_COMM_WORLD_RANK", rank),
        world_size: ("OMPI_COMM_WORLD_SIZE", needed("OMPI_COMM_WORLD_SIZE")?),
        local_rank: ("OMPI_COMM_WORLD_LOCAL_RANK", needed("OMPI_COMM_WORLD_LOCAL_RANK")?),
        local_world_size: ("OMPI_COMM_WORLD_LOCAL_SIZE", needed("OMPI_COMM_WORLD_LOCAL_SIZE")?),
    };
    finish(Source::OpenMpi, ranks, vars)
}

pub(super) fn read_pmi(vars: &Vars) -> Result<Finding, EnvError> {
    let Some(rank) = vars.first(&["PMI_RANK", "PMIX_RANK"])? else {
        return Ok(Finding::Skipped("neither PMI_RANK nor PMIX_RANK is set".to_owned()));
    };
    // PMIx does not publish the number of ranks; a script can pass it as WORLD_SIZE.
    let Some(size) = vars.first(&["PMI_SIZE", "WORLD_SIZE"])? else {
        let problem = format!("{} needs it; set it to the number of ranks of the job", rank.name);
        return Err(EnvError::missing("PMI_SIZE", problem));
    };
    let rank = (rank.name, rank.number(MAX_RANKS)?);
    let world_size = (size.name, size.number(MAX_RANKS)?);
    let mut local = None;
    for (rank_name, size_name) in LOCAL {
        if let (None, Some(rank), Some(size)) = (local, vars.number(rank_name)?, vars.number(size_name)?) {
            local = Some(((rank_name, rank), (size_name, size)));
        }
    }
    let (local_rank, local_world_size) = match local {
        Some(local) => local,
        // Ranks on another machine could not meet at the loopback address.
        None if meets_on_loopback(vars)? => (rank, world_size),
        None => {
            let problem = "ranks on several machines need it and MPI_LOCALNRANKS; set them to this \
                           rank's number on its machine and to the number of ranks there";
            return Err(EnvError::missing("MPI_LOCALRANKID", problem));
        }
    };
    finish(Source::Pmi, Ranks { rank, world_size, local_rank, local_world_size }, vars)
}

fn finish(source: Source, ranks: Ranks, vars: &Vars) -> Result<Finding, EnvError> {
    ranks.check()?;
    if ranks.world_size.1 == 1 {
        return Ok(Finding::Skipped("a single process; its ranks are threads".to_owned()));
    }
    // The namespace is the launcher's name for this job, so two jobs meet at two ports.
    let name = vars.text("PMIX_NAMESPACE")?;
    let master = master(vars, ranks.one_node(), None, name.as_deref().map(port_of_job))?;
    let node = match ranks.one_node() {
        true => None,
        false => vars.first(&["PMIX_HOSTNAME", "HOSTNAME"])?.map(|named| named.value),
    };
    // Ranks may have been distributed cyclically; the host's name is then more reliable than this number.
    let cyclic = || {
        let nodes = ranks.world_size.1.div_ceil(ranks.local_world_size.1.max(1));
        ranks.rank.1.saturating_sub(ranks.local_rank.1.saturating_mul(nodes))
    };
    let node_rank = ranks.node_by_block().unwrap_or_else(cyclic);
    let why = format!("{} and {} are set", ranks.rank.0, ranks.world_size.0);
    let rest = Rest { node_rank, node, master, name, restarts: 0 };
    let place = ranks.place(source, rest, vars)?;
    Ok(Finding::Taken(Role::Rank(place), why))
}
