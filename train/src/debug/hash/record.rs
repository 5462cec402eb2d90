//! A line of `hashes.jsonl`.

use std::fmt;
use std::path::{Path, PathBuf};

use kiln_shard::TensorSums;
use kiln_storage::LineReader;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Name of the file in a run folder.
pub const HASHES_FILE: &str = "hashes.jsonl";

/// The part of a step that a tensor belongs to, in the order of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepPhase {
    /// Before the first step that is hashed: weights and moments.
    Start,
    /// The tokens of the step.
    Data,
    /// The forward pass.
    Forward,
    /// The loss of the step.
    Loss,
    /// The backward pass: gradients of activations.
    Backward,
    /// The gradient of each parameter, reduced over the ranks, before clipping.
    Gradient,
    /// The norm of the whole gradient.
    Norm,
    /// Weights and moments after the update.
    Update,
}

impl StepPhase {
    /// Returns `true` if its tensors may have infinite elements in a healthy run, such as masked scores.
    pub fn may_mask(self) -> bool {
        matches!(self, StepPhase::Forward | StepPhase::Backward)
    }

    /// Whether its tensors are of samples, each of which one rank has.
    pub(super) fn is_of_samples(self) -> bool {
        matches!(self, StepPhase::Data | StepPhase::Forward | StepPhase::Backward)
    }
}

impl fmt::Display for StepPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A tensor of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When.
    pub phase: StepPhase,
    /// The module, as in `layers.3`; `embed`, `head`, or `model` for a number of the whole.
    pub unit: String,
    /// The tensor in it, as in `ffn.output` or `attention.q_proj.weight`.
    pub tensor: String,
    /// How its elements are stored.
    pub dtype: String,
    /// Number of its elements, of all samples of the step.
    pub count: u64,
    /// The same wherever the bits are the same, however they are spread over ranks and micro-batches.
    #[serde(serialize_with = "to_hex", deserialize_with = "of_hex")]
    pub hash: u64,
    /// 2-norm of what is finite in it.
    pub norm: f64,
    /// Sums of the values with pseudo-random signs: they tell how far two tensors are apart.
    pub sketch: [f64; TensorSums::SKETCHES],
    /// Elements that are no finite numbers.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub non_finite: u64,
    /// A short hash of the samples of each rank, for tensors of a pass on several ranks: it tells which rank has
    /// others, where two runs have the same ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_rank: Vec<u32>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn to_hex<S: Serializer>(hash: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{hash:016x}"))
}

fn of_hex<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    u64::from_str_radix(&text, 16).map_err(serde::de::Error::custom)
}

impl Entry {
    pub(super) fn new(key: Key, sums: TensorSums, by_rank: Vec<u32>) -> Self {
        let Key { phase, unit, tensor, dtype } = key;
        let TensorSums { hash, count, non_finite, squares, sketch } = sums;
        Entry { phase, unit, tensor, dtype, count, hash, norm: squares.sqrt(), sketch, non_finite, by_rank }
    }

    /// What it is called: everything but its values.
    pub fn name(&self) -> (StepPhase, &str, &str) {
        (self.phase, &self.unit, &self.tensor)
    }

    /// The ranks whose samples have other values, where that is known and some have the same.
    pub fn ranks_apart(&self, other: &Entry) -> Vec<usize> {
        let (a, b) = (&self.by_rank, &other.by_rank);
        if a.len() != b.len() {
            return Vec::new();
        }
        let apart: Vec<_> = (0..a.len()).filter(|rank| a[*rank] != b[*rank]).collect();
        if apart.len() == a.len() { Vec::new() } else { apart }
    }

    /// An estimate of the norm of the difference of two tensors; infinite if only one of them is finite.
    pub fn distance(&self, other: &Entry) -> f64 {
        if self.non_finite != other.non_finite {
            return f64::INFINITY;
        }
        let pairs = self.sketch.iter().zip(other.sketch);
        let squares: f64 = pairs.map(|(a, b)| (a - b).powi(2)).sum();
        (squares / TensorSums::SKETCHES as f64).sqrt()
    }
}

/// What a tensor is called.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) phase: StepPhase,
    pub(super) unit: String,
    pub(super) tensor: String,
    pub(super) dtype: String,
}

/// The tensors of one step, in the order of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepHashes {
    /// The optimizer step, from 1.
    pub step: u64,
    /// Ranks that took it.
    pub ranks: usize,
    /// Whether a module has one hash per kind, rather than one per tensor.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_unit: bool,
    /// Its tensors.
    pub entries: Vec<Entry>,
}

/// A file of hashes that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HashesError {
    /// It cannot be read.
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// It is not as it was written.
    #[error("{path}, line {line}: {problem}")]
    Line { path: PathBuf, line: usize, problem: String },
}

/// The steps in a file of hashes. A last line that is not whole, as after a crash, is left out.
pub(crate) fn read(path: &Path) -> Result<Vec<StepHashes>, HashesError> {
    let unreadable = |source| HashesError::Read { path: path.to_owned(), source };
    let (mut lines, mut steps, mut number) = (LineReader::open(path).map_err(unreadable)?, Vec::new(), 0);
    while let Some(line) = lines.next_line().map_err(unreadable)? {
        number += 1;
        let Some(line) = line.strip_suffix(b"\n") else { break };
        if line.is_empty() {
            continue;
        }
        steps.push(serde_json::from_slice(line).map_err(|error| HashesError::Line {
            path: path.to_owned(),
            line: number,
            problem: error.to_string(),
        })?);
    }
    Ok(steps)
}
