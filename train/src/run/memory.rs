//! The least memory that a run takes, against the memory that there is: a run that cannot fit is refused
//! before anything is allocated, instead of being killed later.
//!
//! [`LeastMemory`] is a lower bound, not a plan: it counts what every run of this shape is sure to hold
//! at one moment, and no more. A run may take several times as much.

use std::fmt::Write as _;

use kiln_model::{Decoder, FULL_ATTENTION, ModelConfig, SWIGLU};
use kiln_shard::{Mesh, Optimizer, Recompute, Reshard, Strategy};

use crate::config::{CROSS_ENTROPY, Config, Precision};
use crate::device::{Memory, ResolvedDevice};
use crate::place::RankEnv;
use crate::sharded::{Shapes, module_shapes};

/// Bytes of a weight, a gradient or a moment of it at rest.
const F32: u64 = 4;

/// Whose memory it is, for people.
const MACHINE: &str = "this machine";
const GPU: &str = "the GPU";

/// Something that takes memory, in words.
type What = &'static str;

const WEIGHTS: What = "weights, f32";
const MOMENTS: What = "two moments of each weight, f32";
/// Of optimizers that keep something else than two values of each weight.
const OTHER_STATE: What = "optimizer state, f32";
const GRADIENTS: What = "gradients, f32";
/// Gradients of earlier micro-batches add up unsharded.
const WHOLE_GRADIENTS: What = "gradients of earlier micro-batches, f32, not sharded";
/// The shard that gathers start from, while the weights are offloaded.
const WORKING_WEIGHTS: What = "weights in the compute dtype";
const GATHERED_WEIGHTS: What = "gathered weights";
const BLOCK_INPUTS: What = "the input of every block";
/// What backward reads of a built-in block besides its input.
const BLOCK_ACTIVATIONS: What = "queries, keys, values, gates and their products of every block";
const TOKENS: What = "tokens";
/// The fused cross-entropy never has them whole; another loss does.
const LOGITS: What = "logits for loss.kind, f32";

/// What a rank holds at one moment: something, and its bytes.
type Row = (What, u64);

/// The least memory that each rank of a run takes at its peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeastMemory {
    /// Where the ranks compute.
    computing: Vec<Row>,
    /// On the host, while a GPU computes.
    offloaded: Vec<Row>,
}

/// A run that cannot fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this run takes at least {} of memory, and {there}:\n{table}What would help: {}.\n\
     If there is more memory than that, say so: --set device.memory={}GiB",
    size(*.needed), .helps.join("; "), .needed.div_ceil(1 << 30)
)]
pub struct MemoryError {
    needed: u64,
    /// What has how much.
    there: String,
    table: String,
    helps: Vec<String>,
}

