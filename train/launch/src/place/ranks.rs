//! Places ranks by the flags of `kiln train` or the variables of torchrun or MPI. For Slurm see `slurm`.

use std::net::IpAddr;

use clap::Args;
use kiln_sys::launcher::LAUNCHER_PID;

use super::error::{EnvError, shortened};
use super::node::node_of;
use super::role::{Finding, Job, Master, RankEnv, Role, Source};
use super::vars::{DEFAULT_PORT, MAX_RANKS, Number, Vars, below};

/// A launcher's information about a rank. Each number comes with the name of its variable.
pub(super) struct Ranks {
    pub(super) source: Source,
    pub(super) rank: Number,
    pub(super) world_size: Number,
    pub(super) local_rank: (&'static str, Option<usize>),
    pub(super) local_world_size: (&'static str, Option<usize>),
    /// `None` if the launcher never provides it.
    pub(super) node_rank: Option<(&'static str, Option<usize>)>,
    pub(super) nodes: Option<Number>,
    pub(super) node: Option<String>,
    pub(super) host: Option<String>,
    pub(super) name: Option<String>,
    pub(super) restarts: u64,
}

const NO_NAME: &str = "none";

impl Ranks {
    /// Returns the rank's place. Derives missing numbers from others, and fails if numbers contradict each other.
    pub(super) fn place(self, vars: &Vars) -> Result<RankEnv, EnvError> {
        let Ranks { source, rank, world_size, .. } = self;
        below(rank, world_size, "ranks are counted from 0")?;
        let missing = |name, number: &str| {
            let problem = format!("{} needs it if ranks are on several machines; set it to {number}", rank.0);
            Err(EnvError::missing(name, problem))
        };
        let (local, size) = match (self.local_rank.1, self.local_world_size.1) {
            (Some(local), Some(size)) => (local, size),
            // Ranks on another machine could not meet at the loopback address.
            (local, None) if world_size.1 == 1 || meets_on_loopback(vars)? => {
                (local.unwrap_or(rank.1), world_size.1)
            }
            (None, Some(size)) if size == world_size.1 => (rank.1, size),
            // Without information about its machine, a rank is assumed to be alone on it.
            (None, None) if source == Source::Flags => (0, 1),
            (None, _) => return missing(self.local_rank.0, "the rank's number on its machine, from 0"),
            (Some(_), None) => {
                return missing(self.local_world_size.0, "the number of ranks of this machine");
            }
        };
        let (local_rank, local_world_size) = ((self.local_rank.0, local), (self.local_world_size.0, size));
        below(local_rank, local_world_size, "local ranks are counted from 0")?;
        if size > world_size.1 {
            let problem = "a node has no more ranks than the job";
            return Err(EnvError::contradiction(&[local_world_size, world_size], problem));
        }
        if local > rank.1 {
            let problem = "a rank cannot be less than its local rank";
            return Err(EnvError::contradiction(&[local_rank, rank], problem));
        }
        let node_rank = match (self.node_rank, rank.1 % size == local) {
            (Some((name, Some(node))), _) => {
                below((name, node), self.nodes.unwrap_or(world_size), "nodes are counted from 0")?;
                node
            }
            (_, true) => rank.1 / size,
            (Some((name, None)), false) => {
                let problem = "ranks are not distributed node by node, so it is needed; set it to the node's number, \
                               from 0";
                return Err(EnvError::missing(name, problem));
            }
            (None, false) if source == Source::Flags => {
                let problem = "ranks are counted machine by machine, so --rank is a multiple of \
                               --local-world-size plus --local-rank";
                return Err(EnvError::contradiction(&[rank, local_rank, local_world_size], problem));
            }
            // Assumes a cyclic distribution of ranks. The host's name is more reliable than this number.
            (None, false) => rank.1.saturating_sub(local.saturating_mul(world_size.1.div_ceil(size))),
        };
        let is_one_node = size == world_size.1;
        let host = match vars.host(&["MASTER_ADDR"])?.or(self.host.filter(|_| !is_one_node)) {
            Some(host) => host,
            None if is_one_node => "127.0.0.1".to_owned(),
            None => {
                let problem = "the ranks are on several machines; set it to the host name or address of the \
                               machine of rank 0, the same for all ranks";
                return Err(EnvError::missing("MASTER_ADDR", problem));
            }
        };
        let name = self.name;
        let own_port = name.as_deref().filter(|_| source != Source::Torchrun).map(port_of_job);
        let port = vars.port(&["MASTER_PORT"])?.or(own_port).unwrap_or(DEFAULT_PORT);
        let launched = name.as_deref().filter(|name| *name != NO_NAME);
        let node = self.node.filter(|_| !is_one_node);
        Ok(RankEnv {
            source,
            rank: rank.1,
            world_size: world_size.1,
            local_rank: local,
            local_world_size: size,
            node_rank,
            node: node.unwrap_or_else(|| format!("node{node_rank}")),
            master: Master { host, port, shared_port: false },
            job: Job::from_scheduler(vars).launched(launched, self.restarts),
            meeting: name.unwrap_or_else(|| NO_NAME.to_owned()),
            secret: vars.secret()?,
        })
    }
}

/// Returns whether the ranks meet at a loopback address and hence share a machine.
fn meets_on_loopback(vars: &Vars) -> Result<bool, EnvError> {
    let is_loopback = |host: String| {
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    };
    Ok(vars.host(&["MASTER_ADDR"])?.is_none_or(is_loopback))
}

/// Returns a default port, equal on every node of the job, different for most other jobs, and below ephemeral ports.
fn port_of_job(job: &str) -> u16 {
    const FIRST: u16 = 15_000;
    const COUNT: u64 = 16_384;
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    FIRST + (hash % COUNT) as u16
}

/// Flags that give one process its place, for starting ranks by hand.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Process flags, for starting every rank by hand")]
pub struct Flags {
    /// This process is this rank, from 0; needs --world-size.
    #[arg(long, value_name = "R", hide_short_help = true)]
    pub rank: Option<String>,
    /// Ranks of the whole job.
    #[arg(long, alias = "world_size", value_name = "N", hide_short_help = true)]
    pub world_size: Option<String>,
    /// This rank among those of its machine [default: --rank if all ranks are here].
    #[arg(long, alias = "local_rank", value_name = "R", hide_short_help = true)]
    pub local_rank: Option<String>,
    /// Ranks of this machine [default: --world-size if all ranks are here].
    #[arg(long, alias = "local_world_size", value_name = "N", hide_short_help = true)]
    pub local_world_size: Option<String>,
    /// Machine of rank 0, where the ranks meet.
    #[arg(long, alias = "master_addr", value_name = "HOST", hide_short_help = true)]
    pub master_addr: Option<String>,
    /// Port there.
    #[arg(long, alias = "master_port", value_name = "PORT", hide_short_help = true)]
    pub master_port: Option<String>,
}

impl Flags {
    /// Returns the value of the flag `name`, or of the flag that overrides the variable `name`.
    pub(super) fn overlay(&self, name: &str) -> Option<String> {
        let flag = match name {
            "MASTER_ADDR" => "--master-addr",
            "MASTER_PORT" => "--master-port",
            name => name,
        };
        self.named().into_iter().find(|(named, _)| *named == flag)?.1.clone()
    }

    fn named(&self) -> [(&'static str, &Option<String>); 6] {
        [
            ("--rank", &self.rank),
            ("--world-size", &self.world_size),
            ("--local-rank", &self.local_rank),
            ("--local-world-size", &self.local_world_size),
            ("--master-addr", &self.master_addr),
            ("--master-port", &self.master_port),
        ]
    }

    pub(super) fn found(&self) -> Vec<(String, String)> {
        let set =
            |(name, value): (&str, &Option<String>)| Some((name.to_owned(), shortened(value.as_ref()?)));
        self.named().into_iter().filter_map(set).collect()
    }

    pub(super) fn read(&self, vars: &Vars) -> Result<Finding, EnvError> {
        let Some(rank) = vars.number("--rank")? else {
            let others = ["--world-size", "--local-rank", "--local-world-size"];
            if let Some(flag) = others.into_iter().find(|flag| vars.has(flag)) {
                let problem = format!("{flag} needs it; give both, or neither");
                return Err(EnvError::missing("--rank", problem));
            }
            return Ok(Finding::Skipped(match self.found().is_empty() {
                true => "no --rank".to_owned(),
                false => "no --rank; the flags for the address override the other sources".to_owned(),
            }));
        };
        let problem = "--rank needs it; set it to the number of ranks of the job";
        let ranks = Ranks {
            source: Source::Flags,
            rank: ("--rank", rank),
            world_size: ("--world-size", vars.needed("--world-size", problem)?),
            local_rank: ("--local-rank", vars.number("--local-rank")?),
            local_world_size: ("--local-world-size", vars.number("--local-world-size")?),
            node_rank: None,
            nodes: None,
            node: None,
            host: None,
            name: None,
            restarts: vars.restarts("TORCHELASTIC_RESTART_COUNT"),
        };
        let why = "--rank and --world-size are given".to_owned();
        Ok(Finding::Taken(Role::Rank(ranks.place(vars)?), why))
    }
}

/// Variables of torchrun, `kiln launch` and similar launchers:
/// <https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables>.
pub(super) const TORCHRUN: &[&str] = &[
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
];

pub(super) fn read_torchrun(vars: &Vars) -> Result<Finding, EnvError> {
    let Some(rank) = vars.number("RANK")? else {
        return Ok(Finding::Skipped("RANK is not set".to_owned()));
    };
    let Some(local_rank) = vars.number("LOCAL_RANK")? else {
        let node = node_of(Source::Torchrun, vars)?;
        let why = "RANK without LOCAL_RANK is the rank of a node, which starts its own ranks";
        return Ok(Finding::Taken(Role::Node(node), why.to_owned()));
    };
    let problem = "RANK and LOCAL_RANK need it; set it to the number of ranks of the job";
    let world_size = vars.needed("WORLD_SIZE", problem)?;
    let nodes = vars.number("GROUP_WORLD_SIZE")?;
    let even =
        nodes.and_then(|nodes| world_size.checked_div(nodes).filter(|size| size * nodes == world_size));
    let ranks = Ranks {
        source: Source::Torchrun,
        rank: ("RANK", rank),
        world_size: ("WORLD_SIZE", world_size),
        local_rank: ("LOCAL_RANK", Some(local_rank)),
        local_world_size: ("LOCAL_WORLD_SIZE", vars.number("LOCAL_WORLD_SIZE")?.or(even)),
        node_rank: Some(("GROUP_RANK", vars.number("GROUP_RANK")?)),
        nodes: nodes.map(|nodes| ("GROUP_WORLD_SIZE", nodes)),
        node: None,
        host: None,
        name: vars.text("TORCHELASTIC_RUN_ID")?,
        restarts: vars.restarts("TORCHELASTIC_RESTART_COUNT"),
    };
    let mut place = ranks.place(vars)?;
    let shared = vars.text("TORCHELASTIC_USE_AGENT_STORE")?;
    place.master.shared_port =
        shared.is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "true" | "1"));
    if vars.text(LAUNCHER_PID)?.is_some() {
        place.source = Source::Launch;
    }
    Ok(Finding::Taken(Role::Rank(place), "RANK, LOCAL_RANK and WORLD_SIZE are set".to_owned()))
}

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

const LOCAL: [[&str; 2]; 3] = [
    ["MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    ["PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"],
    ["PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"],
];

pub(super) fn read_open_mpi(vars: &Vars) -> Result<Finding, EnvError> {
    let Some(rank) = vars.number("OMPI_COMM_WORLD_RANK")? else {
        return Ok(Finding::Skipped("OMPI_COMM_WORLD_RANK is not set".to_owned()));
    };
    let problem = "OMPI_COMM_WORLD_RANK needs it; start this program with mpirun itself";
    let needed = |name: &'static str| Ok::<_, EnvError>((name, vars.needed(name, problem)?));
    let world_size = needed("OMPI_COMM_WORLD_SIZE")?;
    let local = [needed("OMPI_COMM_WORLD_LOCAL_RANK")?, needed("OMPI_COMM_WORLD_LOCAL_SIZE")?];
    read_mpi(
        Source::OpenMpi,
        ("OMPI_COMM_WORLD_RANK", rank),
        world_size,
        local.map(|(n, v)| (n, Some(v))),
        vars,
    )
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
    let local = LOCAL.into_iter().find(|names| names.iter().all(|name| vars.has(name)));
    let local = match local {
        Some([rank, size]) => [(rank, vars.number(rank)?), (size, vars.number(size)?)],
        None => LOCAL[0].map(|name| (name, None)),
    };
    let rank = (rank.name, rank.number(MAX_RANKS)?);
    read_mpi(Source::Pmi, rank, (size.name, size.number(MAX_RANKS)?), local, vars)
}

fn read_mpi(
    source: Source,
    rank: Number,
    world_size: Number,
    [local_rank, local_world_size]: [(&'static str, Option<usize>); 2],
    vars: &Vars,
) -> Result<Finding, EnvError> {
    if (rank.1, world_size.1) == (0, 1) {
        return Ok(Finding::Skipped("a single process; its ranks are threads".to_owned()));
    }
    let ranks = Ranks {
        source,
        rank,
        world_size,
        local_rank,
        local_world_size,
        node_rank: None,
        nodes: None,
        node: vars.first(&["PMIX_HOSTNAME", "HOSTNAME"])?.map(|named| named.value),
        host: None,
        // Named after the launcher's job, so that two jobs meet at different ports.
        name: vars.text("PMIX_NAMESPACE")?,
        restarts: 0,
    };
    let why = format!("{} and {} are set", rank.0, world_size.0);
    Ok(Finding::Taken(Role::Rank(ranks.place(vars)?), why))
}
