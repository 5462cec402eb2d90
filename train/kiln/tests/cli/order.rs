//! The samples of each step, observed from outside: with a learning rate of zero the weights do not change,
//! and the loss of a step depends on its samples alone.

use crate::support::{SEQ_LEN, TRAIN_TOKENS, Workspace, tokens};

/// Sequences per step.
const BATCH: usize = 8;

/// Returns the losses of `steps` steps over `train`, with constant weights.
fn losses(workspace: &Workspace, out: &str, train: &[u16], shuffle: bool, steps: usize) -> Vec<f64> {
    workspace.write_data("data", train);
    workspace.config(
        "run.toml",
        &[
            ("optim.lr", "0.0"),
            ("optim.warmup_steps", "0"),
            ("data.shuffle", if shuffle { "true" } else { "false" }),
            ("train.steps", &steps.to_string()),
        ],
    );
    workspace.succeed(&["train", "run.toml", "--out", out]);
    workspace.losses(out)
}

#[test]
fn without_shuffling_a_step_is_made_of_the_next_samples() {
    let workspace = Workspace::new();
    let all = tokens(TRAIN_TOKENS);
    let straight = losses(&workspace, "all", &all, false, 5);
    for (step, loss) in straight.iter().enumerate() {
        // Sample k is the tokens k * L ..= (k + 1) * L.
        let first = step * BATCH * SEQ_LEN;
        let part = &all[first..=first + BATCH * SEQ_LEN];
        let out = format!("step{step}");
        assert_eq!(losses(&workspace, &out, part, false, 1), [*loss], "step {step}");
    }
}

/// An epoch contains every sample once, so it has the same mean in any order.
#[test]
fn shuffling_changes_the_order_of_an_epoch_and_nothing_else() {
    let workspace = Workspace::new();
    let epoch = tokens(6 * BATCH * SEQ_LEN + 1);
    let straight = losses(&workspace, "straight", &epoch, false, 12);
    let shuffled = losses(&workspace, "shuffled", &epoch, true, 12);
    assert_eq!(straight[..6], straight[6..]);
    assert_ne!(shuffled[..6], shuffled[6..]);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    for epoch in [&shuffled[..6], &shuffled[6..]] {
        assert_ne!(*epoch, straight[..6]);
        let (a, b) = (mean(epoch), mean(&straight[..6]));
        assert!((a - b).abs() <= 1e-6 * b, "{a} and {b}");
    }
}
