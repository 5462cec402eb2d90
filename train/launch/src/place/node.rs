//! Places a launcher of a node's ranks by flags of `kiln launch`, `PET_*`, `RANK` without `LOCAL_RANK`, or a JobSet.

use std::num::NonZero;

use clap::Args;

use super::error::EnvError;
use super::node_list::first_host;
use super::role::{Finding, Job, Master, Node, PerGpu, Role, Source};
use super::vars::{DEFAULT_PORT, Lookup, MAX_RANKS, MAX_RANKS_PER_NODE, Named, Vars, below};

/// torchrun's arguments as variables, set by Kubeflow.
pub(super) const PET: &[&str] = &[
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID",
    "PET_STANDALONE",
    "PET_MAX_RESTARTS",
];

/// Kubernetes itself sets only `JOB_COMPLETION_INDEX`. The others are annotations of a JobSet's pods
/// (<https://jobset.sigs.k8s.io/docs/concepts/>), which a manifest passes as variables; see `configs/k8s/`.
pub(super) const JOBSET: &[&str] = &[
    "JOB_COMPLETION_INDEX",
    "WORLD_SIZE",
    "NNODES",
    "JOBSET_NAME",
    "REPLICATED_JOB_NAME",
    "JOBSET_COORDINATOR",
    "JOBSET_RESTART_ATTEMPT",
    "PET_NPROC_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
];

/// torchrun's flags. Each may also come as a variable, `PET_` and its name.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFlags {
    /// Number of ranks on this node: a number, `gpu` for one per GPU, `cpu` for one per core, or `auto` for GPUs if
    /// there are any, else cores [default: 1].
    #[arg(long, alias = "nproc_per_node", value_name = "N")]
    pub nproc_per_node: Option<String>,
    /// Number of nodes of the job [default: 1].
    #[arg(long, value_name = "N")]
    pub nnodes: Option<String>,
    /// Rank of this node, from 0.
    #[arg(long, alias = "node_rank", value_name = "R")]
    pub node_rank: Option<String>,
    /// Host name or address of node 0.
    #[arg(long, alias = "master_addr", value_name = "A")]
    pub master_addr: Option<String>,
    /// Port on node 0 [default: 29500, or a free port for a single node].
    #[arg(long, alias = "master_port", value_name = "P")]
    pub master_port: Option<String>,
    /// Run on a single node with a free port, and ignore the environment.
    #[arg(long)]
    pub standalone: bool,
    /// Maximum number of restarts of all ranks after a failure [default: 0].
    #[arg(long, alias = "max_restarts", value_name = "K")]
    pub max_restarts: Option<String>,
    /// Address of the rendezvous, instead of --master-addr and --master-port.
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST:PORT", hide_short_help = true)]
    pub rdzv_endpoint: Option<String>,
    /// Job name, the same on every node.
    #[arg(long, alias = "rdzv_id", value_name = "ID", hide_short_help = true)]
    pub rdzv_id: Option<String>,
}

impl Node {
    /// Returns this node with its number of ranks, with `count` as the number of GPUs if needed.
    ///
    /// # Errors
    ///
    /// Fails if GPUs are required and there are none. `count` returns the reason.
    pub fn with_gpus(mut self, count: impl FnOnce() -> Result<usize, String>) -> Result<Self, EnvError> {
        let Some(per_gpu) = self.per_gpu.take() else { return Ok(self) };
        match (per_gpu, count()) {
            (_, Ok(gpus)) if gpus > 0 => self.nproc_per_node = gpus.min(MAX_RANKS_PER_NODE),
            (PerGpu::IfAny, _) => {}
            (PerGpu::Needed(name), found) => {
                let why = found.err().unwrap_or_else(|| "there is none".to_owned());
                let problem = format!(
                    "cannot count GPUs ({why}; `kiln doctor` shows more); set a number, or `cpu` for one per \
                     core"
                );
                return Err(EnvError::value(name, "gpu", problem));
            }
        }
        check_total(("--nnodes", self.nodes), self.nproc_per_node)?;
        Ok(self)
    }
}

