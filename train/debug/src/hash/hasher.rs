use std::collections::HashMap;
use std::path::{Path, PathBuf};

use kiln_collectives::Phase;
use kiln_model::ops::Seen;
use kiln_shard::{Engine, ParamGroupLayout, StateKind, TensorSums};
use kiln_sys::Lines;

use super::options::{HashOptions, HashedKind};
use super::record::{Entry, Key, StepHashes, StepPhase};
use kiln_train::error::{Result, TrainError};
use kiln_train::metrics::StepMetrics;
use kiln_train::run::{HASHES_FILE, MicroBatch, Moment, Observer, Pass};

/// Largest number of ranks whose samples are hashed separately.
const MOST_RANKS: usize = 64;

/// Hashes the requested steps. Every rank hashes its samples and chunks; rank 0 writes one line per step.
pub struct Hasher {
    options: HashOptions,
    path: PathBuf,
    rows: usize,
    /// The output file, on rank 0 only; opened with the first line.
    file: Option<Lines>,
    has_begun: bool,
    step: Collected,
}

#[derive(Default)]
struct Collected {
    order: Vec<(Key, TensorSums)>,
    index: HashMap<Key, usize>,
}

impl Collected {
    fn add(&mut self, key: Key, sums: TensorSums) {
        let index = *self.index.entry(key).or_insert_with_key(|key| {
            self.order.push((key.clone(), TensorSums::default()));
            self.order.len() - 1
        });
        self.order[index].1 = self.order[index].1.plus(sums);
    }

    fn add_number(&mut self, phase: StepPhase, module: &str, tensor: &str, value: f64) {
        let (module, tensor, dtype) = (module.to_owned(), tensor.to_owned(), "f64".to_owned());
        self.add(Key { phase, module, tensor, dtype }, TensorSums::from_number(value));
    }
}

/// Splits a place or parameter name into its module and its name within that module.
pub fn split(name: &str) -> (&str, &str) {
    let dots = if name.starts_with("layers.") { 2 } else { 1 };
    let end = name.match_indices('.').nth(dots - 1).map_or(name.len(), |(end, _)| end);
    (&name[..end], name[end..].trim_start_matches('.'))
}

/// Returns the sums over a tensor of a pass, and its dtype. Its first row belongs to the run's sample `first`.
fn from_pass(seen: &Seen<'_>, first: u64, rows: usize) -> Result<(TensorSums, String)> {
    let data = seen.values.clone().into_data();
    let rows = if seen.shape.first().is_some_and(|size| size.is_multiple_of(rows)) { rows } else { 1 };
    let count = data.num_elements() / rows;
    let dtype = format!("{:?}", data.dtype()).to_lowercase();
    let samples = (first..).take(rows).enumerate();
    let mut sums = TensorSums::default();
    for (row, sample) in samples {
        let of_sample = TensorSums::from_sample(sample, &data, row * count..(row + 1) * count);
        sums = sums.plus(of_sample.map_err(|error| unreadable(&error))?);
    }
    Ok((sums, dtype))
}

fn unreadable(error: &impl std::fmt::Debug) -> TrainError {
    TrainError::Records { reason: format!("{error:?}") }
}

impl Hasher {
    /// Creates the hasher of a rank for the run in `out`. `rows` is the number of samples of a micro-batch.
    pub fn new(options: HashOptions, out: &Path, rows: usize) -> Self {
        let path = out.join(HASHES_FILE);
        Hasher { options, path, rows, file: None, has_begun: false, step: Collected::default() }
    }

