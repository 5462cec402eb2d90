//! A rank from the flags of `kiln train`, or from the variables that torchrun and `kiln launch` set and other
//! launchers imitate: <https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables>.

use clap::Args;

use super::node::node_of;
use super::role::{EnvError, Finding, Role, Source, shortened};
use super::vars::{Ranks, Rest, Vars, below, master, meets_on_loopback};

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
    /// Returns the value of a flag by its name, or by the name of a variable that the flag overrides.
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
        let world_size = vars.needed("--world-size", problem)?;
        let (local_rank, local_world_size) =
            match (vars.number("--local-rank")?, vars.number("--local-world-size")?) {
                (Some(local), Some(size)) => (local, size),
                (local, None) if meets_on_loopback(vars)? => (local.unwrap_or(rank), world_size),
                // Without information about its machine, a rank is assumed to be alone on it.
                (None, None) => (0, 1),
                (Some(_), None) => {
                    let problem = "--local-rank needs it; set it to the number of ranks of this machine";
                    return Err(EnvError::missing("--local-world-size", problem));
                }
                (None, Some(_)) => {
                    let problem =
                        "--local-world-size needs it; set it to this rank's number on its machine, from 0";
                    return Err(EnvError::missing("--local-rank", problem));
                }
            };
        let ranks = Ranks {
            rank: ("--rank", rank),
            world_size: ("--world-size", world_size),
            local_rank: ("--local-rank", local_rank),
            local_world_size: ("--local-world-size", local_world_size),
        };
        ranks.check()?;
        let Some(node_rank) = ranks.node_by_block() else {
            return Err(EnvError::contradiction(
                &[ranks.rank, ranks.local_rank, ranks.local_world_size],
                "ranks are counted machine by machine, so --rank is a multiple of \
                 --local-world-size plus --local-rank",
            ));
        };
        let master = master(vars, ranks.one_node(), None, None)?;
        let restarts = vars.restarts("TORCHELASTIC_RESTART_COUNT");
        let rest = Rest { node_rank, node: None, master, name: None, restarts };
        let place = ranks.place(Source::Flags, rest, vars)?;
        Ok(Finding::Taken(Role::Rank(place), "--rank and --world-size are given".to_owned()))
    }
}

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

/// Returns the rank that torchrun's variables describe, or the node, if they count nodes.
pub(super) fn read(vars: &Vars) -> Result<Finding, EnvError> {
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
    let local_world_size = match (vars.number("LOCAL_WORLD_SIZE")?, nodes) {
        (Some(size), _) => size,
        (None, Some(nodes)) if nodes > 0 && world_size.is_multiple_of(nodes) => world_size / nodes,
        _ if world_size <= 1 || meets_on_loopback(vars)? => world_size,
        _ => {
            let problem = "ranks on several machines need it; set it to the number of ranks of this machine";
            return Err(EnvError::missing("LOCAL_WORLD_SIZE", problem));
        }
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
            let nodes = nodes.map_or(ranks.world_size, |nodes| ("GROUP_WORLD_SIZE", nodes));
            below(("GROUP_RANK", node), nodes, "nodes are counted from 0")?;
            node
        }
        (None, Some(node)) => node,
        (None, None) => {
            let problem = "RANK is not LOCAL_RANK plus a multiple of LOCAL_WORLD_SIZE, so it does not identify the \
                           node; set it to the node's number, from 0";
            return Err(EnvError::missing("GROUP_RANK", problem));
        }
    };
    let mut master = master(vars, ranks.one_node(), None, None)?;
    let shared = vars.text("TORCHELASTIC_USE_AGENT_STORE")?;
    master.shared_port =
        shared.is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "true" | "1"));
    let name = vars.text("TORCHELASTIC_RUN_ID")?;
    let restarts = vars.restarts("TORCHELASTIC_RESTART_COUNT");
    let rest = Rest { node_rank, node: None, master, name, restarts };
    let place = ranks.place(Source::Torchrun, rest, vars)?;
    Ok(Finding::Taken(Role::Rank(place), "RANK, LOCAL_RANK and WORLD_SIZE are set".to_owned()))
}
