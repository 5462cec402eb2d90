//! Your own program, `train/kiln/examples/own_loss.rs`, has every command on its training loss, and `kiln` reports
//! that it lacks the loss.

use crate::support::{Workspace, assert_same_curve, example};

#[test]
fn a_loss_of_your_own_has_every_command() {
    let workspace = Workspace::new();
    let program = example("own_loss");
    let succeed = |arguments: &[&str]| {
        let ended = workspace.run(&program, arguments);
        assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
        assert_eq!(ended.stderr, "", "{arguments:?}");
        ended.stdout
    };
    let smoothed = ["--set", "loss.kind=label_smoothing", "--set", "loss.extra.smoothing=0.2"];
    let train = |out: &str, more: &[&str]| {
        succeed(&[&["train", "run.toml", "--out", out][..], &smoothed, more].concat());
        workspace.steps(out)
    };
    let full = train("full", &["--set", "checkpoint.every=2"]);
    let none = ["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"];
    assert_eq!(train("none", &none), full);
    assert_eq!(train("grad_op", &["--set", "shard.strategy=SHARD_GRAD_OP"]), full);
    let processes = ["launch", "--nproc-per-node", "2", "--", "train", "run.toml", "--out", "processes"];
    succeed(&[&processes[..], &smoothed].concat());
    assert_eq!(workspace.steps("processes"), full);
    assert_eq!(train("again", &["--resume", "full/checkpoints/fsdp_cpt2"]), full[2..]);
    let near = |steps: &[(u64, f64, f64)], what: &str| {
        assert_eq!(steps.len(), full.len(), "{what}");
        for ((_, loss, _), (_, expected, _)) in steps.iter().zip(&full) {
            assert!((loss - expected).abs() <= 1e-5 * expected, "{what}: {loss} {expected}");
        }
    };
    near(&train("one", &["--ranks", "1"]), "one rank");
    near(&train("block", &["--set", "shard.recompute=block", "--set", "train.micro_batch=1"]), "recompute");
    // Without smoothing, the training loss is the cross-entropy, which every evaluation computes. Also tested with
    // a head that is the transposed embedding.
    for tied in ["true", "false"] {
        let tied = format!("model.tie_embeddings={tied}");
        let (stock, plain) = (format!("stock {tied}"), format!("plain {tied}"));
        workspace.succeed(&["train", "run.toml", "--out", &stock, "--set", &tied]);
        let steps = train(&plain, &["--set", "loss.extra.smoothing=0.0", "--set", &tied]);
        assert_same_curve(&tied, &steps, &workspace.steps(&stock), 1e-5);
        let (loss, expected) = (workspace.val_loss(&plain), workspace.val_loss(&stock));
        assert!((loss - expected).abs() <= 1e-5 * expected, "{loss} {expected}");
        assert!(steps.iter().zip(&full).all(|(step, smoothed)| step.1 != smoothed.1), "{steps:?}");
    }

    // Every program can read the weights.
    assert!(workspace.succeed(&["eval", "--checkpoint", "full"]).contains("loss"));
    workspace.succeed(&["generate", "--checkpoint", "full", "--prompt", "a", "--max-tokens", "4"]);
    succeed(&["inspect", "full", "--verify"]);
}

#[test]
fn what_is_not_there_is_named() {
    let workspace = Workspace::new();
    let refused = |settings: &[&str], expected: &str| {
        let said =
            workspace.run(&example("own_loss"), &[&["train", "run.toml", "--out", "run"], settings].concat());
        assert_eq!(said.code, Some(2), "{said:?}");
        assert!(said.stderr.contains(expected), "{expected}: {said:?}");
        assert!(!workspace.path("run").exists(), "nothing was begun");
    };
    refused(&["--set", "loss.kind=focal"], "only \"cross_entropy\", \"label_smoothing\"");
    let own = ["--set", "loss.kind=label_smoothing"];
    refused(
        &[&own[..], &["--set", "loss.extra.smoothness=0.2"]].concat(),
        "loss.extra: unknown field `smoothness`",
    );
    refused(&[&own[..], &["--set", "train.z_loss=1e-4"]].concat(), "is a part of the cross-entropy");
    refused(&["--set", "loss.extra.smoothing=0.2"], "the cross-entropy has no settings");
    // Refused before any data is read.
    workspace.write("text.txt", "some text ".repeat(100));
    refused(
        &["--set", "loss.kind=focal", "--set", "data.path=new", "--set", "data.text=[\"text.txt\"]"],
        "this program has no such loss",
    );
    assert!(!workspace.path("new").exists(), "no data were prepared");
    let stock = workspace.kiln(&[&["train", "run.toml", "--out", "run"], &own[..]].concat());
    assert_eq!(stock.code, Some(2), "{stock:?}");
    assert!(
        stock.stderr.contains("loss.kind = \"label_smoothing\": this program has no such loss"),
        "{stock:?}"
    );
}