impl LeastMemory {
    /// The least memory of a rank that trains `model` by `optimizer`, as `config` says. `modules` has the
    /// parameters of the model's parts: the embedding, the blocks, the head. On a GPU, some of it may be
    /// offloaded. Of blocks that are not `built_in` it is only known that they keep their input.
    pub fn of_run(
        config: &Config,
        model: &ModelConfig,
        modules: &[Shapes],
        optimizer: &Optimizer,
        on_gpu: bool,
        built_in: bool,
    ) -> Self {
        let (shard, train) = (&config.shard, &config.train);
        let micro_batch = config.micro_batch();
        // The groups of a hybrid strategy may not be known yet; then no rank can have less than this.
        let ranks = train.ranks.max(1);
        let mesh = Mesh::new(shard.strategy, ranks, shard.shard_size);
        let shards = mesh.map_or(ranks, |mesh| mesh.shard_size()) as u64;
        let is_frozen = |name: &str| train.freeze.iter().any(|prefix| name.starts_with(prefix.as_str()));
        let trainable = |module: &Shapes| {
            numel(module.iter().filter(|(name, _)| !is_frozen(name)).map(|(_, shape)| shape))
        };
        let whole = |module: &Shapes| numel(module.iter().map(|(_, shape)| shape));
        let all = modules.iter().map(whole).fold(0, u64::saturating_add);
        let trained = modules.iter().map(trainable).fold(0, u64::saturating_add);
        let at_rest = |numel: u64, width: u64| (numel / shards).saturating_mul(width);

        let width = match config.precision.compute() {
            Precision::F32 => F32,
            Precision::Bf16 | Precision::F16 => 2,
        };
        let offloads = on_gpu && shard.offload;
        // Where a rank has all weights in the dtype that it computes in, it reads them in place.
        let communicates_alone = shard.communicate_alone && shard.strategy != Strategy::NoShard;
        let in_place = shards == 1 && !(ranks == 1 && communicates_alone) && (width == F32 || offloads);
        let stay = match shard.reshard {
            Reshard::Always => false,
            Reshard::Never => true,
            Reshard::Default => !matches!(shard.strategy, Strategy::FullShard | Strategy::HybridShard),
        };
        let gathered = match modules {
            _ if in_place => 0,
            _ if stay => all,
            // While the loss is computed, the head is there, and the embedding that it is tied to.
            [embed, .., head] if model.tie_embeddings => whole(embed).saturating_add(whole(head)),
            [.., head] => whole(head),
            [] => 0,
        };
        // Backward needs the input of every block from the first one on that something is trained in or
        // before. One whose parameters are all frozen may make do with less, unless it is run again.
        let first = modules.iter().position(|module| trainable(module) > 0).unwrap_or(modules.len());
        let again = shard.recompute == Recompute::Block;
        let is_block = |index: usize| index > 0 && index + 1 < modules.len();
        let keeps = |index: usize| is_block(index) && (again || trainable(&modules[index]) > 0);
        let mut blocks = (first..modules.len()).filter(|index| keeps(*index)).count() as u64;
        if blocks > 0 {
            // Those that were not looked at.
            blocks += model.layers.saturating_sub(modules.len().saturating_sub(2)) as u64;
        }
        let tokens = product([micro_batch, config.data.seq_len]);
        let stream = product([micro_batch, config.data.seq_len, model.d_model]);
        let stream = stream.saturating_mul(width).saturating_mul(blocks);
        // With frozen parameters, backward may not reach all of it.
        let read_again = match built_in && !again && train.freeze.is_empty() {
            true => tokens.saturating_mul(activations(model)),
            false => 0,
        };
        let read_again = read_again.saturating_mul(width).saturating_mul(blocks);
        let micro_batches = train.global_batch / ranks / micro_batch.max(1);
        let logits = match config.loss.kind == CROSS_ENTROPY {
            true => 0,
            false => tokens.saturating_mul(model.vocab_size as u64),
        };

        let weights = (WEIGHTS, at_rest(all, F32));
        // Elements of all slots.
        let slots = |(name, shape): &(String, Vec<usize>)| {
            let slots = if is_frozen(name) { 0 } else { optimizer.rule_of(name, shape).slots().len() };
            product(shape.iter().copied()).saturating_mul(slots as u64)
        };
        let state = modules.iter().flatten().map(slots).fold(0, u64::saturating_add);
        let what = if state == trained.saturating_mul(2) { MOMENTS } else { OTHER_STATE };
        let moments = (what, at_rest(state, F32));
        let gradients = (GRADIENTS, at_rest(trained, F32));
        let earlier = if micro_batches > 1 { trained.saturating_mul(F32) } else { 0 };
        // At the end of a forward pass. Moments are there from the first update on.
        let moments_before = if train.steps > 1 { vec![moments] } else { Vec::new() };
        let forward = [
            (WHOLE_GRADIENTS, earlier),
            (GATHERED_WEIGHTS, gathered.saturating_mul(width)),
            (BLOCK_INPUTS, stream),
            (BLOCK_ACTIVATIONS, read_again),
            (TOKENS, tokens.saturating_mul(size_of::<i32>() as u64)),
            (LOGITS, logits.saturating_mul(F32)),
        ];
        let backward = [&[weights], &moments_before[..], &[gradients]].concat();
        let update = vec![weights, moments];
        if offloads {
            let working = (WORKING_WEIGHTS, at_rest(all, width));
            let computing = [&[working], &forward[..]].concat();
            return LeastMemory { computing, offloaded: most([backward, update]) };
        }
        let forward = [&[weights], &moments_before[..], &forward].concat();
        LeastMemory { computing: most([forward, backward, update]), offloaded: Vec::new() }
    }

    /// Bytes of one rank where it computes.
    pub fn per_rank(&self) -> u64 {
        sum(&self.computing)
    }
}

/// What a check says that a run may go on after.
pub(crate) type Warnings = Vec<String>;

