//! Examines the machine and this process's place among the ranks, for `kiln doctor` and `kiln check`.

use std::ffi::OsStr;
use std::fs;
use std::time::Instant;

use clap::Args;
use kiln_collectives::tcp::Ports;
use kiln_model::ops;
use serde_json::{Map, Value, json};

use crate::findings::{Findings, Report, Stage};
use crate::network;
use kiln_config::Backend;
use kiln_config::device::{Memory, cores, parse_backend};
use kiln_launch::place::{self, EnvError, Flags, Job, Master, Node, PerGpu, RankEnv, Role, SECRET};
use kiln_sys::words::{number_of, size};
use kiln_train::kernels;
use kiln_train::process::output::print_line;
use kiln_train::version::version;

const ENV: Stage = Stage::Env;

const PROBLEM: u8 = 2;

/// Arguments of `kiln doctor`.
#[derive(Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    place: Flags,
    #[command(flatten)]
    machine: MachineArgs,
}

impl DoctorArgs {
    /// Examines the machine, and returns the exit code.
    pub fn run(&self) -> u8 {
        self.machine.run(&self.place)
    }
}

/// Arguments of an examination of the machine.
#[derive(Args)]
pub(crate) struct MachineArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Check that ranks can listen on these ports, as comm.ports names them.
    #[arg(long, value_name = "FIRST-LAST")]
    comm_ports: Option<Ports>,
    /// Compare every fused kernel with plain operations, on an NVIDIA GPU if there is one, else on the adapter
    /// that wgpu finds.
    #[arg(long, value_name = "auto|cuda|wgpu", num_args = 0..=1, default_missing_value = "auto")]
    #[arg(value_parser = parse_backend)]
    gpu: Option<Backend>,
}

impl MachineArgs {
    pub(crate) fn is_set(&self) -> bool {
        self.json || self.comm_ports.is_some() || self.gpu.is_some()
    }

    pub(crate) fn run(&self, flags: &Flags) -> u8 {
        let start = Instant::now();
        let mut findings = Findings::default();
        let (role, sources) = place::survey(flags, &place::environment);
        let lines = sources.iter().flat_map(|source| {
            let head = format!("{:9} {}", source.source.to_string(), source.verdict);
            let variables = source.found.iter().map(|(name, value)| format!("          {name}={value}"));
            std::iter::once(head).chain(variables)
        });
        findings.ok(ENV, "sources", lines.collect::<Vec<_>>().join("\n"));
        let (place, ranks) = place_of(&role, &mut findings);
        match self.comm_ports.map(|ports| network::ports(ports, ranks)) {
            Some(Ok(detail)) => findings.ok(ENV, "ports", detail),
            Some(Err(problem)) => findings.failed(ENV, "ports", problem),
            None => findings.ok(
                ENV,
                "ports",
                "ranks listen on any port that the system assigns, unless comm.ports is set, as a firewall may \
                 require; `kiln doctor --comm-ports 29600-29700` checks a range",
            ),
        }
        let is_alone = matches!(role, Err(_) | Ok(Role::Alone(_)));
        let machine = examine(ranks, if is_alone { 1 } else { ranks }, &mut findings);
        examine_gpus(&mut findings);
        match self.gpu.map(kernels::examine) {
            Some((lines, true)) => findings.ok(ENV, "kernels", lines.join("\n")),
            Some((lines, false)) => findings.failed(ENV, "kernels", lines.join("\n")),
            None => {}
        }
        let is_healthy = !findings.has_failed(ENV);
        if self.json {
            let source = |source: &place::Considered| {
                let variables: Map<String, Value> =
                    source.found.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
                json!({ "source": source.source.to_string(), "verdict": source.verdict, "variables": variables })
            };
            let mut report = json!({
                "version": version(),
                "healthy": is_healthy,
                "sources": sources.iter().map(source).collect::<Vec<_>>(),
                "place": place,
                "machine": machine,
            });
            for subject in ["place", "network", "ports", "machine", "GPUs", "kernels"] {
                let found = findings.0.iter().filter(|finding| finding.subject == subject);
                let texts = found.flat_map(|finding| [Some(&finding.detail), finding.fix.as_ref()]).flatten();
                let lines: Vec<_> = texts.flat_map(|text| text.lines()).collect();
                let section = &mut report[subject.to_lowercase()];
                if !lines.is_empty() {
                    section["lines"] = json!(lines);
                }
            }
            print_line(&format!("{report:#}"));
        } else {
            let report = Report { ranks: vec![(0, findings)], processes: false };
            print_line(&report.to_text(start.elapsed().as_secs_f64()));
        }
        if is_healthy { 0 } else { PROBLEM }
    }
}

