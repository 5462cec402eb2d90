//! The same training on one device, without the engine: burn's autodiff over the whole batch, and clipping and
//! AdamW computed from their formulas in f64.

use std::sync::LazyLock;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use kiln_model::decoder::Decoder;
use kiln_shard::Strategy;

use crate::muon::step_muon;
use crate::support::{LEARNING_RATE, Run, Trace, Values};

/// Returns the run of [`Run::new`] without the engine, for the untied and for the tied model.
pub fn standard(tied: bool) -> &'static Trace {
    static TRACES: LazyLock<[Trace; 2]> =
        LazyLock::new(|| [false, true].map(|tied| train(&Run::new(Strategy::FullShard, 1).tied(tied))));
    &TRACES[usize::from(tied)]
}

/// Trains the decoder of `run` on one device.
pub fn train(run: &Run) -> Trace {
    train_decoder(run, run.decoder(&Device::flex().autodiff()))
}

/// Trains `decoder` on the data and with the optimizer of `run`.
pub fn train_decoder(run: &Run, decoder: Decoder) -> Trace {
    let device = Device::flex().autodiff();
    let mut weights = Weights(Vec::new());
    visit(&decoder, &mut Visit { prefix: String::new(), path: Vec::new(), read: &mut weights });
    let mut parameters: Vec<_> = weights.0.into_iter().map(Parameter::new).collect();
    parameters.iter_mut().for_each(|parameter| parameter.trainable = !(run.frozen)(&parameter.name));

    let mut trace = Trace::default();
    let mut decoder = decoder;
    for step in 1..=run.steps {
        decoder = map(decoder, &mut SetWeights { parameters: parameters.iter(), device: &device });
        let loss = run.samples((step as usize - 1) * run.batch, run.batch, &device).loss(&decoder);
        trace.losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let mut gradients = ReadGradients { gradients: loss.backward(), found: Vec::new() };
        visit(&decoder, &mut Visit { prefix: String::new(), path: Vec::new(), read: &mut gradients });
        for (parameter, gradient) in parameters.iter_mut().zip(gradients.found) {
            parameter.gradient = gradient;
        }
        trace.norms.push(update(run, step as i32, &mut parameters));
        let trainable = parameters.iter().filter(|parameter| parameter.trainable);
        trace.gradients.push(trainable.map(|p| (p.name.clone(), p.gradient.clone())).collect::<Values>());
    }
    trace.weights = parameters.iter().map(|p| (p.name.clone(), p.weight_f32())).collect();
    trace
}

/// Clips the global norm and applies AdamW (decoupled decay of matrices only, bias correction,
/// epsilon outside the root); returns the norm.
fn update(run: &Run, step: i32, parameters: &mut [Parameter]) -> f64 {
    let trainable = || parameters.iter().filter(|parameter| parameter.trainable);
    let squares = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    let norm = trainable().map(|parameter| squares(&parameter.gradient)).sum::<f64>().sqrt();
    let mut clip = 1.0;
    if run.max_norm > 0.0 && run.max_norm / (norm + 1e-6) < 1.0 {
        clip = run.max_norm / (norm + 1e-6);
    }
    let adamw = run.adamw;
    if let Some(muon) = &run.muon {
        let is_matrix =
            |p: &&mut Parameter| p.trainable && p.name.starts_with("layers.") && p.shape.len() > 1;
        for Parameter { shape, weight, gradient, moments, .. } in parameters.iter_mut().filter(is_matrix) {
            let gradient: Vec<_> = gradient.iter().map(|value| f64::from(*value) * clip).collect();
            step_muon(muon, [shape[0], shape[1]], weight, &gradient, moments);
        }
    }
    let is_adamw = |p: &&mut Parameter| {
        p.trainable && (run.muon.is_none() || !p.name.starts_with("layers.") || p.shape.len() < 2)
    };
    for parameter in parameters.iter_mut().filter(is_adamw) {
        let decay = if parameter.shape.len() > 1 { adamw.weight_decay } else { 0.0 };
        for (index, gradient) in parameter.gradient.iter().enumerate() {
            let gradient = f64::from(*gradient) * clip;
            let (first, second) = &mut parameter.moments[index];
            *first = adamw.beta1 * *first + (1.0 - adamw.beta1) * gradient;
            *second = adamw.beta2 * *second + (1.0 - adamw.beta2) * gradient * gradient;
            let first = *first / (1.0 - adamw.beta1.powi(step));
            let second = *second / (1.0 - adamw.beta2.powi(step));
            let weight = &mut parameter.weight[index];
            *weight -= LEARNING_RATE * decay * *weight;
            *weight -= LEARNING_RATE * first / (second.sqrt() + adamw.epsilon);
        }
    }
    norm
}

