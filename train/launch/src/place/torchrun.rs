//! The variables that torchrun and `kiln launch` set for every rank, and that other launchers imitate:
//! <https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables>.

use super::error::EnvError;
use super::node;
use super::ranks::{Ranks, Start, below, master, meets_on_loopback};
use super::role::{Finding, Role, Source};
use super::vars::Vars;

pub(super) const NAMES: &[&str] = &[
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

pub(super) fn read(vars: &Vars) -> Result<Finding, EnvError> {
    let Some(rank) = vars.number("RANK")? else {
        return Ok(Finding::Passed("RANK is not set".to_owned()));
    };
    let Some(local_rank) = vars.number("LOCAL_RANK")? else {
        let node = node::node_of(Source::Torchrun, vars)?;
        let why = "RANK without LOCAL_RANK is the rank of a node, which starts its own ranks";
        return Ok(Finding::Taken(Role::Node(node), why.to_owned()));
    };
    let Some(world_size) = vars.number("WORLD_SIZE")? else {
        let problem = "RANK and LOCAL_RANK need it; set it to the number of ranks of the job";
        return Err(EnvError::missing("WORLD_SIZE", problem));
    };
    let local_world_size = match vars.number("LOCAL_WORLD_SIZE")? {
        Some(size) => size,
        None => match vars.number("GROUP_WORLD_SIZE")? {
            Some(nodes) if nodes > 0 && world_size.is_multiple_of(nodes) => world_size / nodes,
            _ if world_size <= 1 || meets_on_loopback(vars)? => world_size,
            _ => {
                let problem = "ranks on several machines need it; set it to the number of ranks of \
                               this machine";
                return Err(EnvError::missing("LOCAL_WORLD_SIZE", problem));
            }
        },
    };
    let ranks = Ranks {
        rank: ("RANK", rank),
        world_size: ("WORLD_SIZE", world_size),
        local_rank: ("LOCAL_RANK", local_rank),
        local_world_size: ("LOCAL_WORLD_SIZE", local_world_size),
    };
    ranks.check()?;
    let node_rank = match (vars.number("GROUP_RANK")?, ranks.node_by_block()) {
        (Some(node), _) => {
            let nodes = vars.number("GROUP_WORLD_SIZE")?;
            let nodes = nodes.map_or(("WORLD_SIZE", world_size), |n| ("GROUP_WORLD_SIZE", n));
            below(("GROUP_RANK", node), nodes, "nodes are counted from 0")?;
            node
        }
        (None, Some(node)) => node,
        (None, None) => {
            let problem = "RANK is not LOCAL_RANK plus a multiple of LOCAL_WORLD_SIZE, so it does \
                           not tell the node; set it to the node's number, from 0";
            return Err(EnvError::missing("GROUP_RANK", problem));
        }
    };
    let mut master = master(vars, ranks.one_node(), None)?;
    master.shared_port = vars
        .text("TORCHELASTIC_USE_AGENT_STORE")?
        .is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "true" | "1"));
    let start = Start {
        name: vars.text("TORCHELASTIC_RUN_ID")?,
        restarts: vars.restarts("TORCHELASTIC_RESTART_COUNT"),
    };
    let place = ranks.place(Source::Torchrun, node_rank, None, master, start, vars)?;
    Ok(Finding::Taken(Role::Rank(place), "RANK, LOCAL_RANK and WORLD_SIZE are set".to_owned()))
}