/// Reports the cores, instructions and memory that `ranks` ranks in `processes` processes share; returns them as JSON.
pub(crate) fn examine(ranks: usize, processes: usize, findings: &mut Findings) -> Value {
    let cores = cores();
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let all = info.lines().filter(|line| line.starts_with("processor")).count();
    let mut lines = Vec::new();
    let of_ranks = number_of(ranks, "rank");
    if cores < all {
        let all = number_of(all, "core");
        lines.push(format!("{cores} of {all} for this process, exclusively or shared by {of_ranks}"));
    } else {
        let (threads, cores_here) = ((cores / ranks.max(1)).max(1), number_of(cores, "core"));
        lines.push(format!("{cores_here} for this process; {threads} for each of {of_ranks}"));
        if ranks > cores {
            lines.push(format!("more ranks than cores: {ranks} share {cores_here}"));
        }
    }
    let choice = std::env::var_os(ops::BF16_CHOICE).filter(|choice| !choice.is_empty());
    lines.push(bf16(ops::bf16_instructions(), choice.as_deref()));
    let memory = Memory::for_processes(processes.max(1));
    match memory {
        Some(Memory { total, free }) => {
            lines.push(format!("memory: {} of {} free, swap included", size(free), size(total)));
            findings.ok(ENV, "machine", lines.join("\n"));
        }
        None => {
            lines.push("memory: not reported by the system".to_owned());
            findings.warn(ENV, "machine", lines.join("\n"), "set device.memory to the size of the memory");
        }
    }
    json!({
        "cores": cores,
        "cores_of_machine": all.max(cores),
        "ranks": ranks,
        "bf16_instructions": ops::bf16_instructions(),
        "memory_bytes": memory.map(|memory| memory.total),
        "memory_free_bytes": memory.map(|memory| memory.free),
    })
}

#[cfg(feature = "cuda")]
pub(crate) fn examine_gpus(findings: &mut Findings) {
    findings.ok(ENV, "GPUs", kiln_config::device::examine().join("\n"));
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn examine_gpus(findings: &mut Findings) {
    const DRIVER: &str = "/proc/driver/nvidia/version";
    let driver = match fs::read_to_string(DRIVER) {
        Ok(text) => text.lines().next().unwrap_or_default().to_owned(),
        Err(_) => format!("none: there is no {DRIVER}"),
    };
    let program = kiln_config::device::DeviceError::NotBuilt;
    findings.ok(ENV, "GPUs", format!("program: {program}\ndriver: {driver}"));
}

/// Describes the instructions for bf16 products, and `choice`, the value of the variable that selects them.
fn bf16(instructions: Option<&str>, choice: Option<&OsStr>) -> String {
    let choice = choice.map(|choice| format!("{}={}", ops::BF16_CHOICE, choice.display()));
    match (instructions, choice) {
        (Some(name), None) => format!("bf16 products use {name}"),
        (Some(name), Some(choice)) => format!("bf16 products use {name} ({choice})"),
        (None, None) => {
            "this processor has no instructions for bf16 products, so they are computed in f32".to_owned()
        }
        (None, Some(choice)) => format!(
            "bf16 products are computed in f32: {choice} names no instructions that this \
             processor has; unset it to let Kiln choose"
        ),
    }
}

/// Reports the place and, given other ranks, the network. Returns the place as JSON, and the ranks on this machine.
fn place_of(role: &Result<Role, EnvError>, findings: &mut Findings) -> (Value, usize) {
    let (facts, lines, meeting_point, ranks) = match role {
        Err(error) => {
            findings.failed(ENV, "place", format!("unknown: {error}"));
            return (json!({ "role": "unknown" }), 1);
        }
        Ok(Role::Alone(job)) => {
            let alone = "alone; ranks are threads of this process, and train.ranks sets their number";
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
    findings.ok(ENV, "place", lines.join("\n"));
    if let Some((master, is_here)) = meeting_point {
        network::examine(master, is_here, findings);
    }
    (facts, ranks)
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
        (None, 1) => format!("secret: {SECRET} is not set; the launcher generates one for the ranks"),
        (secret, _) => self::secret(secret.is_some()),
    };
    vec![
        format!("node {} of {}, from {}", node.node_rank, node.nodes, node.source),
        format!(
            "starts {}, and restarts them at most {}",
            ranks_of(node),
            number_of(node.max_restarts, "time")
        ),
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
        Some(PerGpu::IfAny) => format!("one rank for each GPU, or {ranks} without a GPU"),
    }
}

fn secret(is_set: bool) -> String {
    match is_set {
        true => format!("secret: {SECRET} is set"),
        false => format!(
            "secret: {SECRET} is not set; ranks refuse to meet without it, except on a loopback address \
             or with comm.open = true. Set it to the same random text for every rank; `openssl rand \
             -hex 32` generates one"
        ),
    }
}

fn address(master: &Master) -> String {
    match master.host.contains(':') {
        true => format!("[{}]:{}", master.host, master.port),
        false => format!("{}:{}", master.host, master.port),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::bf16;

    #[test]
    fn bf16_variable_is_named() {
        assert_eq!(bf16(Some("AMX"), None), "bf16 products use AMX");
        let chosen = bf16(Some("AVX512-BF16"), Some(OsStr::new("avx512")));
        assert_eq!(chosen, "bf16 products use AVX512-BF16 (KILN_BF16=avx512)");
        let mistyped = bf16(None, Some(OsStr::new("axm")));
        assert!(mistyped.contains("KILN_BF16=axm names no instructions"), "{mistyped}");
        assert!(!bf16(None, None).contains("KILN_BF16"));
    }
}
