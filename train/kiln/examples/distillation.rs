//! Distillation (Hinton et al., 2015) as an objective: the Kullback-Leibler divergence from a frozen teacher's
//! distribution of each token. The teacher may have another shape, but has the same tokenizer.
//!
//!     cargo run --release --example distillation -- train configs/debug.toml --set loss.kind=distillation \
//!         --set loss.frozen.teacher=runs/large

use kiln::burn::tensor::FloatDType;
use kiln::burn::tensor::activation::{log_softmax, softmax};
use kiln::prelude::*;

kiln::allocator!();

struct Distillation {
    teacher: FrozenModel,
}

impl Objective for Distillation {
    fn loss(&self, pass: &Pass<'_>, batch: &TokenBatch, cx: &ObjectiveContext<'_>) -> Tensor<1> {
        let wanted = cx.frozen(&self.teacher).logits(&batch.inputs).cast(FloatDType::F32);
        let logits = cx.logits(pass, batch.inputs.clone()).cast(FloatDType::F32);
        let difference = log_softmax(wanted.clone(), 2) - log_softmax(logits, 2);
        let divergence = (softmax(wanted, 2) * difference).sum_dim(2).squeeze_dim::<2>(2);
        (divergence * batch.weights()).sum().mul_scalar(cx.scale())
    }
}

fn main() -> std::process::ExitCode {
    kiln::cli::main(
        Registry::default()
            .objective("distillation", |init| Ok(Distillation { teacher: init.frozen_model("teacher")? })),
    )
}
