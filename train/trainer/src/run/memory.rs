//! Compares a run's planned memory with the available memory, and refuses a run that cannot fit.
//! A run that exhausts the memory reports the owners before the kernel would kill the process silently.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::process;
use std::sync::OnceLock;

use crate::error::MemoryError;
use crate::process::keep;
use crate::process::launcher::{self, Message};
use crate::process::output::{self, eprint_line};
use burn::tensor::Device;
use kiln_model::layers::Layers;
use kiln_model::{Decoder, Key, ModelConfig};
use kiln_shard::{Accumulate, Optimizer, Recompute, Strategy};

use kiln_config::device::{self, Memory, ResolvedDevice};
use kiln_config::{Choice, Config, Precision};
use kiln_launch::place::RankEnv;
use kiln_plan::{GATHERED, Gathers, MARGIN, PlannedStep, RankShape, Speed, beside_blocks, not_described};
use kiln_sys::words::size;

const MACHINE: &str = "this machine";
const PROCESS: &str = "the address space of this process (ulimit -v)";
const GPU: &str = "the GPU";

/// Smallest share of its planned memory that a run may actually need; for GPUs, an estimate without measurements.
const ALLOWANCE: f64 = 0.98;
const GPU_ALLOWANCE: f64 = 0.85;

static HELPS: OnceLock<String> = OnceLock::new();

/// Memory of a process outside of its ranks and their heaps, in bytes.
const SPARE: u64 = 40 << 20;

const FAILED: i32 = 1;

/// Warnings of a check, none of which prevents the run.
pub type Warnings = Vec<String>;

/// A run to be checked. Its configuration is separate, because it varies when alternatives are tried.
#[derive(Clone, Copy)]
struct Run<'a> {
    model: &'a ModelConfig,
    decoder: &'a Decoder,
    optimizer: &'a Optimizer,
    on_gpu: bool,
    /// Number of ranks that are processes on this machine; `None` if ranks are threads.
    processes: Option<usize>,
}

struct Need {
    bytes: u64,
    /// Bytes by owner, such as gradients, summed over all ranks that share the memory.
    rows: Vec<(&'static str, u64)>,
    /// Layers whose memory is only a guess.
    undescribed: BTreeSet<&'static str>,
}

struct Needs {
    computing: Need,
    /// Host memory for offloaded tensors while a GPU computes.
    offloaded: Need,
}

impl<'a> Run<'a> {
    fn new(
        model: &'a ModelConfig,
        decoder: &'a Decoder,
        optimizer: &'a Optimizer,
        device: &ResolvedDevice,
        place: Option<&RankEnv>,
    ) -> Self {
        let processes = place.map(|place| place.local_world_size);
        Run { model, decoder, optimizer, on_gpu: device.is_gpu(), processes }
    }

    /// Returns the memory that `config` needs, or `None` if its ranks do not fit its sharding strategy.
    fn needs(&self, config: &Config) -> Option<Needs> {
        let Run { model, decoder, optimizer, on_gpu, processes } = *self;
        let mut config = config.clone();
        let hybrid = config.shard.strategy.is_hybrid();
        if hybrid && config.shard.shard_size.is_none() {
            // The group size depends on machines: with one group of all ranks, each rank holds the least.
            config.shard.shard_size = Some(config.train.ranks.max(1));
        }
        let gathers = if processes.is_some() { Gathers::Pooled } else { Gathers::Shared };
        let shape = RankShape::from_config(&config, model, decoder, optimizer, gathers, !on_gpu).ok()?;
        let step = shape.step(&Speed::INSTANT);
        // Each rank that is a process has its own GPU.
        let here = processes.unwrap_or(config.train.ranks).max(1) as u64;
        let sharing = if on_gpu && processes.is_some() { 1 } else { here };
        // Ranks that are threads on the host share one gathered copy per shard group.
        let gathering = match gathers {
            Gathers::Shared if !on_gpu => shape.mesh.replicate_size() as u64,
            _ => sharing,
        };
        let processes = if on_gpu { 0 } else { processes.map_or(1, |_| here) };
        let offloaded =
            step.offloaded.owners.iter().map(|(owner, bytes)| (*owner, bytes.saturating_mul(here)));
        Some(Needs {
            computing: Need::of(&step, sharing, gathering, processes),
            offloaded: Need::from_rows(offloaded.collect()),
        })
    }

