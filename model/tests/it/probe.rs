//! Probes: which tensors a pass shows, in which order, and that probing changes no result.

use std::sync::{Arc, Mutex};

use burn::tensor::{Device, Tensor, TensorData};
use kiln_model::ops::{Probe, Seen};
use kiln_model::{Context, Key, decoder};

use crate::decoder::tiny;

/// The bits of the loss and of a gradient.
type Bits = (Vec<u32>, Vec<u32>);

/// Runs a step of a small decoder with dropout, observed by `probe`.
fn step(probe: Option<Probe>) -> Bits {
    let device = Device::flex().autodiff();
    let model = crate::ops_support::decoder(&tiny(true), 3, &device);
    let tokens = |first: i32| {
        let ids: Vec<i32> = (first..first + 16).map(|id| id % 50).collect();
        Tensor::from_data(TensorData::new(ids, [2, 8]), &device)
    };
    let context = Context::training(Key::new(1), 0, 0.1).probed(probe);
    let loss = decoder::loss(&model, tokens(0), tokens(1), 1.0 / 16.0, &context);
    let bits =
        |data: TensorData| data.try_to_vec::<f32>().expect("f32").into_iter().map(f32::to_bits).collect();
    let value = bits(loss.clone().into_data());
    let gradients = loss.backward();
    let weight = model.embed.embed_tokens.weight.val().grad(&gradients).expect("a gradient");
    (value, bits(weight.into_data()))
}

#[test]
fn a_probed_pass_is_ordered_and_unchanged() {
    let shown = Arc::new(Mutex::new(Vec::new()));
    let to = shown.clone();
    let probe = Probe::new(move |seen: Seen<'_>| {
        let Seen { place, name, is_gradient, shape, values } = seen;
        assert_eq!(values.dims(), [shape.iter().product::<usize>()]);
        let of = if is_gradient { "gradient of " } else { "" };
        to.lock().expect("no panic").push((format!("{of}{place} {name}"), shape));
    });
    assert_eq!(step(Some(probe)), step(None));

    let shown = shown.lock().expect("no panic");
    let names: Vec<_> = shown.iter().map(|(name, _)| name.as_str()).collect();
    let forward = [
        "embed output",
        "layers.0 input",
        "layers.0.attention input",
        "layers.0.attention output",
        "layers.0.ffn input",
        "layers.0.ffn output",
        "layers.0 output",
    ];
    assert_eq!(names[..forward.len()], forward);
    let (forward, backward) = names.split_at(names.len() / 2);
    assert_eq!(forward.last(), Some(&"head output"));
    let mirrored: Vec<_> = forward.iter().rev().map(|name| format!("gradient of {name}")).collect();
    assert_eq!(backward, mirrored);
    for (name, shape) in shown.iter() {
        let expected: &[usize] = if name.ends_with("head output") { &[1] } else { &[2, 8, 16] };
        assert_eq!(shape, expected, "{name}");
    }
}
