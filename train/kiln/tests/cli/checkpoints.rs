//! The checkpoints that a run keeps, its latest checkpoint, and runs that start from the weights of a checkpoint.

use crate::support::Workspace;

fn latest(workspace: &Workspace, out: &str) -> String {
    workspace.text(format!("{out}/checkpoints/latest"))
}

#[test]
fn the_newest_are_kept_and_latest_names_the_newest() {
    let workspace = Workspace::new();
    workspace
        .config("keep.toml", &[("train.steps", "7"), ("checkpoint.every", "2"), ("checkpoint.keep", "2")]);
    workspace.succeed(&["train", "keep.toml", "--out", "run"]);
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt6", "fsdp_cpt7", "latest"]);
    assert_eq!(latest(&workspace, "run"), "fsdp_cpt7");
}

/// Leftovers of a save whose process died in the middle.
#[test]
fn an_interrupted_save_disturbs_nothing() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("checkpoint.every", "2")]);
    workspace.succeed(&["train", "run.toml", "--out", "straight"]);

    workspace.copy("straight", "run");
    workspace.remove("run/checkpoints/fsdp_cpt4");
    workspace.write("run/checkpoints/latest", "fsdp_cpt2");
    workspace.write("run/checkpoints/.latest.partial", "fsdp");
    // The leftover is complete except for the manifest, and has an extra file that must not get into the new
    // checkpoint.
    workspace.copy("straight/checkpoints/fsdp_cpt4", "run/checkpoints/.fsdp_cpt4.partial");
    workspace.remove("run/checkpoints/.fsdp_cpt4.partial/manifest.json");
    workspace.write("run/checkpoints/.fsdp_cpt4.partial/rubbish", "x");
    let said = workspace.succeed(&["train", "run.toml", "--out", "run", "--resume", "latest"]);
    assert!(said.contains("resuming from run/checkpoints/fsdp_cpt2\n"), "{said}");
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt2", "fsdp_cpt4", "latest"]);
    let files = |out: &str| {
        let folder = workspace.path(format!("{out}/checkpoints/fsdp_cpt4"));
        crate::support::names(&folder)
    };
    assert_eq!(files("run"), files("straight"));
    assert_eq!(workspace.steps("run"), workspace.steps("straight"));
}

/// A folder without a manifest is not a checkpoint, even if `latest` names the folder.
#[test]
fn without_a_good_latest_the_highest_step_is_taken() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("checkpoint.every", "2")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let resumes_from = |expected: &str| {
        let said = workspace.succeed(&["train", "run.toml", "--out", "run", "--resume", "latest"]);
        assert!(said.contains(&format!("resuming from run/checkpoints/{expected}\n")), "{said}");
    };
    for content in ["", "fsdp_cpt99\n", "nonsense"] {
        workspace.write("run/checkpoints/latest", content);
        resumes_from("fsdp_cpt4");
    }
    workspace.remove("run/checkpoints/latest");
    resumes_from("fsdp_cpt4");
    workspace.remove("run/checkpoints/fsdp_cpt4/manifest.json");
    resumes_from("fsdp_cpt2");
}

/// After a run has gone back, later checkpoints are those of the new start, not the old ones.
#[test]
fn a_run_that_goes_back_keeps_what_it_writes_now() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("checkpoint.every", "1")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let back = [
        "train",
        "run.toml",
        "--out",
        "run",
        "--resume",
        "run/checkpoints/fsdp_cpt1",
        "--set",
        "train.steps=2",
        "--set",
        "checkpoint.keep=1",
    ];
    workspace.succeed(&back);
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt2", "latest"]);
    assert_eq!(latest(&workspace, "run"), "fsdp_cpt2");
    assert_eq!(workspace.steps("run").len(), 2);
}

#[test]
fn init_from_takes_the_weights_and_nothing_else() {
    let workspace = Workspace::new();
    let full = ["--set", "checkpoint.format=full"];
    workspace.succeed(&[&["train", "run.toml", "--out", "first"], &full[..]].concat());
    // A learning rate of zero keeps the loaded weights.
    workspace.config(
        "second.toml",
        &[
            ("init.from", "'first'"),
            ("optim.lr", "0.0"),
            ("optim.warmup_steps", "0"),
            ("train.steps", "1"),
            ("checkpoint.format", "'full'"),
        ],
    );
    workspace.succeed(&["train", "second.toml", "--out", "second"]);
    assert_eq!(workspace.val_loss("second"), workspace.val_loss("first"));
    let [(step, loss, _)] = workspace.steps("second")[..] else { panic!("one step") };
    // The second run starts with the first samples again, but with trained weights.
    assert_eq!(step, 1);
    assert!(loss < workspace.losses("first")[0], "{loss}");
    for unit in 1..=4 {
        let file = |out: &str, step: u64| {
            let name = format!("model-{unit:05}-of-00004.safetensors");
            workspace.read(format!("{out}/checkpoints/fsdp_cpt{step}/{name}"))
        };
        assert!(file("second", 1) == file("first", 4), "unit {unit}");
    }
    let state = workspace.state("second/checkpoints/fsdp_cpt1");
    assert_eq!((&state["step"], &state["next_sample"]), (&1.into(), &8.into()));
}

#[test]
fn a_checkpoint_is_complete_and_described() {
    let workspace = Workspace::new();
    let full = ["--set", "checkpoint.format=full"];
    workspace.succeed(&[&["train", "run.toml", "--out", "run"], &full[..]].concat());
    let folder = "run/checkpoints/fsdp_cpt4";
    let index = workspace.json(format!("{folder}/model.safetensors.index.json"));
    let mut elements = 0;
    for (name, file) in index["weight_map"].as_object().unwrap() {
        let bytes = workspace.read(format!("{folder}/{}", file.as_str().unwrap()));
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        elements += tensors.tensor(name).unwrap().shape().iter().product::<usize>();
    }
    assert_eq!(index["metadata"]["total_size"], elements * 4);
    let state = workspace.state(folder);
    let model: kiln_model::ModelConfig = serde_json::from_value(state["model"].clone()).unwrap();
    assert_eq!(
        elements,
        kiln_model::Decoder::count_parameters(&Default::default(), &model).expect("built-in layers")
    );
    assert_eq!(state["tokens"], 4 * 8 * 8);
    assert_eq!(workspace.text(format!("{folder}/config.toml")), workspace.text("run/config.toml"));
    let tokenizer = |folder: &str| workspace.read(format!("{folder}/tokenizer.json"));
    assert!(tokenizer(folder) == tokenizer("data"));
}

#[test]
fn a_smaller_keep_says_what_it_removes() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("checkpoint.every", "1")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let resume = |steps: &str, keep: &str| {
        let values = ["--set", steps, "--set", keep];
        let resume = ["train", "run.toml", "--out", "run", "--resume", "latest"];
        workspace.succeed(&[&resume[..], &values].concat())
    };
    assert!(!resume("train.steps=5", "checkpoint.keep=0").contains("checkpoint.keep"));
    let said = resume("train.steps=6", "checkpoint.keep=2");
    let line = "checkpoint.keep = 2: the next save removes 4 of the 5 checkpoints in run/checkpoints; to \
                keep them all, set checkpoint.keep = 0\n";
    assert!(said.contains(line), "{said}");
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt5", "fsdp_cpt6", "latest"]);
    // No message if the value is the one that the run has always had.
    assert!(!resume("train.steps=7", "checkpoint.keep=2").contains("checkpoint.keep"));
}