    fn fits(&self, config: &Config, memory: u64) -> Option<(bool, u64)> {
        let needs = self.needs(config)?;
        Some((needs.computing.bytes <= memory, needs.computing.bytes))
    }
}

impl Need {
    fn of(step: &PlannedStep, ranks: u64, gathering: u64, processes: u64) -> Self {
        let of_all = |(owner, bytes): &(&'static str, u64)| {
            let copies = if *owner == GATHERED { gathering } else { ranks };
            (*owner, bytes.saturating_mul(copies))
        };
        let mut rows: Vec<_> = step.peak.owners.iter().map(of_all).collect();
        let counted = rows.iter().fold(0, |sum: u64, row| sum.saturating_add(row.1));
        if processes > 0 {
            rows.push(("the process, and pages between blocks", beside_blocks(counted, processes)));
        }
        if step.reserved > 0 {
            rows.push(("pages of the GPU that are not full", step.kept().saturating_mul(ranks)));
        }
        Need { undescribed: step.undescribed.clone(), ..Need::from_rows(rows) }
    }

    fn from_rows(rows: Vec<(&'static str, u64)>) -> Self {
        let bytes = rows.iter().fold(0, |sum: u64, row| sum.saturating_add(row.1));
        Need { bytes, rows, undescribed: BTreeSet::new() }
    }
}

/// Compares a run's planned memory with that of this machine or its GPU. `decoder` is built from `model`.
/// Returns warnings if the run fits into the memory, but not into the part that is free now.
///
/// # Errors
///
/// If the run needs more memory than there is.
pub fn check(
    config: &Config,
    model: &ModelConfig,
    decoder: &Decoder,
    optimizer: &Optimizer,
    device: &ResolvedDevice,
    place: Option<&RankEnv>,
) -> Result<Warnings, MemoryError> {
    let run = Run::new(model, decoder, optimizer, device, place);
    let Some(needs) = run.needs(config) else { return Ok(Warnings::new()) };
    let [computing, host] = memories(config, device, run.processes);
    let mut warnings = Warnings::new();
    for ((place, memory), need) in [computing, host].into_iter().zip([needs.computing, needs.offloaded]) {
        if let Some(memory) = memory.filter(|_| need.bytes > 0) {
            warnings.extend(compare(&run, place, &need, memory, config)?);
        }
    }
    Ok(warnings)
}

/// Returns the memory that a run may use on the device that computes and on the host, with their names.
fn memories(
    config: &Config,
    device: &ResolvedDevice,
    processes: Option<usize>,
) -> [(&'static str, Option<Memory>); 2] {
    let fraction = config.device.memory_fraction.unwrap_or(1.0);
    let of = |memory: Memory| {
        let total = (memory.total as f64 * fraction) as u64;
        Memory { total, free: memory.free.min(total) }
    };
    let given = config.device.memory.map(|size| Memory { total: size.0, free: size.0 });
    let host = Memory::for_processes(processes.unwrap_or(1).max(1));
    let total = |memory: Option<Memory>| memory.map(|memory| memory.total);
    let is_limited = total(host) < total(Memory::for_machine());
    let of_host = if is_limited { PROCESS } else { MACHINE };
    let computing = if device.is_gpu() { (GPU, device.gpu_memory()) } else { (of_host, host) };
    [computing, (of_host, host)].map(|(place, memory)| (place, given.or(memory).map(of)))
}

/// Returns the configured recomputation or, with `auto`, the least that is planned to fit with a margin.
pub fn settle_recompute(
    config: &Config,
    model: &ModelConfig,
    decoder: &Decoder,
    optimizer: &Optimizer,
    device: &ResolvedDevice,
    place: Option<&RankEnv>,
) -> Recompute {
    if let Choice::Is(recompute) = config.shard.recompute {
        return recompute;
    }
    let run = Run::new(model, decoder, optimizer, device, place);
    let [(_, memory), _] = memories(config, device, run.processes);
    let Some(memory) = memory else { return Recompute::None };
    let usable = memory.free.min((memory.total as f64 * (1.0 - MARGIN)) as u64);
    let fits = |recompute: &Recompute| {
        let mut config = config.clone();
        config.shard.recompute = (*recompute).into();
        run.fits(&config, usable).is_none_or(|(fits, _)| fits)
    };
    [Recompute::None, Recompute::Selective].into_iter().find(fits).unwrap_or(Recompute::Block)
}

pub(super) fn limit(
    config: &Config,
    model: &ModelConfig,
    layers: &Layers,
    optimizer: &Optimizer,
    device: &ResolvedDevice,
    place: Option<&RankEnv>,
) {
    if device.is_gpu() {
        return;
    }
    let decoder = Decoder::new(layers, model, Key::new(0), &device::plain());
    let Ok(decoder) = decoder else { return };
    let helps = what_helps(config, model, &decoder, optimizer, false, place);
    let processes = place.map_or(1, |place| place.local_world_size.max(1));
    // Below an address space limit, an allocation fails before the process would be killed.
    let Some(machine) = Memory::for_machine() else { return };
    let share = config.device.memory_fraction.unwrap_or(1.0) / processes as f64;
    // Cached file pages and the kernel's pages count as well.
    let bytes = machine.total as f64 * share - SPARE as f64;
    let _ = HELPS.set(helps);
    kiln_shard::memory::limit(bytes.max(1.0) as usize, report_exhausted);
}

fn report_exhausted(text: &str) {
    let helps = HELPS.get().map_or("", String::as_str);
    keep(text, |folder| {
        let known = folder.map_or_else(String::new, |folder| format!("crash report: {}\n", folder.display()));
        eprint_line(&format!(
            "error: {text}\n{known}What would help:\n{helps}more: kiln explain out-of-memory"
        ));
    });
    launcher::send(Message::Failure, text.lines().next().unwrap_or(text));
    output::finish();
    process::exit(FAILED);
}

fn what_helps(
    config: &Config,
    model: &ModelConfig,
    decoder: &Decoder,
    optimizer: &Optimizer,
    on_gpu: bool,
    place: Option<&RankEnv>,
) -> String {
    let processes = place.map(|place| place.local_world_size);
    let run = Run { model, decoder, optimizer, on_gpu, processes };
    match run.needs(config) {
        Some(needs) => helps(&run, config, needs.computing.bytes, 0),
        None => String::new(),
    }
}

/// Checks that training `decoder`, built from `model`, fits into memory. Warns if it exceeds the free memory.
///
/// # Errors
///
/// If it needs more memory than there is, or than `device.memory` allows.
pub fn check_decoder(
    config: &Config,
    model: &ModelConfig,
    decoder: &Decoder,
    optimizer: &Optimizer,
    device: &ResolvedDevice,
    place: Option<&RankEnv>,
) -> Result<(), MemoryError> {
    for warning in check(config, model, decoder, optimizer, device, place)? {
        tracing::warn!("{warning}");
    }
    Ok(())
}

/// Lays out the GPU's memory for steps of `config`, before this rank allocates there. Does nothing on the host.
pub fn lay_out_memory(
    config: &Config,
    model: &ModelConfig,
    decoder: &Decoder,
    optimizer: &Optimizer,
    device: &Device,
) {
    // A configuration whose ranks do not fit its sharding strategy fails elsewhere, with a reason.
    if let Ok(shape) = RankShape::from_config(config, model, decoder, optimizer, Gathers::Pooled, false) {
        kiln_shard::lay_out_pages(device, shape.step(&Speed::INSTANT).largest);
    }
}

/// Returns the planned bytes of this machine's ranks on the device that computes, if the ranks can be arranged.
pub fn needed_bytes(
    config: &Config,
    model: &ModelConfig,
    decoder: &Decoder,
    optimizer: &Optimizer,
    device: &ResolvedDevice,
    place: Option<&RankEnv>,
) -> Option<u64> {
    let run = Run::new(model, decoder, optimizer, device, place);
    run.needs(config).map(|needs| needs.computing.bytes)
}

fn compare(
    run: &Run<'_>,
    place: &'static str,
    need: &Need,
    memory: Memory,
    config: &Config,
) -> Result<Option<String>, MemoryError> {
    let allowance = if place == GPU { GPU_ALLOWANCE } else { ALLOWANCE };
    let at_least = (need.bytes as f64 * allowance) as u64;
    if need.bytes <= memory.free {
        return Ok(None);
    }
    if at_least <= memory.total && config.device.memory_fraction.is_none() {
        let why = match at_least <= memory.free {
            true => "That is close: the run may be killed",
            false => "Other programs use the rest. If it is not freed soon, the run may be killed",
        };
        return Ok(Some(format!(
            "this run takes {} of memory, and {}. {why}",
            size(need.bytes),
            match config.device.memory {
                Some(_) => format!("device.memory is {}", size(memory.total)),
                None => format!("{place} has {} free of {}", size(memory.free), size(memory.total)),
            }
        )));
    }
    let there = match (config.device.memory, config.device.memory_fraction) {
        (None, None) => format!("{place} has {}", size(memory.total)),
        (Some(_), None) => format!("device.memory is {}", size(memory.total)),
        (_, Some(share)) => format!("device.memory_fraction = {share} leaves the run {}", size(memory.total)),
    };
    let mut table = String::new();
    for (what, bytes) in need.rows.iter().filter(|row| row.1 > need.bytes / 1000) {
        let _ = writeln!(table, "  {:>12}  {what}", size(*bytes));
    }
    if !need.undescribed.is_empty() {
        let _ = writeln!(table, "{}.", not_described(&need.undescribed));
    }
    let helps = helps(run, config, need.bytes, memory.total);
    Err(MemoryError { needed: need.bytes, there, table, helps })
}

struct Change {
    text: String,
    config: Config,
}

const TOLD: usize = 3;

/// Lists changes that make a run fit into `memory`: sufficient ones, or a combination and the most helpful ones.
fn helps(run: &Run<'_>, config: &Config, needed: u64, memory: u64) -> String {
    let mut helps = String::new();
    let mut tell = |change: &Change, bytes: u64| {
        let _ = writeln!(
            helps,
            "  --set {}: takes {}, saves {}",
            change.text,
            size(bytes),
            size(needed.saturating_sub(bytes))
        );
    };
    let mut tried: Vec<_> = changes(config, run.on_gpu)
        .into_iter()
        .filter_map(|change| {
            let (fits, bytes) = run.fits(&change.config, memory)?;
            (bytes < needed).then_some((fits, bytes, change))
        })
        .collect();
    let mut enough = tried.iter().any(|(fits, ..)| *fits);
    if memory > 0
        && !enough
        && let Some((change, bytes)) = together(run, config, memory)
    {
        enough = true;
        tell(&change, bytes);
    }
    // A stable sort: among the changes that fit, the cheapest stays first.
    tried.sort_by_key(|(fits, bytes, _)| (!fits, if *fits { 0 } else { *bytes }));
    for (_, bytes, change) in tried.iter().take(TOLD) {
        tell(change, *bytes);
    }
    let more = match run.on_gpu {
        true => "  more ranks, each with its share, or a smaller model\n",
        false => "  more machines, whose ranks take a share, or a smaller model\n",
    };
    let all = if memory > 0 && !enough { "  no combination of settings is enough:\n" } else { "" };
    format!("{all}{helps}{more}")
}

fn together(run: &Run<'_>, config: &Config, memory: u64) -> Option<(Change, u64)> {
    let mut all = Change { text: String::new(), config: config.clone() };
    for _ in 0..64 {
        let next = changes(&all.config, run.on_gpu).into_iter().filter_map(|change| {
            let (fits, bytes) = run.fits(&change.config, memory)?;
            Some((fits, bytes, change))
        });
        let (fits, bytes, change) = next.min_by_key(|(fits, bytes, _)| (!fits, *bytes))?;
        let (_, before) = run.fits(&all.config, memory)?;
        if bytes >= before {
            return None;
        }
        all = Change { text: joined(&all.text, &change.text), config: change.config };
        if fits {
            return Some((all, bytes));
        }
    }
    None
}

/// Joins the settings of both texts; a later setting replaces an earlier one of the same key.
fn joined(before: &str, after: &str) -> String {
    let key = |setting: &str| setting.split('=').next().unwrap_or_default().to_owned();
    let mut settings: Vec<&str> = before.split(" --set ").filter(|setting| !setting.is_empty()).collect();
    for setting in after.split(" --set ") {
        settings.retain(|earlier| key(earlier) != key(setting));
        settings.push(setting);
    }
    settings.join(" --set ")
}

fn changes(config: &Config, on_gpu: bool) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut change = |text: String, change: &dyn Fn(&mut Config)| {
        let mut config = config.clone();
        change(&mut config);
        changes.push(Change { text, config });
    };
    let ranks = config.train.ranks.max(1);
    let replicates = !matches!(config.shard.strategy, Strategy::FullShard);
    if ranks > 1 && replicates {
        // An existing group size would belong to a different strategy.
        let size =
            config.shard.shard_size.map_or_else(String::new, |_| format!(" --set shard.shard_size={ranks}"));
        change(format!("shard.strategy=FULL_SHARD{size}"), &|config| {
            (config.shard.strategy, config.shard.shard_size) = (Strategy::FullShard, None);
        });
    }
    let sequences = (config.train.global_batch / ranks).max(1);
    let micro_batch = config.micro_batch();
    let smaller = (1..micro_batch.min(1 << 20)).rev().find(|size| sequences.is_multiple_of(*size));
    if let Some(smaller) = smaller {
        change(format!("train.micro_batch={smaller}"), &|config| {
            config.train.micro_batch = Choice::Is(smaller);
        });
    }
    if sequences > micro_batch && micro_batch > 0 {
        // A step of one micro-batch accumulates no gradients.
        change(format!("train.micro_batch={sequences}"), &|config| {
            config.train.micro_batch = Choice::Is(sequences);
        });
    }
    let recompute = config.shard.recompute();
    for more in [Recompute::Selective, Recompute::Block] {
        if recompute == Recompute::None || (more == Recompute::Block && recompute != Recompute::Block) {
            change(format!("shard.recompute={more}"), &|config| config.shard.recompute = more.into());
        }
    }
    if sequences > micro_batch && micro_batch > 0 {
        if config.shard.accumulate() == Accumulate::Unsharded {
            change("shard.accumulate=sharded".to_owned(), &|config| {
                config.shard.accumulate = Some(Accumulate::Sharded);
            });
        }
        // With one micro-batch per step, no gradient of earlier micro-batches is kept.
        let batch = ranks.saturating_mul(micro_batch);
        change(format!("train.global_batch={batch}"), &|config| config.train.global_batch = batch);
    }
    if config.precision.compute() == Precision::F32 && !on_gpu {
        change("precision.compute=bf16".to_owned(), &|config| {
            config.precision.compute = Choice::Is(Precision::Bf16);
        });
    }
    if on_gpu && !config.shard.offload && config.precision.compute() != Precision::F16 {
        change("shard.offload=true".to_owned(), &|config| config.shard.offload = true);
    }
    if config.data.seq_len > 128 {
        let half = config.data.seq_len / 2;
        // An unset micro-batch would hold twice as many sequences.
        let text = format!("data.seq_len={half} --set train.micro_batch={micro_batch}");
        change(text, &|config| config.data.seq_len = half);
    }
    changes
}
