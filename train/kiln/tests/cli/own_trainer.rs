//! Your own program, `train/kiln/examples/own_trainer.rs`: a training loop on the stock trainer. Where the loop does
//! the same as the stock loop, it leaves the same files; and the values of `[experiment]` stay with the checkpoint.

use kiln::burn::Tensor;
use kiln::objective::{Objective, ObjectiveContext, TokenBatch};
use kiln::registry::Registry;
use kiln::run::{RunOptions, Trainer, train_with};
use kiln::sharded::Pass;
use kiln_shard::StateKind;
use rustix::process::Signal;
use serde_json::Value as Json;

use crate::support::{Ended, Workspace, example, signal};

fn run(workspace: &Workspace, arguments: &[&str]) -> Ended {
    workspace.run(&example("own_trainer"), arguments)
}

fn succeed(workspace: &Workspace, arguments: &[&str]) -> String {
    let ended = run(workspace, arguments);
    assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
    ended.stdout
}

#[test]
fn a_loop_on_the_trainer_leaves_what_the_stock_loop_leaves() {
    let workspace = Workspace::new();
    let every = ["--set", "eval.every=2", "--set", "checkpoint.every=2"];
    workspace.succeed(&[&["train", "run.toml", "--out", "stock"][..], &every].concat());
    let experiment = ["--set", "experiment.every=2", "--set", "experiment.patience=10"];
    succeed(&workspace, &[&["train", "run.toml", "--out", "own"][..], &experiment].concat());
    assert_eq!(workspace.steps("own"), workspace.steps("stock"));
    let evaluations = |out: &str| -> Vec<_> {
        let lines = workspace.metrics(out).into_iter();
        let of = |line: Json| {
            Some((line["step"].as_u64()?, line.get("val_loss")?.clone(), line["val_tokens"].clone()))
        };
        lines.filter_map(of).collect()
    };
    assert_eq!(evaluations("own"), evaluations("stock"));
    assert_eq!(evaluations("own").len(), 2);
    assert_eq!(workspace.checkpoints("own"), workspace.checkpoints("stock"));
    let none = ["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"];
    succeed(&workspace, &[&["train", "run.toml", "--out", "none"][..], &none, &experiment].concat());
    assert_eq!(workspace.steps("none"), workspace.steps("stock"));
    succeed(&workspace, &["eval", "--checkpoint", "own", "--ranks", "2"]);
    succeed(&workspace, &["generate", "--checkpoint", "own", "--prompt", "a", "--max-tokens", "4"]);
    succeed(&workspace, &["inspect", "own", "--verify"]);
    let kept = workspace.text("own/checkpoints/fsdp_cpt4/config.toml");
    assert!(kept.contains("[experiment]") && kept.contains("patience = 10"), "{kept}");

    // The program resumes from its own checkpoint; so does `kiln`, which keeps the keys that it does not read.
    let processes = ["launch", "--nproc-per-node", "2", "--", "train", "run.toml", "--out", "again"];
    let from = ["--resume", "own/checkpoints/fsdp_cpt2"];
    succeed(&workspace, &[&processes[..], &experiment, &from].concat());
    assert_eq!(workspace.steps("again"), workspace.steps("stock")[2..]);
    let shown = workspace.succeed(&["config", "own/config.toml"]);
    assert!(shown.contains("[experiment]\nevery = 2\npatience = 10"), "{shown}");
}

#[test]
fn a_loop_on_the_trainer_may_end_before_the_last_step() {
    let workspace = Workspace::new();
    let settings = ["--set", "experiment.every=1", "--set", "experiment.patience=2", "--set", "optim.lr=0.0"];
    let said = succeed(&workspace, &[&["train", "run.toml", "--out", "run"][..], &settings].concat());
    assert!(said.contains("for 2 evaluations: that is enough"), "{said}");
    assert!(said.contains("done: 3 steps"), "{said}");
    assert_eq!(workspace.steps("run").len(), 3);
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt1", "fsdp_cpt3", "latest"]);
}

