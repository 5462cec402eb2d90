//! The stage `env`: configuration, rank and place of this process, secret, ports, device, memory and run
//! folder.

use std::path::{Path, PathBuf};

use kiln_collectives::tcp::JoinError;

use super::arguments::CheckArgs;
use super::report::{Checks, Stage};
use crate::doctor;
use kiln_config::device::{Memory, ResolvedDevice};
use kiln_config::{self as config, Backend, CommBackend, Config};
use kiln_launch::place::{Master, RankEnv};
use kiln_sys::words::number_of;
use kiln_sys::words::size;
use kiln_train::registry::Registry;
use kiln_train::run::{self, RunOptions};

const ENV: Stage = Stage::Env;

/// Facts about the run that this process would start.
pub(super) struct Setup {
    /// The configuration, with the actual number of ranks.
    pub(super) config: Config,
    pub(super) options: RunOptions,
    pub(super) device: Option<ResolvedDevice>,
    /// The run folder: its configured path and the path it resolves to.
    pub(super) out: Option<(PathBuf, PathBuf)>,
    /// The checkpoint to resume from.
    pub(super) resume: Option<PathBuf>,
    /// Set if the ranks could connect, as far as this process can determine.
    pub(super) meets: bool,
}

/// Checks everything that is known before data is read. Returns `None` if the configuration is unusable.
pub(super) fn examine(
    args: &CheckArgs,
    registry: &Registry,
    place: Option<RankEnv>,
    checks: &mut Checks,
) -> Option<Setup> {
    let loaded = config::load(&args.config, &args.overrides);
    let config = checks.take(ENV, "configuration", loaded)?;
    let options = checks.take(ENV, "arguments", args.options(registry, place))?;
    let meets = meeting_point(&config, &options, checks);
    let config = checks.take(ENV, "configuration", run::with_ranks(config, &options))?;
    checks.ok(
        ENV,
        "configuration",
        format!(
            "{}: {}, {} of {} in {}",
            args.config.display(),
            number_of(config.train.ranks, "rank"),
            number_of(config.train.global_batch, "sequence"),
            number_of(config.data.seq_len, "token"),
            number_of(config.train.steps, "step")
        ),
    );
    let place = options.place.as_ref();
    let device = ResolvedDevice::new(&config, registry.layers(), place);
    let device = checks.take(ENV, "device", device);
    machine(&config, device.as_ref(), place, checks);
    let found = checks.take(ENV, "run folder", run::find_folder(&config, &options));
    let (mut out, mut resume) = (None, None);
    if let Some(found) = found {
        resume = found.resume;
        out = writable(&found.out, checks).then_some((found.named, found.out));
    }
    Some(Setup { config, options, device, out, resume, meets })
}

/// Checks place, secret and ports. Returns whether the ranks could connect.
fn meeting_point(config: &Config, options: &RunOptions, checks: &mut Checks) -> bool {
    let Some(place) = &options.place else {
        checks.ok(ENV, "place", "alone: ranks are threads of this process");
        return true;
    };
    let RankEnv { rank, world_size, node, source, master, .. } = place;
    checks.ok(
        ENV,
        "place",
        format!(
            "one of {world_size} ranks, from {source}; {} on {node}",
            number_of(place.local_world_size, "rank")
        ),
    );
    if config.comm.backend == CommBackend::Mpi {
        // MPI connects the ranks itself.
        return true;
    }
    let mut meets = true;
    if place.secret.is_none() && !config.comm.open && !doctor::is_loopback(master) {
        checks.failed(ENV, "secret", JoinError::OpenSecret { rank: *rank, host: master.host.clone() });
        meets = false;
    }
    if *rank == 0 {
        meets &= ports(config, place, master, checks);
    }
    meets
}

/// Checks the ports on rank 0's machine. On other machines, ranks may have opened theirs already.
fn ports(config: &Config, place: &RankEnv, master: &Master, checks: &mut Checks) -> bool {
    let mut lines = Vec::new();
    if master.port != 0 {
        lines.push(doctor::can_listen(master));
    }
    lines.extend(config.comm.ports.map(|ports| doctor::ports(ports, place.local_world_size)));
    let mut free = true;
    for line in lines {
        match line {
            Ok(line) => checks.ok(ENV, "ports", line),
            Err(line) => {
                checks.failed(ENV, "ports", line);
                free = false;
            }
        }
    }
    free
}

/// Checks device, memory and instruction sets. Facts about the machine are reported once per machine.
fn machine(config: &Config, device: Option<&ResolvedDevice>, place: Option<&RankEnv>, checks: &mut Checks) {
    if let Some(device) = device {
        let text = device.describe();
        checks.ok(ENV, "device", text.strip_prefix("device: ").unwrap_or(&text));
    }
    if place.is_some_and(|place| place.local_rank != 0) {
        return;
    }
    let ranks = place.map_or(config.train.ranks, |place| place.local_world_size);
    let on_gpu = device.map_or(config.device.backend == Backend::Cuda, ResolvedDevice::is_gpu);
    let mut lines = doctor::machine(ranks);
    // Memory is reported below.
    lines.retain(|line| !line.starts_with("memory"));
    checks.ok(ENV, "machine", lines.join("; "));
    if on_gpu {
        checks.ok(ENV, "libraries", doctor::gpus().join("\n"));
    }
    match Memory::of_processes(place.map_or(1, |place| place.local_world_size.max(1))) {
        Some(Memory { total, free }) => {
            checks.ok(ENV, "memory", format!("{} of {} free, swap included", size(free), size(total)));
        }
        None => checks.warn(ENV, "memory", "the system does not say", "set device.memory to what there is"),
    }
}

/// The nearest existing folder: the run folder `out` itself, or one of its ancestors.
pub(super) fn nearest(out: &Path) -> &Path {
    let is_there = |path: &&Path| path.as_os_str().is_empty() || path.is_dir();
    match out.ancestors().find(is_there) {
        Some(path) if !path.as_os_str().is_empty() => path,
        _ => Path::new("."),
    }
}

/// Prefix of the names of temporary files and folders of a check.
pub(super) const PREFIX: &str = ".kiln-check-";

/// Checks that the run folder, or the place where it will be, is writable.
fn writable(out: &Path, checks: &mut Checks) -> bool {
    let place = nearest(out);
    // No folder can be created below a file.
    let blocked = out.ancestors().find(|path| path.exists() && !path.is_dir());
    let tried = match blocked {
        Some(file) => Err(format!("{} is a file", file.display())),
        None => tempfile::Builder::new()
            .prefix(PREFIX)
            .tempfile_in(place)
            .map(drop)
            .map_err(|error| format!("nothing can be written to {}: {error}", place.display())),
    };
    match &tried {
        Ok(()) if place == out => checks.ok(ENV, "run folder", format!("{} is there", out.display())),
        Ok(()) => checks.ok(ENV, "run folder", format!("{} can be made", out.display())),
        Err(problem) => {
            let mend = "check the permissions and the disk there, or choose another folder with --out";
            checks.fail(ENV, "run folder", problem, mend);
        }
    }
    tried.is_ok()
}
