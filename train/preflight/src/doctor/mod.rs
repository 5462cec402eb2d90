//! `kiln doctor`: checks this process's place, master and machine before a run depends on them.

mod diagnosis;
mod gpu;
mod machine;
mod network;

use clap::Args;
use kiln_collectives::tcp::Ports;
use serde_json::json;

use diagnosis::Section;
use kiln_config::Backend;
use kiln_config::device::parse_backend;
use kiln_launch::place::{self, EnvError, Flags, Job, Master, Node, PerGpu, RankEnv, Role, SECRET};
use kiln_sys::words::number_of;
use kiln_train::kernels;

pub use diagnosis::Diagnosis;

/// Flags of `kiln doctor`.
#[derive(Args, Clone, Debug, Default)]
pub struct DoctorArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Flags,
    /// Check that these ports are free to listen on, as for comm.ports.
    #[arg(long, value_name = "FIRST-LAST")]
    comm_ports: Option<Ports>,
    /// Compare every fused GPU kernel with its reference, on an NVIDIA GPU or, without one, through wgpu.
    #[arg(long, value_name = "auto|cuda|wgpu", num_args = 0..=1, default_missing_value = "auto")]
    #[arg(value_parser = parse_backend)]
    gpu: Option<Backend>,
}

impl DoctorArgs {
    /// Runs [`examine`]. Returns the text to print, and whether no problem was found.
    pub fn run(&self) -> (String, bool) {
        let diagnosis = examine(self);
        let text = if self.json { diagnosis.to_json() } else { diagnosis.to_text() };
        (text, diagnosis.healthy)
    }
}

/// Examines this process, its environment and its machine. Takes a few seconds at most.
pub fn examine(args: &DoctorArgs) -> Diagnosis {
    let (role, sources) = place::survey(&args.place, &place::environment);
    let Standing { place, meeting_point, ranks } = Standing::of(&role);
    let network = meeting_point.map(|(master, here)| network::examine(master, here));
    let is_found = network.as_ref().is_none_or(|(_, is_found)| *is_found);
    let (ports, enough) = network::examine_ports(args.comm_ports, ranks);
    let kernels = args.gpu.map(kernels::examine);
    let are_right = kernels.as_ref().is_none_or(|(_, are_right)| *are_right);
    let healthy = role.is_ok() && is_found && enough && are_right;
    let sections = [
        ("place", Some(place)),
        ("network", network.map(|(lines, _)| Section::in_words(lines))),
        ("ports", Some(Section::in_words(vec![ports]))),
        ("machine", Some(machine::examine(ranks))),
        ("GPUs", Some(Section::in_words(gpu::examine()))),
        ("kernels", kernels.map(|(lines, _)| Section::in_words(lines))),
    ];
    Diagnosis { sources, sections, healthy }
}

/// Lines about this machine, shared by `ranks` ranks: cores, memory, and the instructions used.
pub fn machine(ranks: usize) -> Vec<String> {
    machine::examine(ranks).lines
}

/// Lines about GPUs and the libraries that a run on them needs.
pub fn gpus() -> Vec<String> {
    gpu::examine()
}

/// A line about the ports on which ranks listen for each other. An error if they do not suffice for `ranks`
/// ranks.
pub fn ports(ports: Ports, ranks: usize) -> Result<String, String> {
    match network::examine_ports(Some(ports), ranks) {
        (line, true) => Ok(line),
        (line, false) => Err(line),
    }
}

/// A line stating that rank 0, on this machine, could listen at the meeting point. An error if it could not.
pub fn can_listen(master: &Master) -> Result<String, String> {
    network::can_listen(master)
}

/// Returns `true` if no other machine can reach the meeting point.
pub fn is_loopback(master: &Master) -> bool {
    network::is_loopback(master)
}

/// The place of a process, from flags and variables alone.
struct Standing<'a> {
    place: Section,
    /// The meeting point of the ranks, and whether the master is to run on this machine.
    meeting_point: Option<(&'a Master, bool)>,
    /// Number of ranks on this machine.
    ranks: usize,
}

impl<'a> Standing<'a> {
    fn of(role: &'a Result<Role, EnvError>) -> Self {
        let (facts, lines, meeting_point, ranks) = match role {
            Err(error) => (json!({ "role": "unknown" }), vec![format!("unknown: {error}")], None, 1),
            Ok(Role::Alone(job)) => {
                let alone = "alone; ranks are threads of this process, as many as train.ranks says";
                let job_line = job.name.is_some().then(|| self::job(job));
                let facts = json!({ "role": "alone", "job": job.name, "restarts": job.restarts });
                (facts, [alone.to_owned()].into_iter().chain(job_line).collect(), None, 1)
            }
            Ok(Role::Rank(place)) => {
                let facts = json!({
                    "role": "rank",
                    "source": place.source.to_string(),
                    "rank": place.rank,
                    "world_size": place.world_size,
                    "local_rank": place.local_rank,
                    "local_world_size": place.local_world_size,
                    "node_rank": place.node_rank,
                    "node": place.node,
                    "master": address(&place.master),
                    "job": place.job.name,
                    "restarts": place.job.restarts,
                    "secret": place.secret.is_some(),
                });
                (facts, rank(place), Some((&place.master, place.rank == 0)), place.local_world_size)
            }
            Ok(Role::Node(node)) => {
                let facts = json!({
                    "role": "node",
                    "source": node.source.to_string(),
                    "node_rank": node.node_rank,
                    "nodes": node.nodes,
                    "nproc_per_node": node.nproc_per_node,
                    "max_restarts": node.max_restarts,
                    "master": address(&node.master),
                    "job": node.job.name,
                    "restarts": node.job.restarts,
                    "secret": node.secret.is_some(),
                });
                (facts, self::node(node), Some((&node.master, node.node_rank == 0)), node.nproc_per_node)
            }
        };
        Standing { place: Section::new(facts, lines), meeting_point, ranks }
    }
}

fn rank(place: &RankEnv) -> Vec<String> {
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
        format!("starts {}, again at most {}", ranks_of(node), number_of(node.max_restarts, "time")),
        master,
        job(&node.job),
        secret,
    ]
}

fn job(job: &Job) -> String {
    let name = job.name.as_deref().unwrap_or("without a name");
    format!("job {name}, restarted {}", number_of(job.restarts, "time"))
}

fn ranks_of(node: &Node) -> String {
    let ranks = number_of(node.nproc_per_node, "rank");
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
