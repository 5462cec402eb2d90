//! Your own programs, `train/kiln/examples/own_loop.rs` and `train/kiln/examples/own_data.rs`: `kiln` reads the
//! files of the first program, and the second program has the commands of `kiln`.

use crate::support::{Workspace, example};

/// Trains through the last of `steps` with the example, and returns its lines about steps.
fn train(workspace: &Workspace, out: &str, strategy: &str, steps: &str) -> Vec<String> {
    let ended = workspace.run(&example("own_loop"), &["data", out, strategy, steps]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.stdout.lines().filter(|line| line.starts_with("step")).map(str::to_owned).collect()
}

#[test]
fn commands_read_what_a_loop_of_your_own_leaves() {
    let workspace = Workspace::new();
    let train = |out: &str, strategy: &str, steps: &str| train(&workspace, out, strategy, steps);
    let full = train("run", "FULL_SHARD", "20");
    let loss =
        |line: &str| -> Option<f64> { line.split_once("loss ")?.1.split_whitespace().next()?.parse().ok() };
    let losses: Vec<f64> = full.iter().filter_map(|line| loss(line)).collect();
    assert_eq!(losses.len(), 20, "{full:?}");
    assert!(losses[19] < losses[0] - 0.5, "it learns: {losses:?}");
    assert_eq!(train("none", "NO_SHARD", "20"), full);
    // The program resumes from a checkpoint, also under another strategy.
    assert_eq!(train("again", "FULL_SHARD", "8"), full[..8]);
    assert_eq!(train("again", "SHARD_GRAD_OP", "14"), full[8..14]);
    assert_eq!(train("again", "FULL_SHARD", "20"), full[14..]);
    let succeed = |arguments: &[&str]| {
        let ended = workspace.kiln(arguments);
        assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
        ended.stdout
    };
    assert!(succeed(&["eval", "--checkpoint", "run", "--data", "data", "--ranks", "2"]).contains("loss"));
    succeed(&["generate", "--checkpoint", "run", "--prompt", "a", "--max-tokens", "4"]);
    assert!(succeed(&["inspect", "run"]).contains("adamw"));
}

/// The example prints enough digits to tell all f32 numbers of this size apart.
#[test]
fn a_loop_from_scratch_has_the_bits_of_the_stock_run() {
    let workspace = Workspace::new();
    let same = [
        ("model.preset", "'10m'"),
        ("model.d_model", "64"),
        ("model.kv_heads", "4"),
        ("model.d_ff", "128"),
        ("data.seq_len", "64"),
        ("train.steps", "8"),
        ("train.micro_batch", "4"),
        ("optim.lr", "3e-3"),
        ("optim.schedule", "'constant'"),
        ("optim.warmup_steps", "0"),
    ];
    workspace.config("run.toml", &same);
    workspace.succeed(&["train", "run.toml", "--out", "stock"]);
    let stock = workspace.steps("stock").into_iter();
    let line = |(step, loss, norm)| format!("step {step:2}  loss {loss:.9}  norm {norm:.9}");
    assert_eq!(train(&workspace, "own", "FULL_SHARD", "8"), stock.map(line).collect::<Vec<_>>());
}

#[test]
fn text_of_your_own_has_every_command() {
    let workspace = Workspace::new();
    let succeed = |arguments: &[&str]| {
        let ended = workspace.run(&example("own_data"), arguments);
        assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
        ended.stdout
    };
    succeed(&["make", "sums"]);
    let train = |out: &str, more: &[&str]| {
        let base = ["train", "run.toml", "--ranks", "2", "--out", out, "--set", "data.path=sums"];
        succeed(&[&base[..], more].concat());
        workspace.steps(out)
    };
    let full = train("full", &["--set", "checkpoint.every=2"]);
    let none = ["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"];
    assert_eq!(train("none", &none), full);
    assert_eq!(train("again", &["--resume", "full/checkpoints/fsdp_cpt2"]), full[2..]);
    succeed(&["eval", "--checkpoint", "full", "--ranks", "2"]);
    succeed(&["generate", "--checkpoint", "full", "--prompt", "12+7=", "--max-tokens", "4"]);
    succeed(&["inspect", "full"]);
    let again = workspace.run(&example("own_data"), &["make", "sums"]);
    assert_eq!(again.code, Some(1), "text that is there is not overwritten: {again:?}");
}