/// Compares the least memory of a run with what this machine, or its GPU, has. `decoder` is one of `model`.
/// Allocates nothing to speak of, whatever the sizes are. Returns what is worth a warning: the run fits, but
/// not into what is free now.
///
/// # Errors
///
/// If the run takes more than there is.
pub(crate) fn check(
    config: &Config,
    model: &ModelConfig,
    decoder: &Decoder,
    optimizer: &Optimizer,
    device: &ResolvedDevice,
    place: Option<&RankEnv>,
) -> Result<Warnings, MemoryError> {
    let modules = module_shapes(decoder);
    // The bound knows what these keep for backward.
    let ModelConfig { block, attention, feed_forward, .. } = model;
    let built_in = block.is_none() && attention == FULL_ATTENTION && feed_forward == SWIGLU;
    let least = LeastMemory::of_run(config, model, &modules, optimizer, device.is_gpu(), built_in);
    let given = config.device.memory.map(|size| Memory { total: size.0, free: size.0 });
    let ranks = place.map_or(config.train.ranks, |place| place.local_world_size).max(1) as u64;
    // Gathers among threads on the host are written once, for all ranks of a shard group.
    let groups = match place {
        None => {
            let Config { shard, train, .. } = config;
            let mesh = Mesh::new(shard.strategy, train.ranks.max(1), shard.shard_size);
            mesh.map_or(1, |mesh| mesh.replicate_size() as u64)
        }
        Some(_) => ranks,
    };
    let mut warnings = Warnings::new();
    let mut compare = |place, rows: &[Row], memory: Option<Memory>, ranks, groups| {
        let Some(memory) = given.or(memory) else { return Ok(()) };
        warnings.extend(compare(place, rows, memory, ranks, groups, config)?);
        Ok(())
    };
    if device.is_gpu() {
        // Ranks that are processes have a GPU each.
        let sharing = if place.is_some() { 1 } else { ranks };
        compare(GPU, &least.computing, device.gpu_memory(), sharing, sharing)?;
        compare(MACHINE, &least.offloaded, Memory::of_machine(), ranks, ranks)?;
    } else {
        compare(MACHINE, &least.computing, Memory::of_machine(), ranks, groups)?;
    }
    Ok(warnings)
}

/// Checks that training `decoder`, which is one of `model`, fits into memory, as a run does before its first
/// step. Warns if it fits only once other programs have ended.
///
/// # Errors
///
/// If a rank takes more memory than there is, or than `device.memory` allows.
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

/// Compares `rows` of `ranks` ranks, in `groups` groups that gather weights once, with `memory`.
fn compare(
    place: &'static str,
    rows: &[Row],
    memory: Memory,
    ranks: u64,
    groups: u64,
    config: &Config,
) -> Result<Option<String>, MemoryError> {
    let copies = |what| if what == GATHERED_WEIGHTS { groups } else { ranks };
    let on_all = |(what, bytes): &Row| (*what, bytes.saturating_mul(copies(*what)));
    let needed = sum(&rows.iter().map(on_all).collect::<Vec<_>>());
    if needed <= memory.free {
        return Ok(None);
    }
    if needed <= memory.total {
        return Ok(Some(format!(
            "this run takes at least {} of memory, and {place} has {} free of {}: other programs use the \
             rest. If it is not freed soon, the run may be killed",
            size(needed),
            size(memory.free),
            size(memory.total)
        )));
    }
    let there = match config.device.memory {
        None => format!("{place} has {}", size(memory.total)),
        Some(_) => format!("device.memory is {}", size(memory.total)),
    };
    let mut table = String::new();
    // What makes no difference is left out.
    for row in rows.iter().filter(|row| on_all(row).1 > needed / 1000) {
        let (what, total) = on_all(row);
        // Writing into a String cannot fail.
        let _ = match copies(what) {
            1 => writeln!(table, "  {:>12}  {what}", size(total)),
            copies => {
                writeln!(table, "  {:>12}  {what} ({copies} times {})", size(total), size(row.1))
            }
        };
    }
    let helps = helps(rows, config, place == GPU);
    Err(MemoryError { needed, there, table, helps })
}

/// What would make a run smaller that is as large as `rows`.
fn helps(rows: &[Row], config: &Config, on_gpu: bool) -> Vec<String> {
    let Config { shard, train, precision, .. } = config;
    let mut helps = Vec::new();
    let mut help = |what: &str| helps.push(what.to_owned());
    let of = |what| rows.iter().find(|row| row.0 == what).map_or(0, |row| row.1);
    let is_large = |bytes| bytes > sum(rows) / 10;
    let stream = sum(&[BLOCK_INPUTS, BLOCK_ACTIVATIONS, TOKENS, LOGITS].map(|w| (w, of(w))));
    let state = [WEIGHTS, MOMENTS, OTHER_STATE].map(of).into_iter().fold(0, u64::saturating_add);
    if is_large(stream) {
        help(match config.micro_batch() {
            1 => "a smaller data.seq_len",
            _ => "a smaller train.micro_batch or data.seq_len",
        });
    }
    if is_large(of(BLOCK_ACTIVATIONS)) {
        help("shard.recompute = \"block\"");
    }
    if is_large(stream) && precision.compute() == Precision::F32 {
        help("precision.compute = \"bf16\"");
    }
    if is_large(of(WHOLE_GRADIENTS)) {
        help("one micro-batch per step: a smaller train.global_batch, or more ranks");
    }
    let replicates = !matches!(shard.strategy, Strategy::FullShard | Strategy::ShardGradOp);
    if is_large(state) && train.ranks > 1 && replicates {
        help("shard.strategy = \"FULL_SHARD\", which spreads weights and moments over all ranks");
    }
    if is_large(state) && on_gpu && !shard.offload {
        help("shard.offload = true");
    }
    if is_large(state) {
        help("more machines, whose ranks take their shares");
    }
    help("a smaller model");
    helps
}

