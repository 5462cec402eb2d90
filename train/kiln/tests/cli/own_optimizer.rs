//! Your own program, `train/kiln/examples/own_optimizer.rs`, has every command on its optimizer, and `kiln`
//! reports that it lacks the optimizer. Every command also works with the built-in Muon.

use std::collections::BTreeMap;
use std::path::PathBuf;

use safetensors::SafeTensors;

use crate::support::{Ended, Workspace, example};

/// Runs a command of `own` or of `kiln`, which must succeed, and returns its output.
fn succeed(workspace: &Workspace, program: &Option<PathBuf>, arguments: &[&str]) -> String {
    let ended: Ended = match program {
        Some(program) => workspace.run(program, arguments),
        None => workspace.kiln(arguments),
    };
    assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
    ended.stdout
}

/// Trains with the optimizer of `settings` in every way. `state` is the optimizer's description in a checkpoint.
fn has_every_command(program: Option<PathBuf>, settings: &[&str], state: &str) {
    let workspace = Workspace::new();
    let succeed = |arguments: &[&str]| succeed(&workspace, &program, arguments);
    let train = |out: &str, more: &[&str]| {
        succeed(&[&["train", "run.toml", "--ranks", "2", "--out", out][..], settings, more].concat());
        workspace.steps(out)
    };
    let full = train("full", &["--set", "checkpoint.every=2"]);
    let none = ["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"];
    assert_eq!(train("none", &none), full);
    assert_eq!(train("grad_op", &["--set", "shard.strategy=SHARD_GRAD_OP"]), full);
    let processes = ["launch", "--nproc-per-node", "2", "--", "train", "run.toml", "--out", "processes"];
    succeed(&[&processes[..], settings].concat());
    assert_eq!(workspace.steps("processes"), full);

    // Resuming from the middle gives the same bits, and nearly the same values with other numbers of ranks.
    let middle = "full/checkpoints/fsdp_cpt2";
    assert_eq!(train("again", &["--resume", middle]), full[2..]);
    let resumed_by = |ranks: &str, from: &str, out: &str| {
        let arguments = ["train", "run.toml", "--ranks", ranks, "--resume", from, "--out", out];
        succeed(&[&arguments[..], settings].concat());
        for ((_, loss, _), (_, expected, _)) in workspace.steps(out).iter().zip(&full[2..]) {
            assert!((loss - expected).abs() <= 1e-5 * expected, "{ranks} ranks: {loss} {expected}");
        }
    };
    resumed_by("1", middle, "one");
    resumed_by("4", middle, "four");
    succeed(&["convert", "--checkpoint", middle, "--to", "full", "--out", "converted"]);
    resumed_by("2", "converted", "from_converted");

    assert!(succeed(&["eval", "--checkpoint", "full", "--ranks", "2"]).contains("loss"));
    succeed(&["generate", "--checkpoint", "full", "--prompt", "a", "--max-tokens", "4"]);
    let said = succeed(&["inspect", "full"]);
    assert!(said.contains(&format!("optimizer: {state}")), "{said}");
    assert!(succeed(&["inspect", "full", "--verify"]).contains("is intact"), "verified");

    // A run with this optimizer cannot resume under AdamW.
    let said = workspace.kiln(&["train", "run.toml", "--out", "other", "--resume", middle]);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.stderr.contains(state) && said.stderr.contains("adamw"), "{said:?}");
}

#[test]
fn an_optimizer_from_outside_has_every_command() {
    let settings = ["--set", "optim.kind=lion", "--set", "optim.lr=1e-3", "--set", "optim.extra.blend=0.8"];
    has_every_command(Some(example("own_optimizer")), &settings, "lion (state momentum)");
}

#[test]
fn muon_has_every_command() {
    let settings = ["--set", "optim.kind=muon", "--set", "optim.muon.lr=0.01"];
    has_every_command(None, &settings, "muon (state exp_avg, exp_avg_sq, momentum_buffer)");
}

/// State of whole matrices belongs to the ranks that own them, and moves with the number of ranks.
#[test]
fn an_optimizer_with_state_of_matrices_has_every_command() {
    let settings = ["--set", "optim.kind=shampoo", "--set", "optim.lr=3e-3"];
    let state = "shampoo (state exp_avg, exp_avg_sq, left, left_root, right, right_root)";
    has_every_command(Some(example("shampoo")), &settings, state);
    let workspace = Workspace::new();
    let arguments = ["train", "run.toml", "--out", "run", "--set", "train.steps=20"];
    succeed(&workspace, &Some(example("shampoo")), &[&arguments[..], &settings].concat());
    let losses: Vec<_> = workspace.steps("run").into_iter().map(|(_, loss, _)| loss).collect();
    assert!(losses[19] < losses[0] - 0.5, "{losses:?}");
}

