//! The operations, with the minimum bytes that each moves or FLOPs that it computes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln::bench::median;
use kiln::config::{Config, Precision};
use kiln::device;
use kiln::run::TrainError;
use kiln_collectives::DType as FlatDType;
use kiln_model::Key;
use kiln_model::layers::{LayerInit, Layers};
use kiln_model::ops::{self, HeadLayout, RotaryFrequencies};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{EngineBuilder, Policy, ShardOptions};

use super::clock::Clock;
use super::shapes::Shapes;
use super::table::{KernelRow, Work};
use crate::measure::{Steps, measure};

/// Names of the rows; those of backward passes end in `_backward`.
pub(super) const NAMES: [&str; 17] = [
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "swiglu",
    "swiglu_backward",
    "embedding",
    "embedding_backward",
    "dropout",
    "dropout_backward",
    "attention",
    "attention_backward",
    "linear",
    "linear_backward",
    "cross_entropy",
    "cast",
    "update",
];

/// Number of values after which tensors repeat.
const PATTERN: usize = 1 << 16;

/// Bytes per parameter of AdamW in f32: the gradient is read twice, weight and moments are read and written.
const UPDATE_BYTES: f64 = 4.0 * (2.0 + 2.0 * 3.0);

/// Returns the bytes per second of a kernel that adds 1 to every element.
pub(super) fn copy_rate(clock: &Clock) -> Result<f64, TrainError> {
    let len = if clock.quick { 1 << 16 } else { 1 << 26 };
    let x = Tensor::<1>::ones([len], &clock.device);
    let seconds = clock.time(|| drop(x.clone().add_scalar(1.0)))?;
    Ok(2.0 * (len * size_of::<f32>()) as f64 / seconds)
}

pub(super) struct Bench<'a> {
    pub(super) clock: &'a Clock,
    pub(super) shapes: &'a Shapes,
}

