use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::RopeScaling;
use kiln_model::ops::{RotaryFrequencies, rotary, rotary_reference};

use crate::ops_support::*;

type Rotary = fn(Tensor<4>, RotaryFrequencies, usize) -> Tensor<4>;

fn plain() -> RotaryFrequencies {
    RotaryFrequencies::new(10_000.0)
}

/// The parameters of Llama 3.1.
fn llama3() -> RotaryFrequencies {
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    RotaryFrequencies { theta: 500_000.0, scaling: Some(scaling) }
}

fn operation(f: Rotary, shape: [usize; 4], offset: usize) -> impl Operation + Sync {
    operation_with(f, plain(), shape, offset)
}

fn operation_with(
    f: Rotary,
    frequencies: RotaryFrequencies,
    shape: [usize; 4],
    offset: usize,
) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let y = f(t[0].clone().reshape(shape), frequencies, offset);
        y.reshape([shape.iter().product::<usize>()])
    }
}

#[test]
fn rotary_matches_reference() {
    for (shape, offset) in
        [([1, 1, 1, 2], 0), ([2, 33, 6, 10], 0), ([2, 5, 2, 64], 7), ([3, 40, 4, 64], 1000)]
    {
        let (op, reference) = (operation(rotary, shape, offset), operation(rotary_reference, shape, offset));
        assert_matches(op, reference, &[shape.iter().product()], 1e-6);
    }
}

#[test]
fn rotary_is_sound() {
    let shape = [2, 3, 2, 4];
    assert_sound(operation(rotary, shape, 2), &[48]);
    let shape = [2, 200, 4, 64];
    assert_same_bits(operation(rotary, shape, 0), &[shape.iter().product()]);
}

/// Rows computed with an offset are the rows of the whole sequence, even if the table must grow.
#[test]
fn rotary_continues_a_sequence() {
    let (seq, frequencies) = (100, RotaryFrequencies::new(777.0));
    let x = flat(&normal(seq * 2 * 8, 1), FloatDType::F32, &Device::flex()).reshape([1, seq, 2, 8]);
    let mut rows = Vec::new();
    for t in 0..seq {
        rows.extend(values(rotary(x.clone().narrow(1, t, 1), frequencies, t)));
    }
    assert_eq!(rows, values(rotary(x, frequencies, 0)));
}

/// The product of a rotated query and a rotated key depends only on the distance of their positions.
#[test]
fn rotary_is_relative() {
    let at = |seed, position| {
        let x = flat(&normal(64, seed), FloatDType::F64, &Device::flex()).reshape([1, 1, 1, 64]);
        rotary(x, plain(), position)
    };
    let product = |p, q| values((at(1, p) * at(2, q)).sum())[0];
    assert!((product(5, 2) - product(105, 102)).abs() < 1e-10);
    assert!((product(5, 2) - product(5, 3)).abs() > 1e-3);
}

#[test]
#[should_panic(expected = "heads of 5 values")]
fn rotary_rejects_odd_heads() {
    rotary(Tensor::ones([1, 1, 1, 5], &Device::flex()), plain(), 0);
}

#[test]
fn stretched_rotary_matches_reference() {
    let linear = RotaryFrequencies {
        scaling: Some(RopeScaling::Linear { factor: 4.0 }),
        ..RotaryFrequencies::new(10_000.0)
    };
    for frequencies in [linear, llama3()] {
        let shape = [2, 40, 2, 64];
        let op = operation_with(rotary, frequencies, shape, 100);
        let reference = operation_with(rotary_reference, frequencies, shape, 100);
        assert_matches(op, reference, &[shape.iter().product()], 1e-6);
        assert_sound(operation_with(rotary, frequencies, [2, 3, 2, 4], 2), &[48]);
    }
}

/// Scaled positions are rotated like the positions that they are scaled to. The table differs from the table without
/// scaling.
#[test]
fn linear_scaling_interpolates_positions() {
    let scaling = Some(RopeScaling::Linear { factor: 4.0 });
    let stretched = RotaryFrequencies { scaling, ..plain() };
    let x = flat(&normal(64, 1), FloatDType::F64, &Device::flex()).reshape([1, 1, 1, 64]);
    let at = |frequencies, position| values(rotary(x.clone(), frequencies, position));
    assert_close(&at(stretched, 4 * 37), &at(plain(), 37), 1e-12, "position 37");
    assert_ne!(at(stretched, 37), at(plain(), 37));
}

/// Values of Llama 3.1 8B (heads of 128, theta 500000, factor 8, 1 to 4 turns in 8192 tokens), computed by
/// hand from the rule: plane `j` has frequency `500000^(−j/64)` and turns `8192 · frequency / 2π` times
/// within the original context.
#[test]
fn llama3_scaling_follows_its_rule() {
    let frequency = |j| llama3().frequency(j, 128);
    let close = |j: usize, expected: f64| {
        let actual = frequency(j);
        assert!((actual / expected - 1.0).abs() < 1e-9, "plane {j}: {actual} not {expected}");
    };
    close(0, 1.000000000000e+00);
    close(28, 3.211445994753e-03);
    close(29, 2.166570763503e-03);
    close(32, 5.248461609930e-04);
    close(34, 1.785078127680e-04);
    close(35, 9.556212353965e-05);
    close(63, 3.068925988915e-07);
    // Planes up to 28 keep their frequency, planes from 35 on are divided, and the rest is in between.
    let plain = RotaryFrequencies::new(500_000.0);
    for j in 0..64 {
        let ratio = frequency(j) / plain.frequency(j, 128);
        assert_eq!(ratio == 1.0, j <= 28, "plane {j}");
        assert_eq!((ratio * 8.0 - 1.0).abs() < 1e-12, j >= 35, "plane {j}");
    }
}

#[test]
fn rotary_depends_on_every_part_of_the_scaling() {
    let x = flat(&normal(64, 1), FloatDType::F64, &Device::flex()).reshape([1, 1, 1, 64]);
    let llama3 = |factor, low_freq_factor, high_freq_factor, original_context| RopeScaling::Llama3 {
        factor,
        low_freq_factor,
        high_freq_factor,
        original_context,
    };
    let scalings = [
        None,
        Some(RopeScaling::Linear { factor: 4.0 }),
        Some(RopeScaling::Linear { factor: 8.0 }),
        Some(llama3(8.0, 1.0, 4.0, 8192)),
        Some(llama3(4.0, 1.0, 4.0, 8192)),
        Some(llama3(8.0, 2.0, 4.0, 8192)),
        Some(llama3(8.0, 1.0, 8.0, 8192)),
        Some(llama3(8.0, 1.0, 4.0, 4096)),
    ];
    let rotated: Vec<_> = scalings
        .into_iter()
        .map(|scaling| values(rotary(x.clone(), RotaryFrequencies { theta: 10_000.0, scaling }, 5)))
        .collect();
    for (i, a) in rotated.iter().enumerate() {
        assert!(rotated[..i].iter().all(|b| a != b), "{:?} has a table of its own", scalings[i]);
    }
}