#[test]
fn a_loop_on_the_trainer_stops_when_it_is_asked_to() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("train.steps", "1000"), ("experiment.every", "1000")]);
    let mut command = workspace.command_of(&example("own_trainer"), &["train", "run.toml", "--out", "run"]);
    let child = command.spawn().expect("the program starts");
    workspace.wait_for_steps("run", 3);
    signal(&child, Signal::TERM);
    let ended = workspace.end(child);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert!(ended.stdout.contains("resume with: "), "{ended:?}");
    let steps = workspace.steps("run").len();
    assert_eq!(workspace.checkpoints("run"), [format!("fsdp_cpt{steps}"), "latest".to_owned()]);
    // Resumes to take a few more steps, and takes all of them.
    let more = format!("train.steps={}", steps + 3);
    succeed(&workspace, &["train", "run.toml", "--out", "run", "--resume", "latest", "--set", &more]);
    assert_eq!(workspace.steps("run").len(), steps + 3);
}

/// A failed save is retried at the end, and is an error if it fails again.
#[test]
fn a_loop_on_the_trainer_does_not_lose_its_last_step() {
    let workspace = Workspace::new();
    let settings = ["--set", "checkpoint.on_failure=continue", "--set", "checkpoint.format=full"];
    let every = ["--set", "experiment.every=4"];
    let arguments = [&["train", "run.toml", "--out", "run"][..], &settings, &every].concat();
    // Simulates a full disk for the save after step 4 and for the one in `finish`.
    let full_disk = ["-c", "trap '' XFSZ; ulimit -f 8; exec \"$0\" \"$@\""];
    let program = example("own_trainer");
    let program = program.to_str().expect("a path");
    let ended = workspace.run("sh".as_ref(), &[&full_disk[..], &[program], &arguments].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("training continues without this checkpoint"), "{ended:?}");
    assert!(!ended.stdout.contains("done: 4 steps"), "{ended:?}");
}

#[test]
fn errors_of_a_loop_say_what_is_wrong() {
    let workspace = Workspace::new();
    let ended = run(&workspace, &["train", "run.toml", "--out", "run", "--set", "experiment.patient=1"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("experiment: unknown field `patient`"), "{ended:?}");
}

/// A loop may evaluate twice in a step, such as with averaged weights. The log has the first of the two losses.
#[test]
fn only_the_first_evaluation_of_a_step_is_logged() {
    let workspace = Workspace::new();
    let data = format!("'{}'", workspace.path("data").display());
    let config = workspace.config("own.toml", &[("data.path", data.as_str()), ("train.steps", "3")]);
    let options = RunOptions { out: workspace.path("run").into(), alone: true, ..RunOptions::default() };
    let summary = train_with(config, &options, |mut trainer: Trainer<'_>| {
        while trainer.train_step()? {
            let first = trainer.evaluate()?;
            assert_eq!(trainer.evaluate()?, first);
        }
        let first = trainer.evaluate()?;
        let embedding = "embed_tokens.weight";
        let weights = trainer.engine().gather_parameter(embedding, StateKind::Weight)?.expect("weights");
        let others: Vec<_> = weights.iter().map(|weight| 2.0 * weight).collect();
        trainer.engine().load_parameter(embedding, StateKind::Weight, &others)?;
        assert_ne!(trainer.evaluate()?, first, "other weights");
        trainer.engine().load_parameter(embedding, StateKind::Weight, &weights)?;
        let summary = trainer.finish()?;
        assert_eq!(summary.val_loss, first);
        Ok(summary)
    });
    let val_loss = summary.expect("a run").val_loss;
    let metrics = workspace.metrics("run");
    let evaluations: Vec<_> = metrics.iter().filter(|line| line.get("val_loss").is_some()).collect();
    let steps: Vec<_> = evaluations.iter().filter_map(|line| line["step"].as_u64()).collect();
    assert_eq!(steps, [1, 2, 3]);
    assert_eq!(evaluations[2]["val_loss"].as_f64(), val_loss);
}