    fn add_group(
        &mut self,
        engine: &Engine,
        phase: StepPhase,
        position: usize,
        kind: StateKind<'_>,
    ) -> Result<()> {
        let group = &engine.layout().groups[position];
        let own = ParamGroupLayout::own_chunk(&engine.mesh(), engine.world().rank());
        let chunk = group.chunk_range(own);
        let (of_unit, suffix) = match kind {
            StateKind::Weight => ("weights", String::new()),
            StateKind::Gradient => ("gradients", String::new()),
            StateKind::Slot(name) => ("moments", format!(" {name}")),
        };
        let (module, _) = split(&group.name);
        let by_module = self.options.by_module;
        let sums = engine.read_chunk(position, kind, |values| {
            let of_parameter = |parameter: &kiln_shard::ParameterLayout| {
                let (held, range) = parameter.held_by(&chunk);
                TensorSums::of(TensorSums::block_of(&parameter.name), range.start, &values[held])
            };
            group.parameters.iter().map(of_parameter).collect::<Vec<_>>()
        })?;
        for (parameter, sums) in group.parameters.iter().zip(sums.into_iter().flatten()) {
            let name = parameter.name.strip_prefix(module).and_then(|name| name.strip_prefix('.'));
            let tensor = match by_module {
                true => format!("{of_unit}{suffix}"),
                false => format!("{}{suffix}", name.unwrap_or(&parameter.name)),
            };
            let key = Key { phase, module: module.to_owned(), tensor, dtype: "f32".to_owned() };
            self.step.add(key, sums);
        }
        Ok(())
    }

    /// Adds the owned slots of a group: their sums are those of the owner.
    fn add_owned(&mut self, engine: &Engine, phase: StepPhase, position: usize) -> Result<()> {
        let group = &engine.layout().groups[position];
        let module = split(&group.name).0;
        for parameter in &group.parameters {
            let name = parameter.name.strip_prefix(module).and_then(|name| name.strip_prefix('.'));
            let of_unit = if self.options.by_module { "moments" } else { name.unwrap_or(&parameter.name) };
            for slot in parameter.owned_slots.iter().filter(|slot| engine.has_owned(position, &slot.name)) {
                let of_slot =
                    |values: &[f32]| TensorSums::of(TensorSums::block_of(&parameter.name), 0, values);
                let sums = engine.read_owned(&parameter.name, &slot.name, of_slot)?;
                let tensor = format!("{of_unit} {}", slot.name);
                let key = Key { phase, module: module.to_owned(), tensor, dtype: "f32".to_owned() };
                self.step.add(key, sums.unwrap_or_default());
            }
        }
        Ok(())
    }

    fn add_state(&mut self, engine: &Engine, phase: StepPhase) -> Result<()> {
        for position in 0..engine.layout().groups.len() {
            // Moments come before weights: an update computes them first.
            if self.options.has(HashedKind::Moments) {
                for slot in engine.slots_of_group(position) {
                    self.add_group(engine, phase, position, StateKind::Slot(slot))?;
                }
                self.add_owned(engine, phase, position)?;
            }
            if self.options.has(HashedKind::Weights) {
                self.add_group(engine, phase, position, StateKind::Weight)?;
            }
        }
        Ok(())
    }

    /// Combines the tensors of all ranks. On rank 0, writes the line of the step.
    fn finish(&mut self, engine: &Engine, step: u64) -> Result<()> {
        let mine = std::mem::take(&mut self.step).order;
        let message = serde_json::to_vec(&mine).map_err(|error| unreadable(&error))?;
        let ranks = engine.world().world_size();
        let messages = engine.all_gather_bytes(Phase::Other, "hashes", &message)?;
        if engine.world().rank() != 0 {
            return Ok(());
        }
        let mut all = Collected::default();
        let mut by_rank: HashMap<Key, Vec<u32>> = HashMap::new();
        for (rank, message) in messages.iter().enumerate() {
            let sums: Vec<(Key, TensorSums)> =
                serde_json::from_slice(message).map_err(|error| unreadable(&error))?;
            for (key, sums) in sums {
                if key.phase.is_of_samples() && (2..=MOST_RANKS).contains(&ranks) {
                    let hashes = by_rank.entry(key.clone()).or_insert_with(|| vec![0; ranks]);
                    hashes[rank] = (sums.hash >> 32) as u32;
                }
                all.add(key, sums);
            }
        }
        let entry = |(key, sums): (Key, TensorSums)| {
            let by_rank = by_rank.remove(&key).unwrap_or_default();
            Entry::new(key, sums, by_rank)
        };
        let mut entries: Vec<_> = all.order.into_iter().map(entry).collect();
        entries.sort_by_key(|entry| entry.phase);
        let line =
            serde_json::to_string(&StepHashes { step, ranks, by_module: self.options.by_module, entries });
        let line = line.map_err(|error| unreadable(&error))?;
        let file = match &mut self.file {
            Some(file) => file,
            file => {
                let opened = Lines::open(&self.path).map_err(TrainError::io("write", &self.path))?;
                file.insert(opened)
            }
        };
        file.append(line);
        Ok(())
    }
}