fn check_total(nodes: (&'static str, usize), ranks: usize) -> Result<(), EnvError> {
    if nodes.1 > MAX_RANKS / ranks {
        let problem = format!("a job has at most {MAX_RANKS} ranks");
        return Err(EnvError::contradiction(&[nodes, ("ranks per node", ranks)], problem));
    }
    Ok(())
}

impl NodeFlags {
    fn overlay(&self, name: &str) -> Option<String> {
        match name {
            "--nproc-per-node" => self.nproc_per_node.clone(),
            "--nnodes" => self.nnodes.clone(),
            "--node-rank" => self.node_rank.clone(),
            "--master-addr" => self.master_addr.clone(),
            "--master-port" => self.master_port.clone(),
            "--standalone" => self.standalone.then(|| "1".to_owned()),
            "--max-restarts" => self.max_restarts.clone(),
            "--rdzv-endpoint" => self.rdzv_endpoint.clone(),
            "--rdzv-id" => self.rdzv_id.clone(),
            _ => None,
        }
    }
}

/// Returns the node that `kiln launch` starts.
pub fn node(flags: &NodeFlags, lookup: &Lookup) -> Result<Node, EnvError> {
    let overlaid = |name: &str| flags.overlay(name).or_else(|| lookup(name));
    node_of(Source::Flags, &Vars(&overlaid))
}

pub(super) fn node_of(source: Source, vars: &Vars) -> Result<Node, EnvError> {
    let standalone = standalone(vars)?;
    let nodes = match standalone {
        Some(name) => (name, 1),
        None => nodes(vars)?,
    };
    let (nproc_per_node, per_gpu) = match vars.first(&["--nproc-per-node", "PET_NPROC_PER_NODE"])? {
        Some(named) => nproc(&named)?,
        None => (1, None),
    };
    check_total(nodes, nproc_per_node)?;
    let rank = match standalone {
        Some(name) => (name, 0),
        None => node_rank(vars, nodes.1)?,
    };
    below(rank, nodes, "nodes are counted from 0")?;
    let max_restarts = match vars.first(&["--max-restarts", "PET_MAX_RESTARTS"])? {
        Some(named) => named.number(MAX_RANKS)? as u64,
        None => 0,
    };
    let id = vars.first(&["--rdzv-id", "PET_RDZV_ID", "TORCHELASTIC_RUN_ID"])?;
    Ok(Node {
        source,
        node_rank: rank.1,
        nodes: nodes.1,
        nproc_per_node,
        per_gpu,
        master: master(vars, nodes.1, standalone.is_some())?,
        job: Job::from_scheduler(vars).with_id(id.map(|named| named.value)),
        secret: vars.secret()?,
        max_restarts,
    })
}

/// Returns the flag or variable that requests a single node regardless of the environment.
fn standalone(vars: &Vars) -> Result<Option<&'static str>, EnvError> {
    let Some(named) = vars.first(&["--standalone", "PET_STANDALONE"])? else { return Ok(None) };
    match named.value.to_ascii_lowercase().as_str() {
        "1" | "true" => {}
        "0" | "false" => return Ok(None),
        _ => return Err(named.wrong("neither 1 nor 0; use one of them")),
    }
    // A flag takes precedence over variables, but not over another flag.
    if let Some(nodes) = vars.first(&["--nnodes", "PET_NNODES"])?
        && (is_flag(nodes.name) || !is_flag(named.name))
        && fixed_number(&nodes)? != 1
    {
        let values = [(named.name, named.value.as_str()), (nodes.name, nodes.value.as_str())];
        let problem = "a standalone job has one node; remove one of them";
        return Err(EnvError::contradicting(values, problem));
    }
    Ok(Some(named.name))
}

fn is_flag(name: &str) -> bool {
    name.starts_with("--")
}

fn nodes(vars: &Vars) -> Result<(&'static str, usize), EnvError> {
    if let Some(named) = vars.first(&["--nnodes", "PET_NNODES"])? {
        return Ok((named.name, fixed_number(&named)?));
    }
    let counts_nodes = vars.has("RANK") && !vars.has("LOCAL_RANK");
    if counts_nodes || is_pod_of_group(vars) {
        let names: &[&str] = if counts_nodes { &["WORLD_SIZE"] } else { &["WORLD_SIZE", "NNODES"] };
        return match vars.first(names)? {
            Some(named) => Ok((named.name, at_least_1(&named, MAX_RANKS)?)),
            None => {
                let problem = "set it to the number of nodes of the job, 1 if this is the only one";
                Err(EnvError::missing("WORLD_SIZE", problem))
            }
        };
    }
    Ok(("--nnodes", 1))
}

