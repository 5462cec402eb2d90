//! An optimizer with state of whole matrices: Shampoo for the matrices of blocks, AdamW for the rest.
//!
//!     cargo run --release --example shampoo -- train configs/quickstart.toml --set optim.kind=shampoo

use kiln::prelude::*;

kiln::allocator!();

/// Shampoo (Gupta et al., 2018) with running means: L^(-1/4) G R^(-1/4), where L and R are the means of G Gᵀ and Gᵀ G.
#[derive(Debug)]
struct Shampoo {
    weight_decay: f64,
}

/// Share of the means that each step keeps, and steps between computations of the roots after as many steps.
const KEPT: f64 = 0.95;
const EVERY: u64 = 10;

fn shampoo(init: OptimizerInit) -> Result<Optimizer, ConfigError> {
    let is_matrix = |name: &str, shape: &[usize]| name.starts_with("layers.") && shape.len() >= 2;
    let shampoo = Shampoo { weight_decay: init.section.weight_decay };
    Ok(Optimizer::from(init.section.adamw()).with_rule(shampoo, is_matrix))
}

/// Adds G Gᵀ of G `[matrices, n, m]` to the mean in the first slot. Returns the second: its root when last computed.
fn precondition(step: u64, slots: &mut [Tensor<3>], g: Tensor<3>) -> Tensor<3> {
    slots[0] = slots[0].clone() * KEPT + g.clone().matmul(g.transpose()) * (1.0 - KEPT);
    if step < EVERY || step.is_multiple_of(EVERY) {
        slots[1] = inverse_fourth_root(slots[0].clone() / (1.0 - KEPT.powf(step as f64)));
    }
    slots[1].clone()
}

/// Returns A^(-1/4) of the matrices A `[matrices, n, n]`, from the coupled Newton iteration.
fn inverse_fourth_root(a: Tensor<3>) -> Tensor<3> {
    let identity = Tensor::<2>::eye(a.dims()[1], &a.device()).unsqueeze::<3>();
    let norm = a.clone().powi_scalar(2).sum_dim(1).sum_dim(2).sqrt().clamp_min(1e-30);
    // A X⁴, which becomes the identity while X becomes the root.
    let mut product = (a / norm.clone() + identity.clone() * 1e-4) * 2.5;
    let mut root = (norm / 2.5).powf_scalar(-0.25) * identity.clone();
    for _ in 0..20 {
        let factor = identity.clone() * 1.25 - product.clone() * 0.25;
        let square = factor.clone().matmul(factor.clone());
        product = square.clone().matmul(square).matmul(product);
        root = root.matmul(factor);
    }
    root
}

impl Rule for Shampoo {
    fn name(&self) -> &str {
        "shampoo"
    }

    fn settings(&self, shape: &[usize]) -> Settings {
        // Updates are as large as AdamW's.
        let side = shape.iter().rev().take(2).max().copied().unwrap_or(1) as f64;
        Settings { weight_decay: self.weight_decay, scale: 0.2 * side.sqrt(), ..Settings::default() }
    }

    fn owned_slots(&self) -> &[&'static str] {
        &["left", "left_root", "right", "right_root"]
    }

    fn owned_shape(&self, slot: &str, shape: &[usize]) -> Vec<usize> {
        let from_end = if slot.starts_with("left") { 2 } else { 1 };
        let side = shape.len().checked_sub(from_end).map_or(1, |at| shape[at]);
        [&shape[..shape.len().saturating_sub(2)], &[side, side]].concat()
    }

    fn transform_owned(&self, step: &UpdateStep, run: OwnedRun<'_>) -> Tensor<3> {
        let gradient = run.matrices * step.gradient_factor;
        let (left, right) = run.slots.split_at_mut(2);
        let left = precondition(step.step, left, gradient.clone());
        let right = precondition(step.step, right, gradient.clone().transpose());
        left.matmul(gradient).matmul(right)
    }

    fn update(&self, step: &UpdateStep, run: ShardRun<'_>) {
        let rate = (step.learning_rate * run.settings.learning_rate * run.settings.scale) as f32;
        let kept = run.settings.kept(step.learning_rate);
        for (weight, update) in run.weights.iter_mut().zip(run.gradient) {
            *weight = *weight * kept - rate * update;
        }
    }
}

fn main() -> std::process::ExitCode {
    kiln::cli::main(Registry::default().optimizer("shampoo", shampoo))
}
