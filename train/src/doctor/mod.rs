//! `kiln doctor`: what this process knows about its place, its master and its machine, before any
//! work depends on it.

mod gpu;
mod machine;
mod network;

use std::fmt::Write;

use clap::Args;
use kiln_collectives::tcp::Ports;

use crate::place::{
    self, Considered, Flags, Lookup, Master, Node, PerGpu, Place, PlaceError, Role, SECRET,
};

/// Flags of `kiln doctor`.
#[derive(Args, Clone, Debug, Default)]
pub struct DoctorArgs {
    #[command(flatten)]
    place: Flags,
    /// Check whether these ports are free for ranks to listen on, as comm.ports names them.
    #[arg(long, value_name = "FIRST-LAST")]
    comm_ports: Option<Ports>,
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
    let ranks = ranks_here(role.as_ref().ok());
    let (line, enough) = network::examine_ports(args.comm_ports, ranks);
    let _ = writeln!(diagnosis.text, "\nports\n  {line}");
    diagnosis.healthy &= enough;
    diagnosis.text.push_str("\nmachine\n");
    for line in machine::examine(ranks) {
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
        Ok(Role::Alone) => {
            vec!["alone; ranks are threads of this process, as many as train.ranks says".to_owned()]
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
        format!("job {}, restarted {} times", place.job, place.restarts),
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
    let job = node.job.as_deref().unwrap_or("without a name");
    let secret = match (&node.secret, node.nodes) {
        (None, 1) => format!("secret: {SECRET} is not set; one is made up for the ranks"),
        (secret, _) => self::secret(secret.is_some()),
    };
    vec![
        format!("node {} of {}, from {}", node.node_rank, node.nodes, node.source),
        format!("starts {}, again at most {} times", ranks_of(node), node.max_restarts),
        master,
        format!("job {job}, restarted {} times", node.restarts),
        secret,
    ]
}

fn ranks_of(node: &Node) -> String {
    let ranks = format!("{} ranks", node.nproc_per_node);
    match node.per_gpu {
        None => ranks,
        Some(PerGpu::Needed(_)) => "one rank for each GPU".to_owned(),
        Some(PerGpu::IfAny) => format!("one rank for each GPU, or without one {ranks}"),
    }
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
        Role::Alone => None,
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