#[test]
fn what_is_not_there_is_named() {
    let workspace = Workspace::new();
    let refused = |program: &Option<PathBuf>, settings: &[&str], expected: &[&str]| {
        let arguments = [&["train", "run.toml", "--out", "run"][..], settings].concat();
        let said = match program {
            Some(program) => workspace.run(program, &arguments),
            None => workspace.kiln(&arguments),
        };
        assert_eq!(said.code, Some(2), "{said:?}");
        for part in expected {
            assert!(said.stderr.contains(part), "{part}: {said:?}");
        }
        assert!(!workspace.path("run").exists(), "nothing was begun");
    };
    let (own, kiln) = (Some(example("own_optimizer")), None);
    refused(&kiln, &["--set", "optim.kind=lion"], &["optim.kind = \"lion\"", "\"adamw\", \"muon\""]);
    refused(&own, &["--set", "optim.kind=lyon"], &["optim.kind = \"lyon\"", "\"lion\""]);
    let extra = ["--set", "optim.kind=lion", "--set", "optim.extra.blind=1"];
    refused(&own, &extra, &["optim.extra: unknown field `blind`"]);
    refused(&kiln, &["--set", "optim.extra.blend=1"], &["optimizer `adamw` has no such setting"]);
    refused(&kiln, &["--set", "optim.muon.lr=0.1"], &["[optim.muon] is for optim.kind = \"muon\""]);
    let muon = ["--set", "optim.kind=muon"];
    refused(&kiln, &[&muon[..], &["--set", "optim.muon.ns_step=3"]].concat(), &["did you mean `ns_steps`"]);
    let group = "optim.groups=[{ parameters = [\"*.nrom.weight\"], lr = 0.1 }]";
    refused(&kiln, &["--set", group], &["no parameter is called \"*.nrom.weight\""]);
    let group = "optim.groups=[{ parameters = [\"*\"], rule = \"muon\" }]";
    refused(&kiln, &["--set", group], &["`adamw` has no rule `muon`"]);
    refused(
        &kiln,
        &[&muon[..], &["--set", "optim.lr=0.0"]].concat(),
        &["optim.muon.lr = 0.02 follows optim.lr"],
    );
    refused(
        &kiln,
        &["--set", "optim.groups=[{ parameters = [], lr = 0.1 }]"],
        &["a group names no parameters"],
    );
    refused(&kiln, &["--set", "optim.groups=[{ parameters = [\"*\"], dims = 2 }]"], &["has no option"]);
    let group = "optim.groups=[{ parameters = [\"*\"], lr = -1.0 }]";
    refused(&kiln, &["--set", group], &["optim.groups: lr = -1: must be zero or more"]);
}

/// A rule gets no made-up state for parameters that had a different rule before.
#[test]
fn a_rule_cannot_change_in_the_middle() {
    let workspace = Workspace::new();
    let muon = ["--set", "optim.kind=muon"];
    workspace.succeed(
        &[&["train", "run.toml", "--out", "run", "--set", "checkpoint.every=2"][..], &muon].concat(),
    );
    let group = "optim.groups=[{ parameters = [\"layers.0.*\"], rule = \"adamw\" }]";
    let resume =
        ["train", "run.toml", "--out", "other", "--resume", "run/checkpoints/fsdp_cpt2", "--set", group];
    let said = workspace.kiln(&[&resume[..], &muon].concat());
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.stderr.contains("updated by another rule. Use the [[optim.groups]]"), "{said:?}");
}

/// Options that select parameters by name affect their weights: those with a learning rate of zero do not change.
#[test]
fn groups_have_options_of_their_own() {
    let workspace = Workspace::new();
    let train = |out: &str, more: &[&str]| {
        let arguments = ["train", "run.toml", "--out", out, "--set", "checkpoint.format=full"];
        let settings =
            ["--set", "checkpoint.every=1", "--set", "checkpoint.keep=0", "--set", "optim.kind=muon"];
        succeed(&workspace, &None, &[&arguments[..], &settings, more].concat());
    };
    let still = "optim.groups=[{ parameters = [\"layers.0.*\"], dims = 2, lr = 0.0 }]";
    train("still", &["--set", still]);
    train("stock", &[]);
    let moved = |out: &str, is_wanted: fn(&str) -> bool| {
        let [first, last] =
            [1, 4].map(|step| weights(&workspace, &format!("{out}/checkpoints/fsdp_cpt{step}")));
        let wanted: Vec<_> = first.iter().filter(|(name, _)| is_wanted(name)).collect();
        assert!(!wanted.is_empty());
        wanted.into_iter().map(|(name, values)| last[name] != *values).collect::<Vec<_>>()
    };
    let matrix = |name: &str| name.starts_with("layers.0.") && !name.contains("norm");
    assert!(moved("still", matrix).iter().all(|moved| !moved));
    assert!(moved("stock", matrix).iter().all(|moved| *moved));
    assert!(
        moved("still", |name| !name.starts_with("layers.0.") || name.contains("norm")).iter().all(|m| *m)
    );
}

