//! Tasks of Slurm's `srun`: <https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES>.

use super::error::EnvError;
use super::hostlist;
use super::ranks::{Ranks, Start, below, master};
use super::role::{Finding, Master, Role, Source};
use super::vars::{DEFAULT_PORT, Vars, port_of_job};

pub(super) const NAMES: &[&str] = &[
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NNODES",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
];

const NODE_LISTS: &[&str] = &["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];

/// Lowest number of the steps that are not an `srun`, such as the batch script.
const FIRST_SPECIAL_STEP: u64 = 0xFFFF_FFF0;

pub(super) fn read(vars: &Vars) -> Result<Finding, EnvError> {
    let passed = |why: &str| Ok(Finding::Passed(why.to_owned()));
    if !vars.has("SLURM_PROCID") {
        return passed("SLURM_PROCID is not set");
    }
    let step = vars.first(&["SLURM_STEP_ID", "SLURM_STEPID"])?.map(|named| named.value);
    let is_step = |step: &String| step.parse::<u64>().is_ok_and(|step| step < FIRST_SPECIAL_STEP);
    let Some(step) = step.filter(is_step) else {
        return passed("this is the batch script, not a task; put srun before the command");
    };
    // The daemons of mpirun are tasks of a step, and the processes they start inherit their variables.
    if vars.has("OMPI_COMM_WORLD_RANK") {
        return passed("mpirun started this process inside the Slurm job");
    }
    let Some(rank) = vars.number("SLURM_PROCID")? else {
        return passed("SLURM_PROCID is not set");
    };
    let (size_name, world_size) = match vars.number("SLURM_STEP_NUM_TASKS")? {
        Some(size) => ("SLURM_STEP_NUM_TASKS", size),
        None => match vars.number("SLURM_NTASKS")? {
            Some(size) => ("SLURM_NTASKS", size),
            None => {
                let problem = "SLURM_PROCID needs it; give --ntasks to srun";
                return Err(EnvError::missing("SLURM_NTASKS", problem));
            }
        },
    };
    if let (Some(pmi), Some(pmi_size)) = (vars.number("PMI_RANK")?, vars.number("PMI_SIZE")?)
        && (pmi, pmi_size) != (rank, world_size)
    {
        return passed("PMI_RANK and PMI_SIZE differ: mpiexec started this process inside the job");
    }
    if (rank, world_size) == (0, 1) {
        return passed("a single task; its ranks are threads");
    }
    let node_rank = vars.number("SLURM_NODEID")?;
    let local_world_size = local_world_size(vars, node_rank, world_size)?;
    let local_rank = match vars.number("SLURM_LOCALID")? {
        Some(local) => local,
        None if local_world_size.1 == world_size => rank,
        None => {
            let problem = "SLURM_PROCID needs it when there are several nodes; start with srun";
            return Err(EnvError::missing("SLURM_LOCALID", problem));
        }
    };
    let ranks = Ranks {
        rank: ("SLURM_PROCID", rank),
        world_size: (size_name, world_size),
        local_rank: ("SLURM_LOCALID", local_rank),
        local_world_size,
    };
    ranks.check()?;
    let Some(node_rank) = node_rank.or_else(|| ranks.node_by_block()) else {
        let problem = "tasks are not dealt out node by node, so it is needed; start with srun";
        return Err(EnvError::missing("SLURM_NODEID", problem));
    };
    below(("SLURM_NODEID", node_rank), ranks.world_size, "a node has at least one task")?;
    let id = vars.text("SLURM_JOB_ID")?;
    // Steps of one job may run concurrently.
    let meeting = id.map(|id| format!("{id}.{step}"));
    let port = meeting.as_deref().map(port_of_job);
    let master = match (vars.has("MASTER_ADDR"), first_host(vars)?) {
        (false, Some(host)) if !ranks.one_node() => Master {
            host,
            port: vars.port(&["MASTER_PORT"])?.or(port).unwrap_or(DEFAULT_PORT),
            shared_port: false,
        },
        _ => master(vars, ranks.one_node(), port)?,
    };
    let start = Start { name: meeting, restarts: 0 };
    let place = ranks.place(Source::Slurm, node_rank, None, master, start, vars)?;
    let why = format!("a task of srun; SLURM_PROCID and {size_name} are set");
    Ok(Finding::Taken(Role::Rank(place), why))
}

/// Returns the number of tasks of this node, and its source.
fn local_world_size(
    vars: &Vars,
    node: Option<usize>,
    world_size: usize,
) -> Result<(&'static str, usize), EnvError> {
    let lists = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    if let (Some(node), Some(list)) = (node, vars.first(&lists)?) {
        let bad = |problem: String| {
            let problem = format!("{problem}; it should read like 2(x3),1");
            EnvError::value(list.name, &list.value, problem)
        };
        let tasks = hostlist::tasks_of_node(&list.value, node).map_err(bad)?;
        return match tasks {
            Some(tasks) => Ok((list.name, tasks)),
            None => Err(bad(format!("it has no node {node}, which SLURM_NODEID names"))),
        };
    }
    if let Some(tasks) = vars.number("SLURM_NTASKS_PER_NODE")? {
        return Ok(("SLURM_NTASKS_PER_NODE", tasks));
    }
    let nodes = match vars.number("SLURM_STEP_NUM_NODES")? {
        None => vars.number("SLURM_NNODES")?.unwrap_or(1),
        Some(nodes) => nodes,
    };
    match nodes {
        0 => Err(EnvError::value("SLURM_NNODES", "0", "a job has a node; start with srun")),
        nodes if world_size.is_multiple_of(nodes) => Ok(("SLURM_NTASKS", world_size / nodes)),
        _ => {
            let problem = "tasks are not spread evenly, so it is needed; give --ntasks-per-node to srun";
            Err(EnvError::missing("SLURM_TASKS_PER_NODE", problem))
        }
    }
}

/// Returns the first host of the step or job, if Slurm lists hosts.
pub(super) fn first_host(vars: &Vars) -> Result<Option<String>, EnvError> {
    let Some(list) = vars.first(NODE_LISTS)? else { return Ok(None) };
    match hostlist::parse(&list.value) {
        Ok(hosts) => Ok(Some(hosts.first)),
        Err(problem) => {
            let problem = format!("{problem}; it should read like gpu[01-03,7],login-2");
            Err(EnvError::value(list.name, &list.value, problem))
        }
    }
}
