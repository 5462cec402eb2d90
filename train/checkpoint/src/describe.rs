//! Descriptions of checkpoints for `kiln inspect`.

use std::fmt::Display;

use kiln_model::{ModelConfig, MoeConfig};
use kiln_sys::words::{number_of, size};

use super::{Checkpoint, Saved, TensorEntry};

/// Describes a checkpoint: the position of its run, its files, and each parameter in one line.
pub fn describe(checkpoint: &Checkpoint) -> String {
    let manifest = checkpoint.manifest();
    let state = &manifest.state;
    let model = &state.model;
    let mut lines = vec![
        format!(
            "{}: {} checkpoint of {}, step {}, {} tokens, next sample {}{}",
            checkpoint.folder().display(),
            manifest.format,
            number_of(manifest.ranks, "rank"),
            state.step,
            state.tokens,
            state.next_sample,
            match state.skipped {
                0 => String::new(),
                skipped => format!(", {} skipped", number_of(skipped, "update")),
            }
        ),
        model_line(model, manifest.num_parameters(), state.context_length),
        format!("architecture: {}", manifest.architecture),
        format!("optimizer: {}", manifest.optimizer),
        format!("files: {}, {}", manifest.files.len(), size(manifest.bytes())),
    ];
    lines.extend(
        manifest.base.as_ref().map(|base| format!("adapters of the model in {}", base.path.display())),
    );
    let weights = || manifest.tensors.iter().filter(|tensor| tensor.saved == Saved::Weight);
    let moments = |weight: &TensorEntry| {
        manifest.tensors.iter().filter(|t| t.name == weight.name && t.saved != Saved::Weight).count()
    };
    let width = weights().map(|tensor| tensor.name.len()).max().unwrap_or(0).max(4);
    lines.push(format!("{:width$}  {:5}  {:16}  {:>6}  moments", "name", "dtype", "shape", "chunks"));
    for tensor in weights() {
        lines.push(format!(
            "{:width$}  {:5}  {:16}  {:>6}  {}",
            tensor.name,
            tensor.dtype,
            format!("{:?}", tensor.shape),
            tensor.chunks.len(),
            moments(tensor)
        ));
    }
    lines.join("\n")
}

pub(crate) fn model_line(model: &ModelConfig, parameters: impl Display, context_length: usize) -> String {
    format!("{}, context {context_length}", shape_line(model, parameters))
}

/// Describes the shape of a model in one line, without its context length.
pub fn shape_line(model: &ModelConfig, parameters: impl Display) -> String {
    let ModelConfig { vocab_size, d_model, layers, heads, kv_heads, d_ff, .. } = model;
    let tied = if model.tie_embeddings { ", tied" } else { "" };
    let experts = model.moe.as_ref().map_or_else(String::new, |moe| {
        let MoeConfig { experts, expert_d_ff, experts_per_token, shared_expert_d_ff, .. } = moe;
        let shared =
            shared_expert_d_ff.map_or_else(String::new, |width| format!(" and a shared one of {width}"));
        format!(", {experts} experts of width {expert_d_ff}{shared}, {experts_per_token} per token")
    });
    let pattern = model.window_pattern.as_ref().map_or_else(String::new, |pattern| format!(" ({pattern})"));
    let window = model.window.map_or_else(String::new, |window| format!(", window {window}{pattern}"));
    format!(
        "model: {parameters} parameters, vocabulary {vocab_size}, d_model {d_model}, {layers} layers, \
         {heads} heads / {kv_heads} kv, d_ff {d_ff}{experts}{tied}{window}"
    )
}