impl Bench<'_> {
    /// Measures the wanted rows, in the order of [`NAMES`]; returns the rows and the reasons for failures.
    pub(super) fn run(&self, wanted: &dyn Fn(&str) -> bool) -> (Vec<KernelRow>, Vec<String>) {
        let (mut rows, mut failures) = (Vec::new(), Vec::new());
        for name in NAMES.into_iter().filter(|name| wanted(name)) {
            // An unsupported operation panics, and costs only its row.
            let timed = catch_unwind(AssertUnwindSafe(|| self.row(name)));
            match timed {
                Ok(Ok(None)) => {}
                Ok(Ok(Some((seconds, work)))) => {
                    let (name, shapes) = (name.to_owned(), self.shapes.name());
                    tracing::info!("{name}, {shapes}: {:.1} µs", seconds * 1e6);
                    rows.push(KernelRow { name, shapes, seconds, work, share: None, peer_s: None });
                }
                Ok(Err(error)) => failures.push(format!("{name}: {error}")),
                Err(_) => failures.push(format!("{name}: it panicked; see above")),
            }
            self.clock.release();
        }
        (rows, failures)
    }

    /// Returns the seconds and work of one operation, if these shapes have it.
    fn row(&self, name: &str) -> Result<Option<(f64, Work)>, TrainError> {
        let Shapes { model, batch, seq, .. } = self.shapes;
        let (d, ff, vocab) = (model.d_model, model.d_ff, model.vocab_size);
        let (heads, kv_heads, width) = (model.heads, model.kv_heads, model.head_dim());
        let rows = self.shapes.rows();
        let activations = |width: usize| (rows * width) as f64 * self.shapes.size();
        let bytes = |count: f64| Work::Bytes(count);
        // FLOPs of one product of attention: two for every score below the diagonal and element of a head.
        let scores = (batch * heads * seq * seq * width) as f64;
        let timed = match name {
            "rms_norm" | "rms_norm_backward" => {
                let inputs =
                    |device: &Device| (self.values([*batch, *seq, d], device), self.values([d], device));
                let op = |(x, w): &(Tensor<3>, Tensor<1>)| ops::rms_norm(x.clone(), w.clone(), 1e-5);
                let passes = if name == "rms_norm" { 2.0 } else { 3.0 };
                (self.pass(name, inputs, op)?, bytes(passes * activations(d)))
            }
            "rotary" | "rotary_backward" => {
                let inputs = |device: &Device| self.values([*batch, *seq, heads, width], device);
                let frequencies = RotaryFrequencies::new(model.rope_theta);
                let op = |x: &Tensor<4>| ops::rotary(x.clone(), frequencies, 0);
                (self.pass(name, inputs, op)?, bytes(2.0 * activations(heads * width)))
            }
            "swiglu" | "swiglu_backward" => {
                let inputs = |device: &Device| {
                    let values = || self.values([*batch, *seq, ff], device);
                    (values(), values())
                };
                let op = |(gate, up): &(Tensor<3>, Tensor<3>)| ops::swiglu(gate.clone(), up.clone());
                let passes = if name == "swiglu" { 3.0 } else { 5.0 };
                (self.pass(name, inputs, op)?, bytes(passes * activations(ff)))
            }
            "embedding" | "embedding_backward" => {
                let ids = self.ids([*batch, *seq]);
                let inputs = |device: &Device| self.values([vocab, d], device);
                let op = |table: &Tensor<2>| ops::embedding(table.clone(), ids.clone());
                // Forward reads the rows that are looked up; backward writes all rows of the table.
                let table = (vocab * d) as f64 * self.shapes.size();
                let other = if name == "embedding" { activations(d) } else { table };
                (self.pass(name, inputs, op)?, bytes(activations(d) + other))
            }
            "dropout" | "dropout_backward" => {
                let inputs = |device: &Device| self.values([*batch, *seq, d], device);
                let op = |x: &Tensor<3>| ops::dropout(x.clone(), 0.1, 7, 0);
                (self.pass(name, inputs, op)?, bytes(2.0 * activations(d)))
            }
            "attention" | "attention_backward" => {
                let inputs = |device: &Device| {
                    let values = |heads| self.values([*batch, *seq, heads, width], device);
                    (values(heads), values(kv_heads), values(kv_heads))
                };
                let op = |(q, k, v): &(Tensor<4>, Tensor<4>, Tensor<4>)| {
                    ops::causal_attention(q.clone(), k.clone(), v.clone(), None)
                };
                // Two products forward; five backward, one of which recomputes the scores.
                let products = if name == "attention" { 2.0 } else { 5.0 };
                (self.pass(name, inputs, op)?, Work::Flops(products * scores))
            }
            "linear" | "linear_backward" => {
                let inputs =
                    |device: &Device| (self.values([*batch, *seq, d], device), self.values([d, ff], device));
                let op = |(x, w): &(Tensor<3>, Tensor<2>)| ops::linear(x.clone(), w.clone(), None);
                let products = if name == "linear" { 1.0 } else { 2.0 };
                (self.pass(name, inputs, op)?, Work::Flops(products * 2.0 * (rows * d * ff) as f64))
            }
            "cross_entropy" => {
                let targets = self.ids([*batch, *seq]).reshape([rows]);
                let device = self.clock.device.clone().autodiff();
                let hidden = self.values([rows, d], &device);
                let head = self.values([d, vocab], &device);
                let (layout, scale) = (HeadLayout::VocabColumns, 1.0 / rows as f64);
                let seconds = self.clock.time(|| {
                    let (hidden, head) = (hidden.clone(), head.clone());
                    let targets = targets.clone();
                    let loss = ops::linear_cross_entropy(hidden, head, layout, targets, scale);
                    drop(loss.backward());
                })?;
                (seconds, Work::Flops(3.0 * 2.0 * (rows * d * vocab) as f64))
            }
            "cast" => return self.cast(),
            _ => self.update()?,
        };
        Ok(Some(timed))
    }

    /// Returns the seconds of an operation, or of its backward pass if `name` ends in `_backward`.
    fn pass<I, const D: usize>(
        &self,
        name: &str,
        inputs: impl Fn(&Device) -> I,
        op: impl Fn(&I) -> Tensor<D>,
    ) -> Result<f64, TrainError> {
        if name.ends_with("_backward") {
            let inputs = inputs(&self.clock.device.clone().autodiff());
            return self.clock.time_backward(|| op(&inputs));
        }
        let inputs = inputs(&self.clock.device);
        self.clock.time(|| drop(op(&inputs)))
    }

    /// Casts the weights of a block to the compute dtype, like a gather on one rank. Skipped in f32.
    fn cast(&self) -> Result<Option<(f64, Work)>, TrainError> {
        if self.shapes.precision == Precision::F32 {
            return Ok(None);
        }
        let (device, model) = (&self.clock.device, &self.shapes.model);
        let policy = Policy { compute_dtype: FlatDType::BF16, ..Policy::default() };
        let timed = run_ranks(1, 1, |world| -> Result<_, TrainError> {
            let mut builder = EngineBuilder::new(world, policy.clone(), None)?;
            let block = Layers::default().make_block(LayerInit::for_block(model, 0, Key::new(0), device))?;
            let module = builder.fully_shard("block", "block.", block, ShardOptions::default())?;
            let engine = builder.finish()?;
            let parameters = engine.layout().num_parameters();
            let mut failed = None;
            let seconds = self.clock.time(|| {
                drop(module.unshard(&engine.begin_forward(device)));
                failed = failed.take().or(engine.finish_evaluation().err());
            })?;
            match failed {
                Some(error) => Err(error.into()),
                None => Ok((seconds, parameters)),
            }
        })?;
        let bytes = (size_of::<f32>() as f64 + self.shapes.size()) * timed[0].1 as f64;
        Ok(Some((timed[0].0, Work::Bytes(bytes))))
    }

    fn update(&self) -> Result<(f64, Work), TrainError> {
        let mut config = Config::default();
        config.train.global_batch = 1;
        config.train.micro_batch = 1.into();
        config.train.ranks = 1;
        config.data.seq_len = self.shapes.seq.min(64);
        config.precision.compute = self.shapes.precision.into();
        let mut model = self.shapes.model.clone();
        model.layers = 1;
        let timed = if self.clock.quick { 1 } else { 7 };
        let measured = measure(&config, &model, &self.clock.device, Steps { timed, warmup: 2 })?;
        let work = Work::Bytes(UPDATE_BYTES * measured.parameters as f64);
        Ok((median(measured.updates), work))
    }

    /// Returns normal values, tracked if the device has autodiff.
    fn values<const D: usize>(&self, shape: [usize; D], device: &Device) -> Tensor<D> {
        let len = shape.iter().product();
        let pattern = Key::new(len as u64).normal_vec(PATTERN.min(len), 1.0);
        let values: Vec<f32> = pattern.iter().copied().cycle().take(len).collect();
        let data = TensorData::new(values, shape).convert_dtype(self.shapes.dtype());
        let tensor = Tensor::from_data(data, (device, self.shapes.dtype()));
        if device.is_autodiff() { tensor.require_grad() } else { tensor }
    }

    fn ids(&self, shape: [usize; 2]) -> Tensor<2, Int> {
        let (key, vocab) = (Key::new(1), self.shapes.model.vocab_size as u64);
        let ids = (0..(shape[0] * shape[1]) as u64).map(|i| (key.at(i) % vocab) as i32).collect();
        device::tokens(ids, shape[0], shape[1], &self.clock.device)
    }
}
