//! The place of a process as flags of `kiln train`.

use clap::Args;

use super::error::{EnvError, shortened};
use super::ranks::{Ranks, Start, master, meets_on_loopback};
use super::role::{Finding, Role, Source};
use super::vars::Vars;

/// Flags that give one process its place, for starting ranks by hand.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Process flags, for starting every rank by hand")]
pub struct Flags {
    /// Rank of this process, from 0; requires --world-size.
    #[arg(long, value_name = "R", hide_short_help = true)]
    pub rank: Option<String>,
    /// Number of ranks of the job.
    #[arg(long, alias = "world_size", value_name = "N", hide_short_help = true)]
    pub world_size: Option<String>,
    /// Rank on this machine, from 0 [default: --rank if all ranks are on this machine].
    #[arg(long, alias = "local_rank", value_name = "R", hide_short_help = true)]
    pub local_rank: Option<String>,
    /// Number of ranks on this machine [default: --world-size if all ranks are on this machine].
    #[arg(long, alias = "local_world_size", value_name = "N", hide_short_help = true)]
    pub local_world_size: Option<String>,
    /// Host name or address of rank 0.
    #[arg(long, alias = "master_addr", value_name = "HOST", hide_short_help = true)]
    pub master_addr: Option<String>,
    /// Port of the rendezvous on rank 0.
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
        let world_size = vars.number("--world-size")?;
        let Some(rank) = vars.number("--rank")? else {
            for flag in ["--world-size", "--local-rank", "--local-world-size"] {
                if vars.has(flag) {
                    let problem = format!("{flag} needs it; give both, or neither");
                    return Err(EnvError::missing("--rank", problem));
                }
            }
            return Ok(Finding::Passed(match self.found().is_empty() {
                true => "no --rank".to_owned(),
                false => "no --rank; where to meet goes before what the others say".to_owned(),
            }));
        };
        let Some(world_size) = world_size else {
            let problem = "--rank needs it; set it to the number of ranks of the job";
            return Err(EnvError::missing("--world-size", problem));
        };
        let here = meets_on_loopback(vars)?;
        let local_world_size = vars.number("--local-world-size")?;
        let local_rank = vars.number("--local-rank")?;
        let (local_rank, local_world_size) = match (local_rank, local_world_size) {
            (Some(local), Some(size)) => (local, size),
            (local, None) if here => (local.unwrap_or(rank), world_size),
            // Without information about its machine, a rank is assumed to be alone on it.
            (None, None) => (0, 1),
            (Some(_), None) => {
                let problem = "--local-rank needs it; set it to the number of ranks of this machine";
                return Err(EnvError::missing("--local-world-size", problem));
            }
            (None, Some(_)) => {
                let problem = "--local-world-size needs it; set it to this rank's place among those \
                               of this machine, from 0";
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
        let master = master(vars, ranks.one_node(), None)?;
        let restarts = vars.restarts("TORCHELASTIC_RESTART_COUNT");
        let start = Start { name: None, restarts };
        let place = ranks.place(Source::Flags, node_rank, None, master, start, vars)?;
        Ok(Finding::Taken(Role::Rank(place), "--rank and --world-size are given".to_owned()))
    }
}
