//! Every fused operation beside its plain-burn reference, forward and backward, at the shapes of
//! preset 10m with 4 sequences of 256 tokens.
//!
//!     cargo bench -p kiln-benches --bench ops

use std::hint::black_box;

use burn::tensor::{Device, Tensor};
use criterion::{Criterion, criterion_group, criterion_main};
use kiln_benches::{normal, tokens};
use kiln_model::ops::{self, HeadLayout};

const BATCH: usize = 4;
const SEQ: usize = 256;
const D_MODEL: usize = 256;
const D_FF: usize = 688;
const HEADS: usize = 4;
const VOCAB: usize = 4_096;

/// A named way to compute the same thing.
type Variant<'a, const D: usize> = (&'a str, &'a dyn Fn(&Device) -> Tensor<D>);

/// Times `forward` followed by backward from the sum of its output.
fn both<const D: usize>(criterion: &mut Criterion, group: &str, variants: [Variant<'_, D>; 2]) {
    let device = Device::flex().autodiff();
    let mut group = criterion.benchmark_group(group);
    group.sample_size(20);
    for (name, forward) in variants {
        group.bench_function(name, |bencher| {
            bencher.iter(|| black_box(forward(&device).sum().backward()));
        });
    }
    group.finish();
}

fn linear(criterion: &mut Criterion) {
    let inputs = |device: &Device| {
        let x = normal("x", [BATCH, SEQ, D_MODEL], device).require_grad();
        (x, normal("w", [D_MODEL, D_FF], device).require_grad())
    };
    let fused = |device: &Device| {
        let (x, w) = inputs(device);
        ops::linear(x, w, None)
    };
    let reference = |device: &Device| {
        let (x, w) = inputs(device);
        ops::linear_reference(x, w, None)
    };
    both(criterion, "linear", [("fused", &fused), ("reference", &reference)]);
}

fn rms_norm(criterion: &mut Criterion) {
    let inputs = |device: &Device| {
        let x = normal("x", [BATCH, SEQ, D_MODEL], device).require_grad();
        (x, normal("w", [D_MODEL], device).require_grad())
    };
    let fused = |device: &Device| {
        let (x, w) = inputs(device);
        ops::rms_norm(x, w, 1e-5)
    };
    let reference = |device: &Device| {
        let (x, w) = inputs(device);
        ops::rms_norm_reference(x, w, 1e-5)
    };
    both(criterion, "rms_norm", [("fused", &fused), ("reference", &reference)]);
}

fn swiglu(criterion: &mut Criterion) {
    let input =
        |name: &str, device: &Device| normal(name, [BATCH, SEQ, D_FF], device).require_grad();
    let fused = |device: &Device| ops::swiglu(input("gate", device), input("up", device));
    let reference =
        |device: &Device| ops::swiglu_reference(input("gate", device), input("up", device));
    both(criterion, "swiglu", [("fused", &fused), ("reference", &reference)]);
}

fn attention(criterion: &mut Criterion) {
    let input = |name: &str, device: &Device| {
        normal(name, [BATCH, SEQ, HEADS, D_MODEL / HEADS], device).require_grad()
    };
    let fused = |device: &Device| {
        ops::causal_attention(input("q", device), input("k", device), input("v", device))
    };
    let reference = |device: &Device| {
        ops::causal_attention_reference(input("q", device), input("k", device), input("v", device))
    };
    both(criterion, "causal_attention", [("fused", &fused), ("reference", &reference)]);
}

fn cross_entropy(criterion: &mut Criterion) {
    let rows = BATCH * SEQ;
    let run = |device: &Device, fused: bool| {
        let hidden = normal("hidden", [rows, D_MODEL], device).require_grad();
        let weight = normal("weight", [VOCAB, D_MODEL], device).require_grad();
        let targets = tokens("targets", 1, rows, VOCAB, device).reshape([rows]);
        let op =
            if fused { ops::linear_cross_entropy } else { ops::linear_cross_entropy_reference };
        op(hidden, weight, HeadLayout::VocabRows, targets, 1.0 / rows as f64)
    };
    both(
        criterion,
        "linear_cross_entropy",
        [("fused", &|device| run(device, true)), ("reference", &|device| run(device, false))],
    );
}

criterion_group!(benches, linear, rms_norm, swiglu, attention, cross_entropy);
criterion_main!(benches);
