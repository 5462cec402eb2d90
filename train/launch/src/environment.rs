//! The environment of a rank: torchrun's variables, and Kiln's own.

use std::time::Duration;

use kiln_sys::launcher::{GRACE, LAUNCHER_PID, RUN};

use crate::place::{Node, SECRET};

/// One life of a job on this node.
pub(super) struct Job {
    /// The node, with its port chosen.
    pub(super) node: Node,
    /// Name of the job.
    pub(super) name: String,
    /// Number of times that this launcher has restarted the ranks.
    pub(super) restart: u64,
    /// The id of the run that an earlier life worked on.
    pub(super) run: Option<String>,
    /// Time between SIGTERM and SIGKILL.
    pub(super) grace: Duration,
}

impl Job {
    /// Returns the rank of a child in the whole job.
    pub(super) fn rank(&self, local_rank: usize) -> usize {
        self.node.node_rank * self.node.nproc_per_node + local_rank
    }

    /// Returns how often the ranks were restarted, by any launcher or scheduler.
    pub(super) fn restarts(&self) -> u64 {
        self.node.job.restarts.saturating_add(self.restart)
    }

    /// Returns the variables of one rank.
    pub(super) fn environment(&self, local_rank: usize) -> Vec<(&'static str, String)> {
        let node = &self.node;
        let rank = self.rank(local_rank).to_string();
        let world_size = (node.nodes * node.nproc_per_node).to_string();
        let most = node.max_restarts.saturating_add(node.job.restarts);
        let mut variables = vec![
            ("RANK", rank.clone()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("WORLD_SIZE", world_size.clone()),
            ("LOCAL_WORLD_SIZE", node.nproc_per_node.to_string()),
            ("GROUP_RANK", node.node_rank.to_string()),
            ("GROUP_WORLD_SIZE", node.nodes.to_string()),
            ("ROLE_NAME", "default".to_owned()),
            ("ROLE_RANK", rank),
            ("ROLE_WORLD_SIZE", world_size),
            ("MASTER_ADDR", node.master.host.clone()),
            ("MASTER_PORT", node.master.port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.restarts().to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", most.to_string()),
            ("TORCHELASTIC_RUN_ID", self.name.clone()),
            // Unlike torchrun, this launcher does not listen on the master's port.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
            (LAUNCHER_PID, std::process::id().to_string()),
            (GRACE, self.grace.as_secs_f64().to_string()),
        ];
        variables.extend(self.run.clone().map(|run| (RUN, run)));
        variables.extend(node.secret.clone().map(|secret| (SECRET, secret.0)));
        variables
    }
}
