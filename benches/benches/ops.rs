//! Times every fused operation and its plain-burn reference, forward and backward, at the shapes of
//! preset 10m with 4 sequences of 256 tokens.
//!
//!     cargo bench -p kiln-benches --bench ops --config 'profile.bench.package.burn-flex.opt-level=3'
//!
//! The last argument optimises the references, which `Cargo.toml` does not. It rebuilds burn.

use std::hint::black_box;

use burn::tensor::{Device, Tensor};
use criterion::{Criterion, criterion_group, criterion_main};
use kiln_benches::{normal, tokens};
use kiln_model::ops::{self, HeadLayout, RotaryFrequencies};

const BATCH: usize = 4;
const SEQ: usize = 256;
const D_MODEL: usize = 256;
const D_FF: usize = 688;
const HEADS: usize = 4;
const VOCAB: usize = 4_096;

/// A named way to compute the same thing.
type Variant<'a, const D: usize> = (&'a str, &'a dyn Fn() -> Tensor<D>);

/// Times each variant's forward followed by backward from the sum of its output.
fn both<const D: usize>(criterion: &mut Criterion, group: &str, variants: [Variant<'_, D>; 2]) {
    let mut group = criterion.benchmark_group(group);
    group.sample_size(20);
    for (name, forward) in variants {
        group.bench_function(name, |bencher| {
            bencher.iter(|| black_box(forward().sum().backward()));
        });
    }
    group.finish();
}

/// Returns a new leaf that shares the values of `tensor`.
fn leaf<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    tensor.clone().autodiff().require_grad()
}

fn input<const D: usize>(name: &str, shape: [usize; D]) -> Tensor<D> {
    normal(name, shape, &Device::flex())
}

fn linear(criterion: &mut Criterion) {
    let (x, w) = (input("x", [BATCH, SEQ, D_MODEL]), input("w", [D_MODEL, D_FF]));
    let fused = || ops::linear(leaf(&x), leaf(&w), None);
    let reference = || ops::linear_reference(leaf(&x), leaf(&w), None);
    both(criterion, "linear", [("fused", &fused), ("reference", &reference)]);
}

fn rms_norm(criterion: &mut Criterion) {
    let (x, w) = (input("x", [BATCH, SEQ, D_MODEL]), input("w", [D_MODEL]));
    let fused = || ops::rms_norm(leaf(&x), leaf(&w), 1e-5);
    let reference = || ops::rms_norm_reference(leaf(&x), leaf(&w), 1e-5);
    both(criterion, "rms_norm", [("fused", &fused), ("reference", &reference)]);
}

fn swiglu(criterion: &mut Criterion) {
    let (gate, up) = (input("gate", [BATCH, SEQ, D_FF]), input("up", [BATCH, SEQ, D_FF]));
    let fused = || ops::swiglu(leaf(&gate), leaf(&up));
    let reference = || ops::swiglu_reference(leaf(&gate), leaf(&up));
    both(criterion, "swiglu", [("fused", &fused), ("reference", &reference)]);
}

fn geglu(criterion: &mut Criterion) {
    let (gate, up) = (input("gate", [BATCH, SEQ, D_FF]), input("up", [BATCH, SEQ, D_FF]));
    let fused = || ops::geglu(leaf(&gate), leaf(&up));
    let reference = || ops::geglu_reference(leaf(&gate), leaf(&up));
    both(criterion, "geglu", [("fused", &fused), ("reference", &reference)]);
}

fn squared_relu(criterion: &mut Criterion) {
    let x = input("x", [BATCH, SEQ, D_FF]);
    let fused = || ops::squared_relu(leaf(&x));
    let reference = || ops::squared_relu_reference(leaf(&x));
    both(criterion, "squared_relu", [("fused", &fused), ("reference", &reference)]);
}

fn attention(criterion: &mut Criterion) {
    let [q, k, v] = ["q", "k", "v"].map(|name| input(name, [BATCH, SEQ, HEADS, D_MODEL / HEADS]));
    let fused = || ops::causal_attention(leaf(&q), leaf(&k), leaf(&v), None);
    let reference = || ops::causal_attention_reference(leaf(&q), leaf(&k), leaf(&v), None);
    both(criterion, "causal_attention", [("fused", &fused), ("reference", &reference)]);
}

/// Attention of one long sequence in windows of several sizes: its time grows with the window.
fn windows(criterion: &mut Criterion) {
    for seq in [2_048, 4_096] {
        let [q, k, v] = ["q", "k", "v"].map(|name| input(name, [1, seq, HEADS, D_MODEL / HEADS]));
        let mut group = criterion.benchmark_group(format!("attention_of_{seq}"));
        group.sample_size(10);
        let windows = [Some(128), Some(256), Some(512), Some(1_024), Some(2_048), None];
        for window in windows.into_iter().filter(|window| window.is_none_or(|window| window < seq)) {
            let name = window.map_or_else(|| "full".to_owned(), |window| format!("window_{window}"));
            group.bench_function(name, |bencher| {
                let attention = || ops::causal_attention(leaf(&q), leaf(&k), leaf(&v), window);
                bencher.iter(|| black_box(attention().sum().backward()));
            });
        }
        group.finish();
    }
}

fn rotary(criterion: &mut Criterion) {
    let x = input("x", [BATCH, SEQ, HEADS, D_MODEL / HEADS]);
    let frequencies = RotaryFrequencies { theta: 10_000.0, scaling: None };
    let fused = || ops::rotary(leaf(&x), frequencies, 0);
    let reference = || ops::rotary_reference(leaf(&x), frequencies, 0);
    both(criterion, "rotary", [("fused", &fused), ("reference", &reference)]);
}

fn embedding(criterion: &mut Criterion) {
    let weight = input("weight", [VOCAB, D_MODEL]);
    let ids = tokens("ids", BATCH, SEQ, VOCAB, &Device::flex().autodiff());
    let fused = || ops::embedding(leaf(&weight), ids.clone());
    let reference = || ops::embedding_reference(leaf(&weight), ids.clone());
    both(criterion, "embedding", [("fused", &fused), ("reference", &reference)]);
}

fn dropout(criterion: &mut Criterion) {
    let x = input("x", [BATCH, SEQ, D_MODEL]);
    let fused = || ops::dropout(leaf(&x), 0.1, 1, 0);
    let reference = || ops::dropout_reference(leaf(&x), 0.1, 1, 0);
    both(criterion, "dropout", [("fused", &fused), ("reference", &reference)]);
}

fn cross_entropy(criterion: &mut Criterion) {
    let rows = BATCH * SEQ;
    // Scaled as a head's weights are: wide logits would time subnormal numbers.
    let weight = input("weight", [VOCAB, D_MODEL]) * 0.02;
    let hidden = input("hidden", [rows, D_MODEL]);
    let device = Device::flex().autodiff();
    let targets = tokens("targets", 1, rows, VOCAB, &device).reshape([rows]);
    let run = |fused: bool| {
        let op = if fused { ops::linear_cross_entropy } else { ops::linear_cross_entropy_reference };
        let (hidden, weight) = (leaf(&hidden), leaf(&weight));
        op(hidden, weight, HeadLayout::VocabRows, targets.clone(), 1.0 / rows as f64)
    };
    let variants: [Variant<'_, 1>; 2] = [("fused", &|| run(true)), ("reference", &|| run(false))];
    both(criterion, "linear_cross_entropy", variants);
}

criterion_group!(
    benches,
    linear,
    rms_norm,
    swiglu,
    geglu,
    squared_relu,
    rotary,
    embedding,
    dropout,
    attention,
    windows,
    cross_entropy
);
criterion_main!(benches);