impl Observer for Hasher {
    fn is_observing(&self, step: u64) -> bool {
        self.options.steps.contains(&step)
    }

    fn on_batch(&mut self, engine: &Engine, at: Moment, batch: &MicroBatch) -> Result<()> {
        if at.micro_batch == 0 {
            // Discards the tensors of an abandoned step.
            self.step = Collected::default();
            if !std::mem::replace(&mut self.has_begun, true) {
                self.add_state(engine, StepPhase::Start)?;
            }
        }
        let bits = |weights: &Vec<f32>| weights.iter().map(|weight| weight.to_bits().cast_signed()).collect();
        let weights: Option<Vec<i32>> = batch.weights.as_ref().map(bits);
        let tokens = [("embed", "tokens", &batch.inputs), ("head", "targets", &batch.targets)];
        let weights = weights.as_ref().map(|weights| ("head", "weights", weights));
        for (module, tensor, tokens) in tokens.into_iter().chain(weights) {
            let samples = (at.first_sample..).zip(tokens.chunks((tokens.len() / self.rows).max(1)));
            let of_sample = |(sample, ids): (u64, &[i32])| TensorSums::from_ids(sample, ids);
            let sums = samples.map(of_sample).fold(TensorSums::default(), TensorSums::plus);
            let (module, tensor, dtype) = (module.to_owned(), tensor.to_owned(), "i32".to_owned());
            self.step.add(Key { phase: StepPhase::Data, module, tensor, dtype }, sums);
        }
        Ok(())
    }

    fn on_tensor(&mut self, _engine: &Engine, at: Moment, seen: &Seen<'_>) -> Result<()> {
        let phase = match at.pass {
            Pass::Forward => StepPhase::Forward,
            Pass::Backward => StepPhase::Backward,
            Pass::Recompute => return Ok(()),
        };
        let (module, inner) = split(seen.place);
        // A micro-batch's share of the loss depends on how the batch is split.
        let is_number = seen.shape.iter().product::<usize>() == 1;
        if is_number || !self.options.has_pass(phase) || (self.options.by_module && !inner.is_empty()) {
            return Ok(());
        }
        let (sums, dtype) = from_pass(seen, at.first_sample, self.rows)?;
        let tensor = match inner {
            "" => seen.name.to_owned(),
            inner => format!("{inner}.{}", seen.name),
        };
        self.step.add(Key { phase, module: module.to_owned(), tensor, dtype }, sums);
        Ok(())
    }

    fn on_gradients(&mut self, engine: &Engine, _step: u64) -> Result<()> {
        if self.options.has(HashedKind::Gradients) {
            let groups = &engine.layout().groups;
            for position in (0..groups.len()).rev().filter(|position| groups[*position].trainable) {
                self.add_group(engine, StepPhase::Gradient, position, StateKind::Gradient)?;
            }
        }
        Ok(())
    }

    fn on_step_done(&mut self, engine: &Engine, metrics: &StepMetrics) -> Result<()> {
        if engine.world().rank() == 0 {
            self.step.add_number(StepPhase::Loss, "head", "loss", metrics.loss);
            self.step.add_number(StepPhase::Norm, "model", "grad_norm", metrics.grad_norm);
        }
        self.add_state(engine, StepPhase::Update)?;
        self.finish(engine, metrics.step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_split_into_module_and_tensor() {
        for (name, module, inner) in [
            ("layers.3.attention.q_proj.weight", "layers.3", "attention.q_proj.weight"),
            ("layers.3", "layers.3", ""),
            ("layers.3.muon", "layers.3", "muon"),
            ("embed", "embed", ""),
            ("head.frozen", "head", "frozen"),
        ] {
            assert_eq!(split(name), (module, inner));
        }
    }
}
