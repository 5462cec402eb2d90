//! The stage `env`: configuration, place of this process, secret, ports, machine, device and run folder.

use std::path::{Path, PathBuf};

use kiln_collectives::tcp::JoinError;

use super::arguments::CheckArgs;
use crate::findings::{Findings, Stage};
use crate::{machine, network};
use kiln_config::device::ResolvedDevice;
use kiln_config::{self as config, Backend, CommBackend, Config};
use kiln_launch::place::RankEnv;
use kiln_sys::words::number_of;
use kiln_train::registry::Registry;
use kiln_train::run::{self, CHECK_PREFIX, RunOptions};

const ENV: Stage = Stage::Env;

pub(super) struct Setup {
    pub(super) config: Config,
    pub(super) options: RunOptions,
    pub(super) device: Option<ResolvedDevice>,
    pub(super) out: Option<(PathBuf, PathBuf)>,
    pub(super) resume: Option<PathBuf>,
    /// True if, as far as this process can determine, the ranks could connect.
    pub(super) meets: bool,
}

/// Checks everything that is known before data is read. Returns `None` if the configuration is unusable.
pub(super) fn examine(
    args: &CheckArgs,
    path: &Path,
    registry: &Registry,
    place: Option<RankEnv>,
    findings: &mut Findings,
) -> Option<Setup> {
    let loaded = config::load(path, &args.overrides);
    let config = findings.take(ENV, "configuration", loaded)?;
    let options = findings.take(ENV, "arguments", args.options(path, registry, place))?;
    let meets = meeting_point(&config, &options, findings);
    let config = findings.take(ENV, "configuration", run::with_ranks(config, &options))?;
    findings.ok(
        ENV,
        "configuration",
        format!(
            "{}: {}, {} of {} in {}",
            path.display(),
            number_of(config.train.ranks, "rank"),
            number_of(config.train.global_batch, "sequence"),
            number_of(config.data.seq_len, "token"),
            number_of(config.train.steps, "step")
        ),
    );
    let place = options.place.as_ref();
    let device = ResolvedDevice::new(&config, registry.layers(), place);
    let device = findings.take(ENV, "device", device);
    if let Some(device) = &device {
        let text = device.describe();
        findings.ok(ENV, "device", text.strip_prefix("device: ").unwrap_or(&text));
    }
    if place.is_none_or(|place| place.local_rank == 0) {
        let processes = place.map_or(1, |place| place.local_world_size);
        machine::examine(place.map_or(config.train.ranks, |_| processes), processes, findings);
        if device.as_ref().map_or(config.device.backend == Backend::Cuda, ResolvedDevice::is_gpu) {
            machine::examine_gpus(findings);
        }
    }
    let found = findings.take(ENV, "run folder", run::find_folder(&config, &options));
    let (mut out, mut resume) = (None, None);
    if let Some(found) = found {
        resume = found.resume;
        out = writable(&found.out, findings).then_some((found.named, found.out));
    }
    Some(Setup { config, options, device, out, resume, meets })
}

fn meeting_point(config: &Config, options: &RunOptions, findings: &mut Findings) -> bool {
    let Some(place) = &options.place else {
        findings.ok(ENV, "place", "alone; ranks are threads of this process");
        return true;
    };
    let RankEnv { rank, world_size, node, source, master, .. } = place;
    findings.ok(
        ENV,
        "place",
        format!(
            "one of {world_size} ranks, from {source}; {} on {node}",
            number_of(place.local_world_size, "rank")
        ),
    );
    if config.comm.backend == CommBackend::Mpi {
        return true;
    }
    let mut meets = true;
    if place.secret.is_none() && !config.comm.open && !network::is_loopback(master) {
        findings.failed(ENV, "secret", JoinError::OpenSecret { rank: *rank, host: master.host.clone() });
        meets = false;
    }
    // Only the ports of rank 0's machine are checked: on other machines, ranks may be using their ports already.
    if *rank == 0 {
        let mut results = Vec::new();
        if master.port != 0 {
            results.push(network::can_listen(master));
        }
        results.extend(config.comm.ports.map(|ports| network::ports(ports, place.local_world_size)));
        for result in results {
            match result {
                Ok(detail) => findings.ok(ENV, "ports", detail),
                Err(problem) => {
                    findings.failed(ENV, "ports", problem);
                    meets = false;
                }
            }
        }
    }
    meets
}

pub(super) fn nearest(out: &Path) -> &Path {
    let is_there = |path: &&Path| path.as_os_str().is_empty() || path.is_dir();
    match out.ancestors().find(is_there) {
        Some(path) if !path.as_os_str().is_empty() => path,
        _ => Path::new("."),
    }
}

fn writable(out: &Path, findings: &mut Findings) -> bool {
    let place = nearest(out);
    let blocked = out.ancestors().find(|path| path.exists() && !path.is_dir());
    let tried = match blocked {
        Some(file) => Err(format!("{} is a file", file.display())),
        None => tempfile::Builder::new()
            .prefix(CHECK_PREFIX)
            .tempfile_in(place)
            .map(drop)
            .map_err(|error| format!("nothing can be written to {}: {error}", place.display())),
    };
    match &tried {
        Ok(()) if place == out => findings.ok(ENV, "run folder", format!("{} exists", out.display())),
        Ok(()) => findings.ok(ENV, "run folder", format!("{} can be created", out.display())),
        Err(problem) => {
            let fix = "check the permissions and the disk there, or choose another folder with --out";
            findings.fail(ENV, "run folder", problem, fix);
        }
    }
    tried.is_ok()
}
