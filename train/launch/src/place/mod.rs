//! The place of this process among the ranks of a job. [`survey`] checks the variables of every launcher and scheduler
//! in a fixed order. The first answer wins, even an invalid one, which is an error: a rank that wrongly assumed to be
//! alone would train by itself. Only [`find_here`] reads the environment.

mod error;
mod node;
mod node_list;
mod ranks;
mod role;
mod slurm;
#[cfg(test)]
mod tests;
mod vars;

use std::io::IsTerminal;
use std::sync::Once;

use error::shortened;
use role::Finding;
use vars::Vars;

pub use error::EnvError;
pub use node::{NodeFlags, node};
pub use ranks::Flags;
pub use role::{Job, Master, Node, PerGpu, RankEnv, Role, Source};
pub use vars::{DEFAULT_PORT, JobSecret, Lookup, MAX_RANKS, MAX_RANKS_PER_NODE, SECRET};

type Read = fn(&Flags, &Vars) -> Result<Finding, EnvError>;

/// Sources in the order of checking, with the variables that each reads, except the secret.
const SOURCES: [(Source, &[&str], Read); 7] = [
    (Source::Flags, &[], Flags::read),
    (Source::Torchrun, ranks::TORCHRUN, |_, vars| ranks::read_torchrun(vars)),
    (Source::Pet, node::PET, |_, vars| node::read_pet(vars)),
    (Source::Slurm, slurm::NAMES, |_, vars| slurm::read(vars)),
    (Source::OpenMpi, ranks::OPEN_MPI, |_, vars| ranks::read_open_mpi(vars)),
    (Source::Pmi, ranks::PMI, |_, vars| ranks::read_pmi(vars)),
    (Source::JobSet, node::JOBSET, |_, vars| node::read_jobset(vars)),
];

/// A source that was considered, and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Considered {
    /// The source.
    pub source: Source,
    /// The source's variables that are set, with values shortened.
    pub found: Vec<(String, String)>,
    /// The reason why the source was used or skipped.
    pub verdict: String,
}

/// Finds the role of a process without flags. Never panics, and uses memory in proportion to the values.
pub fn find(lookup: &Lookup) -> Result<(Role, Vec<Considered>), EnvError> {
    let (role, considered) = survey(&Flags::default(), lookup);
    Ok((role?, considered))
}

/// Returns the role of this process. Warns once if the process is alone although variables describe several ranks, or
/// if it may wait for ranks that nobody starts.
pub fn find_here(flags: &Flags) -> Result<Role, EnvError> {
    static WARNED: Once = Once::new();
    let role = survey(flags, &environment).0?;
    let remark = match &role {
        Role::Alone(_) => remark_alone(&environment),
        role => remark_waiting(role, &environment, std::io::stdin().is_terminal()),
    };
    if let Some(remark) = remark {
        WARNED.call_once(|| tracing::warn!("{remark}"));
    }
    Ok(role)
}

/// Returns a variable of this process. `HOSTNAME` defaults to the machine's host name.
pub fn environment(name: &str) -> Option<String> {
    let value = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    if name == "HOSTNAME" && value.is_none() {
        return Some(rustix::system::uname().nodename().to_string_lossy().into_owned());
    }
    value
}

/// Checks every source. Returns the role and each source's answer.
pub fn survey(flags: &Flags, lookup: &Lookup) -> (Result<Role, EnvError>, Vec<Considered>) {
    // Flags may set the address where the ranks meet, whichever source provides the rest.
    let overlaid = |name: &str| flags.overlay(name).or_else(|| lookup(name));
    let vars = Vars(&overlaid);
    let mut considered = Vec::new();
    let mut outcome = None;
    for (source, names, read) in SOURCES {
        let named = names.iter().filter_map(|name| Some(((*name).to_owned(), shortened(&lookup(name)?))));
        let found = if source == Source::Flags { flags.found() } else { named.collect() };
        let verdict = match &outcome {
            Some((winner, Ok(_))) => format!("not checked: {winner} comes first"),
            Some((winner, Err(_))) => format!("not checked: {winner} is wrong"),
            None => match read(flags, &vars) {
                Ok(Finding::Taken(role, why)) => {
                    outcome = Some((source, Ok(role)));
                    format!("taken: {why}")
                }
                Ok(Finding::Skipped(why)) => format!("skipped: {why}"),
                Err(error) => {
                    let verdict = format!("wrong: {error}");
                    outcome = Some((source, Err(error)));
                    verdict
                }
            },
        };
        considered.push(Considered { source, found, verdict });
    }
    let role = match outcome {
        Some((_, role)) => role,
        // The flags show that this process is one of several.
        None if !flags.found().is_empty() => Err(EnvError::missing(
            "--rank",
            "the address is given, but not the ranks that meet there; add --rank and --world-size",
        )),
        None => Ok(Role::Alone(Job::from_scheduler(&vars))),
    };
    (role, considered)
}

/// A variable with a number of ranks, the variable without which it means nothing, and the launcher that sets both.
const SIZES: [(&str, &str, &str); 4] = [
    ("WORLD_SIZE", "RANK", "kiln launch or torchrun"),
    ("SLURM_NTASKS", "SLURM_PROCID", "srun"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),
    ("PMI_SIZE", "PMI_RANK", "mpiexec"),
];

/// Returns a warning if the process runs alone although its environment suggests several ranks.
fn remark_alone(lookup: &Lookup) -> Option<String> {
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

/// Returns a warning for the first rank or node if it seems to run in a shell, which sets its place, as in `salloc` or
/// a container. `has_terminal`: whether the process's input is a terminal.
fn remark_waiting(role: &Role, lookup: &Lookup, has_terminal: bool) -> Option<String> {
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
    let is_interactive = lookup("SLURM_JOB_NAME").is_some_and(|name| name == "interactive");
    if count < 2 || !(has_terminal || (source == Source::Slurm && is_interactive)) {
        return None;
    }
    Some(format!(
        "this process is {unit} 0 of {count} because {source} has set {variable}=0 in this shell, and it waits for the \
         other {unit}s. To start them all, {starts_all}; to run alone: env -u {variable} kiln …"
    ))
}