/// Schedules of groups, for built-in optimizers and a custom one: each parameter moves as in a run whose
/// `[optim]` has its schedule, and `lr` in the log is that of `[optim]`.
#[test]
fn groups_have_schedules_of_their_own() {
    let workspace = Workspace::new();
    let constant = ("constant", 0, 1.0);
    let wsd = ("wsd", 3, 0.25);
    for (program, kind) in [(None, "adamw"), (None, "muon"), (Some(example("own_optimizer")), "lion")] {
        let resume = |out: &str, from: Option<&str>, more: &[String]| {
            let out = format!("{kind}-{out}");
            let kind = format!("optim.kind={kind}");
            let settings = ["checkpoint.format=full", "checkpoint.every=1", "train.steps=6", &kind];
            let settings = settings.into_iter().chain(more.iter().map(String::as_str));
            let mut arguments = vec!["train", "run.toml", "--out", &out];
            settings.for_each(|setting| arguments.extend(["--set", setting]));
            from.into_iter().for_each(|from| arguments.extend(["--resume", from]));
            succeed(&workspace, &program, &arguments);
            out
        };
        let train = |out: &str, more: &[String]| resume(out, None, more);
        let whole = |out: &str, (schedule, warmup, ratio): (&str, u64, f64)| {
            let settings = [
                format!("optim.schedule={schedule}"),
                format!("optim.warmup_steps={warmup}"),
                format!("optim.min_lr_ratio={ratio}"),
                "optim.decay_steps=2".to_owned(),
            ];
            train(out, &settings)
        };
        let group = |parameters: &str, (schedule, warmup, ratio): (&str, u64, f64)| {
            format!(
                "{{ parameters = [\"{parameters}\"], schedule = \"{schedule}\", warmup_steps = {warmup}, \
                 min_lr_ratio = {ratio}, decay_steps = 2 }}"
            )
        };
        let of = |out: &str, step: u64| weights(&workspace, &format!("{out}/checkpoints/fsdp_cpt{step}"));
        let rates = |out: &str| {
            let metrics = workspace.metrics(out);
            metrics.iter().filter_map(|line| line["lr"].as_f64()).collect::<Vec<_>>()
        };
        let stock = train("stock", &[]);
        let (all_constant, all_wsd) = (whole("constant", constant), whole("wsd", wsd));
        for (out, schedule) in [(&all_constant, constant), (&all_wsd, wsd)] {
            let groups = format!("optim.groups=[{}]", group("*", schedule));
            let grouped = train(&format!("all-{}", schedule.0), &[groups]);
            assert!(of(&grouped, 6) == of(out, 6), "{grouped}");
            assert_eq!(workspace.losses(&grouped), workspace.losses(out), "{grouped}");
            assert_eq!(rates(&grouped), rates(&stock), "{grouped}");
            assert_ne!(rates(&grouped), rates(out), "{grouped}");
        }
        let groups = [group("layers.0.*", constant), group("*norm.weight", wsd)].join(", ");
        let groups = format!("optim.groups=[{groups}]");
        let mixed = train("mixed", std::slice::from_ref(&groups));
        // In the first step, all runs have the same weights, and so the same gradients.
        let first = [&mixed, &all_constant, &all_wsd, &stock].map(|out| of(out, 1));
        let [mixed_1, constant_1, wsd_1, stock_1] = &first;
        for (name, values) in mixed_1 {
            let expected = match name.as_str() {
                name if name.ends_with("norm.weight") => wsd_1,
                name if name.starts_with("layers.0.") => constant_1,
                _ => stock_1,
            };
            assert!(*values == expected[name], "{kind}: {name}");
        }
        assert!(constant_1 != stock_1 && wsd_1 != stock_1 && wsd_1 != constant_1);
        // The run has two ranks under FULL_SHARD.
        let none = ["shard.strategy=NO_SHARD", "shard.accumulate=sharded"].map(str::to_owned);
        let no_shard = train("no-shard", &[std::slice::from_ref(&groups), &none].concat());
        assert!(of(&no_shard, 6) == of(&mixed, 6), "{kind}");
        assert_eq!(workspace.steps(&no_shard), workspace.steps(&mixed), "{kind}");
        let middle = format!("{mixed}/checkpoints/fsdp_cpt3");
        let resumed = resume("resumed", Some(&middle), &[groups]);
        assert!(of(&resumed, 6) == of(&mixed, 6), "{kind}");
    }
}

/// Returns the bytes of all weights of a checkpoint, by name.
fn weights(workspace: &Workspace, checkpoint: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = workspace.path(checkpoint);
    let files = crate::support::names(&folder).into_iter();
    let files = files.filter(|name| name.starts_with("model") && name.ends_with(".safetensors"));
    let mut all = BTreeMap::new();
    for file in files {
        let bytes = std::fs::read(folder.join(file)).expect("a file of weights");
        for (name, view) in SafeTensors::deserialize(&bytes).expect("tensors").tensors() {
            all.insert(name, view.data().to_vec());
        }
    }
    all
}