fn fixed_number(named: &Named) -> Result<usize, EnvError> {
    let Some((min, max)) = named.value.split_once(':') else {
        return at_least_1(named, MAX_RANKS);
    };
    if min != max {
        return Err(named.wrong(format!("the number of nodes cannot change during a job; use {max}")));
    }
    at_least_1(&Named { name: named.name, value: max.to_owned() }, MAX_RANKS)
}

fn at_least_1(named: &Named, max: usize) -> Result<usize, EnvError> {
    match named.number(max) {
        Ok(0) | Err(_) => {
            Err(named.wrong(format!("not a whole number from 1 to {max}; correct or unset it")))
        }
        number => number,
    }
}

fn nproc(named: &Named) -> Result<(usize, Option<PerGpu>), EnvError> {
    let cores = || {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        cores.min(MAX_RANKS_PER_NODE)
    };
    match named.value.as_str() {
        "cpu" => Ok((cores(), None)),
        "auto" => Ok((cores(), Some(PerGpu::IfAny))),
        "gpu" => Ok((1, Some(PerGpu::Needed(named.name)))),
        _ => at_least_1(named, MAX_RANKS_PER_NODE).map(|ranks| (ranks, None)).map_err(|_| {
            named.wrong(format!(
                "not a whole number from 1 to {MAX_RANKS_PER_NODE}, and none of `gpu`, `cpu` and `auto`; \
                 correct or unset it"
            ))
        }),
    }
}

fn node_rank(vars: &Vars, nodes: usize) -> Result<(&'static str, usize), EnvError> {
    let mut names = vec!["--node-rank", "PET_NODE_RANK"];
    names.extend((!vars.has("LOCAL_RANK")).then_some("RANK"));
    // With one node, a scheduler's numbers may describe another group of processes.
    names.extend((nodes > 1).then_some(["SLURM_NODEID", "JOB_COMPLETION_INDEX"]).into_iter().flatten());
    match vars.first(&names)? {
        Some(named) => Ok((named.name, named.number(MAX_RANKS)?)),
        None if nodes == 1 => Ok(("--node-rank", 0)),
        None => {
            let problem = format!(
                "there are {nodes} nodes; give each its number from 0 to {}, or set PET_NODE_RANK",
                nodes - 1
            );
            Err(EnvError::missing("--node-rank", problem))
        }
    }
}

type HostSource = fn(&Vars) -> Result<Option<String>, EnvError>;

/// Returns the address where the ranks meet; port 0 stands for any free port.
fn master(vars: &Vars, nodes: usize, standalone: bool) -> Result<Master, EnvError> {
    let at = |host: String, port: u16| Master { host, port, shared_port: false };
    if standalone {
        return Ok(at("127.0.0.1".to_owned(), 0));
    }
    let mut host = vars.first(&["--master-addr", "PET_MASTER_ADDR"])?;
    let mut port = vars.first(&["--master-port", "PET_MASTER_PORT"])?;
    if let Some((end_host, end_port)) = endpoint(vars)? {
        host = one_of(host, Some(end_host), |named| named.host())?;
        port = one_of(port, end_port, |named| named.port())?;
    }
    let host = host.map(|named| named.host()).transpose()?;
    let port = port.map(|named| named.port()).transpose()?;
    if nodes == 1 {
        return Ok(at(host.unwrap_or_else(|| "127.0.0.1".to_owned()), port.unwrap_or(0)));
    }
    let port =
        port.map_or_else(|| vars.port(&["MASTER_PORT"]), |port| Ok(Some(port)))?.unwrap_or(DEFAULT_PORT);
    let sources: [HostSource; 3] = [|vars| vars.host(&["MASTER_ADDR"]), first_host, coordinator];
    let host = sources.iter().try_fold(host, |host, source| match host {
        None => source(vars),
        found => Ok(found),
    })?;
    match host {
        Some(host) => Ok(at(host, port)),
        None => Err(EnvError::missing(
            "--master-addr",
            format!(
                "there are {nodes} nodes; give the host name or address of node 0 on every node, \
                 or set MASTER_ADDR"
            ),
        )),
    }
}

/// Merges two settings of one value: a flag wins over a variable; otherwise they must agree.
fn one_of<T: PartialEq>(
    master: Option<Named>,
    endpoint: Option<Named>,
    value: impl Fn(&Named) -> Result<T, EnvError>,
) -> Result<Option<Named>, EnvError> {
    let (Some(first), Some(second)) = (&master, &endpoint) else { return Ok(master.or(endpoint)) };
    match (is_flag(first.name), is_flag(second.name)) {
        (false, true) => Ok(endpoint),
        (true, false) => Ok(master),
        _ if value(first)? == value(second)? => Ok(master),
        _ => {
            let values = [(first.name, first.value.as_str()), (second.name, second.value.as_str())];
            let problem = "both set the address where the ranks meet; remove one of them";
            Err(EnvError::contradicting(values, problem))
        }
    }
}

