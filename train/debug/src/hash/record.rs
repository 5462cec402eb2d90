use std::fmt;
use std::path::{Path, PathBuf};

use kiln_shard::TensorSums;
use kiln_sys::LineReader;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The part of a step that a tensor belongs to, in chronological order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepPhase {
    /// Weights and moments before the first hashed step.
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
    /// Returns `true` if tensors of this phase may have infinite elements in a healthy run, as masked scores do.
    pub fn may_mask(self) -> bool {
        matches!(self, StepPhase::Forward | StepPhase::Backward)
    }

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
    /// The part of the step.
    pub phase: StepPhase,
    /// The module, such as `layers.3`, `embed` or `head`; `model` for a number of the whole model.
    pub module: String,
    /// The tensor in the module, such as `ffn.output` or `attention.q_proj.weight`.
    pub tensor: String,
    /// The dtype of the tensor.
    pub dtype: String,
    /// Number of elements over all samples of the step.
    pub count: u64,
    /// A hash of the elements' bits, independent of how the elements are spread over ranks and micro-batches.
    #[serde(serialize_with = "to_hex", deserialize_with = "from_hex")]
    pub hash: u64,
    /// 2-norm of the finite elements.
    pub norm: f64,
    /// Sums of the values with pseudo-random signs, for estimating the distance between two tensors.
    pub sketch: [f64; TensorSums::SKETCHES],
    /// Number of elements that are NaN or infinite.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub non_finite: u64,
    /// A short hash of each rank's samples, in passes on several ranks; shows which rank differs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_rank: Vec<u32>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn to_hex<S: Serializer>(hash: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{hash:016x}"))
}

fn from_hex<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    u64::from_str_radix(&text, 16).map_err(serde::de::Error::custom)
}

impl Entry {
    pub(super) fn new(key: Key, sums: TensorSums, by_rank: Vec<u32>) -> Self {
        let Key { phase, module, tensor, dtype } = key;
        let TensorSums { hash, count, non_finite, squares, sketch } = sums;
        Entry { phase, module, tensor, dtype, count, hash, norm: squares.sqrt(), sketch, non_finite, by_rank }
    }

    /// Returns the identity of the tensor: phase, module and tensor name.
    pub fn name(&self) -> (StepPhase, &str, &str) {
        (self.phase, &self.module, &self.tensor)
    }

    /// Returns the ranks whose samples differ from `other`; empty if unknown, or if all ranks differ.
    pub fn ranks_apart(&self, other: &Entry) -> Vec<usize> {
        let (a, b) = (&self.by_rank, &other.by_rank);
        if a.len() != b.len() {
            return Vec::new();
        }
        let apart: Vec<_> = (0..a.len()).filter(|rank| a[*rank] != b[*rank]).collect();
        if apart.len() == a.len() { Vec::new() } else { apart }
    }

    /// Estimates the norm of the difference of two tensors; infinite if only one of the tensors is finite.
    pub fn distance(&self, other: &Entry) -> f64 {
        if self.non_finite != other.non_finite {
            return f64::INFINITY;
        }
        let pairs = self.sketch.iter().zip(other.sketch);
        let squares: f64 = pairs.map(|(a, b)| (a - b).powi(2)).sum();
        (squares / TensorSums::SKETCHES as f64).sqrt()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) phase: StepPhase,
    pub(super) module: String,
    pub(super) tensor: String,
    pub(super) dtype: String,
}

/// The tensors of one step in chronological order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepHashes {
    /// The optimizer step, from 1.
    pub step: u64,
    /// Number of ranks that took the step.
    pub ranks: usize,
    /// Set if a module has one hash per kind instead of one per tensor.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_module: bool,
    /// The tensors of the step.
    pub entries: Vec<Entry>,
}

/// The error for an unusable hash file.
#[derive(Debug, thiserror::Error)]
pub enum HashesError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// A line of the file is damaged.
    #[error("{path}, line {line}: {problem}")]
    Line { path: PathBuf, line: usize, problem: String },
}

/// Reads the steps of a hash file. An incomplete last line, as after a crash, is skipped.
pub fn read(path: &Path) -> Result<Vec<StepHashes>, HashesError> {
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