struct Parameter {
    name: String,
    shape: Vec<usize>,
    trainable: bool,
    weight: Vec<f64>,
    gradient: Vec<f32>,
    moments: Vec<(f64, f64)>,
}

impl Parameter {
    fn new((name, shape, values): (String, Vec<usize>, Vec<f32>)) -> Self {
        Parameter {
            name,
            shape,
            trainable: true,
            moments: vec![(0.0, 0.0); values.len()],
            weight: values.into_iter().map(f64::from).collect(),
            gradient: Vec::new(),
        }
    }

    fn weight_f32(&self) -> Vec<f32> {
        self.weight.iter().map(|value| *value as f32).collect()
    }
}

/// Visits all parameters of a decoder under the names that the sharded decoder uses: those of embedding and head
/// have no prefix.
fn visit<R: Read>(decoder: &Decoder, visit: &mut Visit<'_, R>) {
    decoder.embed.visit(visit);
    for (index, layer) in decoder.layers.iter().enumerate() {
        visit.prefix = format!("layers.{index}.");
        layer.visit(visit);
    }
    visit.prefix.clear();
    decoder.head.visit(visit);
}

/// Maps all parameters in the order of [`visit`].
fn map(decoder: Decoder, mapper: &mut SetWeights<'_>) -> Decoder {
    let Decoder { embed, layers, head } = decoder;
    let embed = embed.map(mapper);
    let layers = layers.into_iter().map(|layer| layer.map(mapper)).collect();
    Decoder { embed, layers, head: head.map(mapper) }
}

trait Read {
    fn read<const D: usize>(&mut self, name: String, value: Tensor<D>);
}

struct Visit<'a, R> {
    prefix: String,
    path: Vec<String>,
    read: &'a mut R,
}

impl<R: Read> ModuleVisitor for Visit<'_, R> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        // Enum variants are not part of names.
        if !container_type.starts_with("Enum:") {
            self.path.push(name.to_owned());
        }
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        if !container_type.starts_with("Enum:") {
            self.path.pop();
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let name = format!("{}{}", self.prefix, self.path.join("."));
        self.read.read(name, param.val());
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().try_to_vec().expect("f32 values")
}

/// Name, shape and values of every parameter.
struct Weights(Vec<(String, Vec<usize>, Vec<f32>)>);

impl Read for Weights {
    fn read<const D: usize>(&mut self, name: String, value: Tensor<D>) {
        self.0.push((name, value.dims().to_vec(), values(value)));
    }
}

/// Reads the gradient of every parameter; it is zero for a parameter that does not affect the loss.
struct ReadGradients {
    gradients: Gradients,
    found: Vec<Vec<f32>>,
}

impl Read for ReadGradients {
    fn read<const D: usize>(&mut self, _name: String, value: Tensor<D>) {
        let gradient = value.grad(&self.gradients).map(values);
        self.found.push(gradient.unwrap_or_else(|| vec![0.0; value.dims().iter().product()]));
    }
}

struct SetWeights<'a> {
    parameters: std::slice::Iter<'a, Parameter>,
    device: &'a Device,
}

impl ModuleMapper for SetWeights<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let parameter = self.parameters.next().expect("mapping meets what visiting met");
        let data = TensorData::new(parameter.weight_f32(), parameter.shape.clone());
        Param::initialized(param.id, Tensor::from_data(data, self.device).require_grad())
    }
}