/// Parses a rendezvous endpoint, `HOST:PORT` or `HOST`. torchrun's default, an empty endpoint, counts as unset.
fn endpoint(vars: &Vars) -> Result<Option<(Named, Option<Named>)>, EnvError> {
    let names = ["--rdzv-endpoint", "PET_RDZV_ENDPOINT"];
    let Some(name) = names.into_iter().find(|name| vars.has(name)) else { return Ok(None) };
    if (vars.0)(name).is_some_and(|value| value.trim().is_empty()) {
        return Ok(None);
    }
    let Some(named) = vars.first(&[name])? else { return Ok(None) };
    let part = |value: &str| Named { name, value: value.to_owned() };
    // An address such as ::1 has colons but no port.
    let port_after = match named.value.rfind(']') {
        Some(bracket) => named.value[bracket..].contains(':'),
        None => named.value.matches(':').count() == 1,
    };
    match named.value.rsplit_once(':') {
        Some((host, port)) if port_after => Ok(Some((part(host), Some(part(port))))),
        _ => Ok(Some((named, None))),
    }
}

pub(super) fn read_pet(vars: &Vars) -> Result<Finding, EnvError> {
    const ABOUT_NODES: [&str; 5] =
        ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_STANDALONE"];
    const OTHERS: [&str; 5] =
        ["SLURM_STEP_ID", "SLURM_STEPID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];
    let set = |names: [&'static str; 5]| names.into_iter().find(|name| vars.has(name));
    let why = if let Some(name) = set(ABOUT_NODES) {
        format!("{name} describes the nodes; this process starts its node's ranks")
    } else if vars.has("PET_NPROC_PER_NODE") {
        let jobset = is_pod_of_group(vars).then_some("JOB_COMPLETION_INDEX");
        if let Some(other) = set(OTHERS).or(jobset) {
            let why = format!("PET_NPROC_PER_NODE alone does not describe the nodes, and {other} is set");
            return Ok(Finding::Skipped(why));
        }
        "PET_NPROC_PER_NODE is set; this process starts as many ranks".to_owned()
    } else {
        return Ok(Finding::Skipped("no PET_ variable about nodes".to_owned()));
    };
    Ok(Finding::Taken(Role::Node(node_of(Source::Pet, vars)?), why))
}

pub(super) fn read_jobset(vars: &Vars) -> Result<Finding, EnvError> {
    if !vars.has("JOB_COMPLETION_INDEX") {
        return Ok(Finding::Skipped("JOB_COMPLETION_INDEX is not set".to_owned()));
    }
    if !is_pod_of_group(vars) {
        let why = "an indexed Job without a sign that its pods belong together; set WORLD_SIZE to \
                   their number if they do";
        return Ok(Finding::Skipped(why.to_owned()));
    }
    let node = node_of(Source::JobSet, vars)?;
    let why = "JOB_COMPLETION_INDEX is the rank of a node, which starts its own ranks";
    Ok(Finding::Taken(Role::Node(node), why.to_owned()))
}

/// An indexed Job may also consist of independent runs.
fn is_pod_of_group(vars: &Vars) -> bool {
    let signs = ["WORLD_SIZE", "NNODES", "MASTER_ADDR", "JOBSET_NAME", "JOBSET_COORDINATOR"];
    vars.has("JOB_COMPLETION_INDEX") && signs.iter().any(|name| vars.has(name))
}

/// Returns the host of the first pod: the JobSet's coordinator, or the name that a JobSet gives to its first pod,
/// `<jobset>-<replicated job>-<job>-<pod>.<jobset>`.
fn coordinator(vars: &Vars) -> Result<Option<String>, EnvError> {
    if let Some(host) = vars.host(&["JOBSET_COORDINATOR"])? {
        return Ok(Some(host));
    }
    match (vars.text("JOBSET_NAME")?, vars.text("REPLICATED_JOB_NAME")?) {
        (Some(set), Some(job)) => {
            let value = format!("{set}-{job}-0-0.{set}");
            Named { name: "JOBSET_NAME", value }.host().map(Some)
        }
        _ => Ok(None),
    }
}