/// Elements that backward reads of a built-in block for each token, besides its input: queries, keys and
/// values, and the two products that the gated feed-forward layer multiplies.
fn activations(model: &ModelConfig) -> u64 {
    let heads = model.kv_heads.saturating_mul(2).saturating_add(model.heads);
    let sizes = [heads.saturating_mul(model.head_dim()), model.d_ff.saturating_mul(2)];
    sizes.iter().map(|size| *size as u64).fold(0, u64::saturating_add)
}

/// The one of some moments at which most is held.
fn most<const N: usize>(moments: [Vec<Row>; N]) -> Vec<Row> {
    moments.into_iter().max_by_key(|rows| sum(rows)).unwrap_or_default()
}

fn sum(rows: &[Row]) -> u64 {
    rows.iter().map(|row| row.1).fold(0, u64::saturating_add)
}

/// Number of elements of all `shapes`, or as many as can be counted.
fn numel<'a>(shapes: impl Iterator<Item = &'a Vec<usize>>) -> u64 {
    shapes.map(|shape| product(shape.iter().copied())).fold(0, u64::saturating_add)
}

fn product(sizes: impl IntoIterator<Item = usize>) -> u64 {
    sizes.into_iter().map(|size| size as u64).fold(1, u64::saturating_mul)
}

/// Bytes in a unit that people can read.
fn size(bytes: u64) -> String {
    let (shift, unit) = match bytes {
        bytes if bytes >= 1 << 50 => (50, "PiB"),
        bytes if bytes >= 1 << 30 => (30, "GiB"),
        bytes if bytes >= 1 << 20 => (20, "MiB"),
        _ => (10, "KiB"),
    };
    format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64)
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use kiln_model::{Key, Layers};

    use super::*;

    fn decoder(model: &ModelConfig) -> Decoder {
        Decoder::new(&Layers::default(), model, Key::new(0), &crate::device::plain())
            .expect("built-in layers")
    }

    const GIB: u64 = 1 << 30;

    fn config(more: &str) -> Config {
        toml::from_str(&format!("[train]\nranks = 2\n{more}")).expect("a configuration")
    }

    fn least(config: &Config, on_gpu: bool) -> LeastMemory {
        let model = ModelConfig::preset("10m").expect("a preset");
        let modules = module_shapes(&decoder(&model));
        LeastMemory::of_run(config, &model, &modules, &Optimizer::default(), on_gpu, true)
    }

    #[test]
    fn what_fits_later_is_a_warning() {
        let rows = [(WEIGHTS, 3 * GIB), (GATHERED_WEIGHTS, 2 * GIB)];
        let compare = |total, free, groups| {
            let memory = Memory { total: total * GIB, free: free * GIB };
            compare(MACHINE, &rows, memory, 2, groups, &config(""))
        };
        assert_eq!(compare(10, 8, 1), Ok(None));
        let warning = compare(10, 7, 1).expect("it fits").expect("a warning");
        let expected = "at least 8.0 GiB of memory, and this machine has 7.0 GiB free of 10.0 GiB";
        assert!(warning.contains(expected), "{warning}");
        // Each group gathers for itself.
        let error = compare(9, 9, 2).expect_err("10 GiB").to_string();
        assert!(error.contains("at least 10.0 GiB of memory, and this machine has 9.0 GiB"), "{error}");
        assert_eq!(compare(u64::MAX / GIB, u64::MAX / GIB, u64::MAX).expect_err("much").needed, u64::MAX);
    }

    /// The host has what is offloaded, and the GPU the rest.
    #[test]
    fn offloaded_state_is_the_hosts() {
        let parameters = decoder(&ModelConfig::preset("10m").expect("a preset")).num_params() as u64;
        // Short sequences, so that state is what counts.
        let short = "global_batch = 2\nmicro_batch = 1\n[data]\nseq_len = 16\n";
        let offloading = config(&format!("{short}[shard]\noffload = true"));
        let state = |least: &LeastMemory| sum(&least.offloaded);
        assert_eq!(state(&least(&offloading, true)), parameters / 2 * 16);
        assert_eq!(state(&least(&offloading, false)), 0);
        let (with, without) = (least(&offloading, true), least(&config(short), true));
        assert!(with.per_rank() * 2 < without.per_rank(), "{with:?} {without:?}");
    }
}