/// The cross-entropy, written as an objective, has the bits of the stock loss.
#[test]
fn a_step_may_have_another_objective() {
    let workspace = Workspace::new();
    let data = format!("'{}'", workspace.path("data").display());
    let config = || workspace.config("own.toml", &[("data.path", data.as_str())]);
    let options = |out| RunOptions { out: workspace.path(out).into(), alone: true, ..RunOptions::default() };
    train_with(config(), &options("stock"), |trainer: Trainer<'_>| Ok(trainer.run()?)).expect("a run");
    let own = train_with(config(), &options("own"), |mut trainer: Trainer<'_>| {
        let cross_entropy = |pass: &Pass<'_>, batch: &TokenBatch, cx: &ObjectiveContext<'_>| {
            let hidden = cx.hidden(pass, batch.inputs.clone());
            cx.cross_entropy(pass, hidden, batch.targets.clone(), batch.weights.clone())
        };
        while trainer.train_step_with(cross_entropy)? {}
        Ok(trainer.finish()?)
    });
    own.expect("a run");
    assert_eq!(workspace.steps("own"), workspace.steps("stock"));

    // A second run of the model is a broken promise.
    let twice = train_with(config(), &options("twice"), |mut trainer: Trainer<'_>| {
        let twice = |pass: &Pass<'_>, batch: &TokenBatch, cx: &ObjectiveContext<'_>| {
            let [hidden, again] = [0, 1].map(|_| cx.hidden(pass, batch.inputs.clone()));
            cx.cross_entropy(pass, hidden + again, batch.targets.clone(), None)
        };
        trainer.train_step_with(twice)?;
        Ok(trainer.finish()?)
    });
    let message = twice.expect_err("refused").to_string();
    assert!(message.contains("has run the model 2 times"), "{message}");
}

/// Runs the model on the batch and, with other dropout masks, on its targets.
struct Twice;

impl Objective for Twice {
    fn loss(&self, pass: &Pass<'_>, batch: &TokenBatch, cx: &ObjectiveContext<'_>) -> Tensor<1> {
        let first = cx.hidden(pass, batch.inputs.clone());
        let again = cx.hidden(pass, batch.inputs.clone());
        let difference = (first.clone() - again).powi_scalar(2).mean_dim(2).squeeze_dim::<2>(2);
        let difference = (difference * batch.weights()).sum().mul_scalar(cx.scale());
        cx.cross_entropy(pass, first, batch.targets.clone(), batch.weights.clone()) + difference
    }

    fn runs(&self) -> usize {
        2
    }
}

/// R-Drop (Liang et al., 2021) is such an objective: two runs that differ by dropout.
#[test]
fn an_objective_may_run_the_model_twice() {
    let workspace = Workspace::new();
    let data = format!("'{}'", workspace.path("data").display());
    let train = |out: &str, changes: &[(&str, &str)]| {
        let common = [("data.path", data.as_str()), ("model.dropout", "0.1"), ("loss.kind", "'twice'")];
        let config = workspace.config("own.toml", &[&common[..], changes].concat());
        let registry = Registry::default().objective("twice", |_| Ok(Twice));
        let options =
            RunOptions { out: workspace.path(out).into(), alone: true, registry, ..RunOptions::default() };
        train_with(config, &options, |trainer: Trainer<'_>| Ok(trainer.run()?)).expect("a run");
        let values = workspace.metrics(out);
        let objective =
            values.iter().find_map(|value| value["val_objective"].as_f64()).expect("an evaluation");
        (workspace.steps(out), objective)
    };
    // Ten samples leave the last pass of two ranks with two rows each incomplete.
    let partial = ("eval.samples", "10");
    let (full, objective) = train("full", &[partial]);
    let none = [("shard.strategy", "'NO_SHARD'"), ("shard.accumulate", "'sharded'"), partial];
    assert_eq!(train("none", &none), (full.clone(), objective));
    assert_eq!(
        train("grad_op", &[("shard.strategy", "'SHARD_GRAD_OP'"), partial]),
        (full.clone(), objective)
    );
    // Without dropout, as in evaluations, both runs are equal: the objective is the cross-entropy of all ten samples.
    let val_loss = workspace.val_loss("full");
    assert!((objective - val_loss).abs() < 1e-6 * val_loss, "{objective} {val_loss}");
    for (out, changes) in
        [("block", &[("shard.recompute", "'block'"), partial][..]), ("one", &[("train.ranks", "1")])]
    {
        for ((_, loss, _), (_, expected, _)) in train(out, changes).0.iter().zip(&full) {
            assert!((loss - expected).abs() <= 2e-5 * expected, "{out}: {loss} {expected}");
        }
    }
}
