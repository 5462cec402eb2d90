//! Places tasks of Slurm's `srun`: <https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES>.

use super::error::EnvError;
use super::node_list::first_host;
use super::ranks::Ranks;
use super::role::{Finding, Role, Source};
use super::vars::{MAX_RANKS, Vars};

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

/// Steps from this number on are no `srun` steps; one is the batch script.
const FIRST_SPECIAL_STEP: u64 = 0xFFFF_FFF0;

pub(super) fn read(vars: &Vars) -> Result<Finding, EnvError> {
    let skipped = |why: &str| Ok(Finding::Skipped(why.to_owned()));
    if !vars.has("SLURM_PROCID") {
        return skipped("SLURM_PROCID is not set");
    }
    let step = vars.first(&["SLURM_STEP_ID", "SLURM_STEPID"])?.map(|named| named.value);
    let is_step = |step: &String| step.parse::<u64>().is_ok_and(|step| step < FIRST_SPECIAL_STEP);
    let Some(step) = step.filter(is_step) else {
        return skipped("this is the batch script, not a task; put srun before the command");
    };
    // The daemons of mpirun are tasks of a step, and their processes inherit these variables.
    if vars.has("OMPI_COMM_WORLD_RANK") {
        return skipped("mpirun started this process inside the Slurm job");
    }
    let rank = vars.number("SLURM_PROCID")?.unwrap_or_default();
    let Some(size) = vars.first(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])? else {
        return Err(EnvError::missing("SLURM_NTASKS", "SLURM_PROCID needs it; give --ntasks to srun"));
    };
    let (size_name, world_size) = (size.name, size.number(MAX_RANKS)?);
    if let (Some(pmi), Some(pmi_size)) = (vars.number("PMI_RANK")?, vars.number("PMI_SIZE")?)
        && (pmi, pmi_size) != (rank, world_size)
    {
        return skipped("PMI_RANK and PMI_SIZE differ: mpiexec started this process inside the job");
    }
    if (rank, world_size) == (0, 1) {
        return skipped("a single task; its ranks are threads");
    }
    let node_rank = vars.number("SLURM_NODEID")?;
    let local_world_size = local_world_size(vars, node_rank, world_size)?;
    let ranks = Ranks {
        source: Source::Slurm,
        rank: ("SLURM_PROCID", rank),
        world_size: (size_name, world_size),
        local_rank: ("SLURM_LOCALID", vars.number("SLURM_LOCALID")?),
        local_world_size: (local_world_size.0, Some(local_world_size.1)),
        node_rank: Some(("SLURM_NODEID", node_rank)),
        nodes: None,
        node: None,
        host: first_host(vars)?,
        name: vars.text("SLURM_JOB_ID")?.map(|id| format!("{id}.{step}")),
        restarts: 0,
    };
    let why = format!("a task of srun; SLURM_PROCID and {size_name} are set");
    Ok(Finding::Taken(Role::Rank(ranks.place(vars)?), why))
}

fn local_world_size(
    vars: &Vars,
    node: Option<usize>,
    world_size: usize,
) -> Result<(&'static str, usize), EnvError> {
    let lists = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    if let (Some(node), Some(list)) = (node, vars.first(&lists)?) {
        let wrong = |problem: &str| list.wrong(format!("{problem}; it should read like 2(x3),1"));
        let tasks = tasks_of_node(&list.value, node).map_err(wrong)?;
        let no_node = || wrong(&format!("it has no node {node}, which SLURM_NODEID names"));
        return tasks.map(|tasks| (list.name, tasks)).ok_or_else(no_node);
    }
    if let Some(tasks) = vars.number("SLURM_NTASKS_PER_NODE")? {
        return Ok(("SLURM_NTASKS_PER_NODE", tasks));
    }
    let nodes = vars.first(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])?;
    let nodes = nodes.map_or(Ok(1), |nodes| nodes.number(MAX_RANKS))?;
    match nodes {
        0 => Err(EnvError::value("SLURM_NNODES", "0", "a job has a node; start with srun")),
        nodes if world_size.is_multiple_of(nodes) => Ok(("SLURM_NTASKS", world_size / nodes)),
        _ => {
            let problem = "tasks are not distributed evenly, so it is needed; give --ntasks-per-node to srun";
            Err(EnvError::missing("SLURM_TASKS_PER_NODE", problem))
        }
    }
}

/// Returns the count for `node` in a list such as `2(x3),1`; `None` if the list is too short.
pub(super) fn tasks_of_node(list: &str, node: usize) -> Result<Option<usize>, &'static str> {
    let number = |text: &str| text.parse::<usize>().map_err(|_| "a count that is not a number");
    let mut left = node;
    for entry in list.split(',') {
        let entry = entry.trim();
        let (tasks, times) = match entry.split_once("(x") {
            Some((tasks, times)) => {
                (tasks, number(times.strip_suffix(')').ok_or("a bracket that is not closed")?)?)
            }
            None => (entry, 1),
        };
        let tasks = number(tasks)?;
        if left < times {
            return Ok(Some(tasks));
        }
        left -= times;
    }
    Ok(None)
}
