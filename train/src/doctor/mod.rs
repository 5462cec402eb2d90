//! `kiln doctor`: what this process knows about its place, its master and its machine, before any
//! work depends on it.

mod gpu;
mod machine;
mod network;

use std::fmt::Write;

use clap::Args;

use crate::place::{
    self, Considered, Flags, Job, Lookup, Master, Node, Place, PlaceError, Role, SECRET,
};

/// Flags of `kiln doctor`.
#[derive(Args, Clone, Debug, Default)]
pub struct DoctorArgs {
    #[command(flatten)]
    place: Flags,
}

/// What the doctor found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// Lines for people.
    pub text: String,
    /// Whether training could start as far as one can tell; if not, the configuration is wrong.
    pub healthy: bool,
}

/// Looks at this process, its environment and its machine. Takes seconds at most.
pub fn examine(args: &DoctorArgs) -> Diagnosis {
    let mut diagnosis = examine_place(&args.place, &place::environment);
    let (role, _) = place::survey(&args.place, &place::environment);
    if let Some((master, here)) = role.as_ref().ok().and_then(meeting_point) {
        diagnosis.text.push_str("\nnetwork\n");
        for line in network::examine(master, here) {
            let _ = writeln!(diagnosis.text, "  {line}");
        }
    }
    diagnosis.text.push_str("\nmachine\n");
    for line in machine::examine(ranks_here(role.as_ref().ok())) {
        let _ = writeln!(diagnosis.text, "  {line}");
    }
    diagnosis.text.push_str("\nGPUs\n");
    for line in gpu::examine() {
        let _ = writeln!(diagnosis.text, "  {line}");
    }
    diagnosis
}

/// The part of the diagnosis that follows from flags and variables alone.
pub fn examine_place(flags: &Flags, lookup: &Lookup) -> Diagnosis {
    let (role, considered) = place::survey(flags, lookup);
    let mut text = "sources of this process's place, in order\n".to_owned();
    considered.iter().for_each(|considered| source(&mut text, considered));
    text.push_str("\nplace\n");
    let healthy = role.is_ok();
    for line in result(role) {
        let _ = writeln!(text, "  {line}");
    }
    Diagnosis { text, healthy }
}

fn source(text: &mut String, considered: &Considered) {
    let _ = writeln!(text, "  {:9} {}", considered.source.to_string(), considered.verdict);
    for (name, value) in &considered.found {
        let _ = writeln!(text, "            {name}={value}");
    }
}

fn result(role: Result<Role, PlaceError>) -> Vec<String> {
    match role {
        Err(error) => vec![format!("unknown: {error}")],
        Ok(Role::Alone(job)) => {
            let alone = "alone; ranks are threads of this process, as many as train.ranks says";
            let mut lines = vec![alone.to_owned()];
            lines.extend(job.name.is_some().then(|| self::job(&job)));
            lines
        }
        Ok(Role::Rank(place)) => rank(&place),
        Ok(Role::Node(node)) => self::node(&node),
    }
}

fn rank(place: &Place) -> Vec<String> {
    let mut lines = vec![
        format!("rank {} of {}, from {}", place.rank, place.world_size, place.source),
        format!(
            "local rank {} of {} on node {} ({})",
            place.local_rank, place.local_world_size, place.node_rank, place.node
        ),
        format!("master {}", address(&place.master)),
        job(&place.job),
        secret(place.secret.is_some()),
    ];
    if place.master.shared_port {
        lines.push(format!(
            "torchrun keeps its own store on port {} (TORCHELASTIC_USE_AGENT_STORE=True), so the \
             ranks meet at one of the ports above it",
            place.master.port
        ));
    }
    lines
}

fn node(node: &Node) -> Vec<String> {
    let master = match node.master.port {
        0 => format!("master {}, on a free port", node.master.host),
        _ => format!("master {}", address(&node.master)),
    };
    let secret = match (&node.secret, node.nodes) {
        (None, 1) => format!("secret: {SECRET} is not set; one is made up for the ranks"),
        (secret, _) => self::secret(secret.is_some()),
    };
    vec![
        format!("node {} of {}, from {}", node.node_rank, node.nodes, node.source),
        format!("starts {} ranks, again at most {} times", node.nproc_per_node, node.max_restarts),
        master,
        job(&node.job),
        secret,
    ]
}

fn job(job: &Job) -> String {
    let name = job.name.as_deref().unwrap_or("without a name");
    format!("job {name}, restarted {} times", job.restarts)
}

fn secret(is_set: bool) -> String {
    match is_set {
        true => format!("secret: {SECRET} is set"),
        false => format!(
            "secret: {SECRET} is not set; ranks refuse to meet without it, except on a loopback address \
             or with comm.open = true. Set it to the same random text for every rank; `openssl rand \
             -hex 32` makes one"
        ),
    }
}

fn address(master: &Master) -> String {
    match master.host.contains(':') {
        true => format!("[{}]:{}", master.host, master.port),
        false => format!("{}:{}", master.host, master.port),
    }
}

/// Where this process meets others, and whether the master is to run here.
fn meeting_point(role: &Role) -> Option<(&Master, bool)> {
    match role {
        Role::Alone(_) => None,
        Role::Rank(place) => Some((&place.master, place.rank == 0)),
        Role::Node(node) => Some((&node.master, node.node_rank == 0)),
    }
}

fn ranks_here(role: Option<&Role>) -> usize {
    match role {
        Some(Role::Rank(place)) => place.local_world_size,
        Some(Role::Node(node)) => node.nproc_per_node,
        _ => 1,
    }
}
