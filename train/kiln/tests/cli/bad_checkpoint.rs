//! Checkpoints that are missing, damaged, or of a different model, and run folders that cannot be used.

use std::fs;
use std::os::unix::fs::symlink;

use crate::messages::Messages;
use crate::support::Workspace;

const RESUME: [&str; 6] = ["train", "run.toml", "--out", "run", "--resume", "latest"];
const FOLDER: &str = "run/checkpoints/fsdp_cpt2";
const MODEL: &str = "run/checkpoints/fsdp_cpt2/model-part-00002-of-00002.safetensors";
const OPTIMIZER: &str = "run/checkpoints/fsdp_cpt2/optimizer-part-00002-of-00002.safetensors";
const MANIFEST: &str = "run/checkpoints/fsdp_cpt2/manifest.json";

/// Trains two steps in `run`, which a configuration of four steps can resume.
fn trained() -> Workspace {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    workspace
}

#[test]
fn checkpoints_that_are_not_there_or_do_not_fit_are_refused() {
    let mut messages = Messages::default();
    let workspace = trained();
    let mut refused = |title: &str, arguments: &[&str]| {
        messages.refused(title, &workspace, &[&["train", "run.toml"], arguments].concat());
    };
    refused("resume without a run", &["--out", "new", "--resume", "latest"]);
    refused("resume from nowhere", &["--out", "new", "--resume", "none"]);
    refused("resume from a folder without one", &["--out", "new", "--resume", "data"]);
    refused("another width", &["--out", "run", "--resume", "latest", "--set", "model.d_model=32"]);
    refused(
        "other heads, for which the weights would fit",
        &["--out", "run", "--resume", "latest", "--set", "model.heads=2", "--set", "model.kv_heads=1"],
    );
    refused(
        "weights of another model",
        &["--out", "new", "--set", "init.from=run", "--set", "model.tie_embeddings=false"],
    );
    refused("weights from nowhere", &["--out", "new", "--set", "init.from=none"]);
    refused("run folder in use", &["--out", "run"]);
    workspace.succeed(&["train", "run.toml", "--out", "other"]);
    let mut refused = |title: &str, arguments: &[&str]| {
        messages.refused(title, &workspace, &[&["train", "run.toml"], arguments].concat());
    };
    refused("run folder in use by another run", &["--out", "other", "--resume", "run"]);
    refused("run folder that is a file", &["--out", "run.toml"]);
    insta::assert_snapshot!(messages.finish());
}

#[test]
fn damaged_checkpoints_fail_and_stay_as_they_are() {
    let mut messages = Messages::default();
    let mut fails = |title: &str, damage: &dyn Fn(&Workspace)| {
        let workspace = trained();
        damage(&workspace);
        let (steps, before) = (workspace.steps("run"), workspace.tree());
        messages.fails(title, &workspace, &RESUME);
        assert_eq!(workspace.steps("run"), steps, "{title}");
        let after = workspace.tree();
        let folder = workspace.path("run/checkpoints");
        let checkpoints = before.iter().filter(|(path, _)| path.starts_with(&folder));
        for (path, content) in checkpoints {
            assert!(after.get(path) == Some(content), "{title}: {} changed", path.display());
        }
    };
    let half = |w: &Workspace, file: &str| {
        let bytes = w.read(file);
        w.write(file, &bytes[..bytes.len() / 2]);
    };
    fails("truncated weights", &|w| half(w, MODEL));
    fails("empty weights", &|w| w.write(MODEL, ""));
    fails("missing weights", &|w| w.remove(MODEL));
    fails("truncated optimizer state", &|w| half(w, OPTIMIZER));
    fails("missing optimizer state", &|w| w.remove(OPTIMIZER));
    fails("weights without a tensor", &|w| w.write(MODEL, b"\x02\0\0\0\0\0\0\0{}"));
    fails("one bit", &|w| {
        let mut bytes = w.read(OPTIMIZER);
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        w.write(OPTIMIZER, bytes);
    });
    fails("another tokenizer", &|w| {
        w.write(&format!("{FOLDER}/tokenizer.json"), "{}");
    });
    fails("manifest that is not JSON", &|w| w.write(MANIFEST, "garbage"));
    fails("empty manifest", &|w| w.write(MANIFEST, ""));
    fails("manifest with another step", &|w| {
        w.replace(MANIFEST, "\"next_sample\": 16", "\"next_sample\": 61");
    });
    // The changed manifest gets a valid checksum, as after a deliberate edit.
    let resealed = |w: &Workspace, from: &str, to: &str| w.replace_in_manifest(FOLDER, from, to);
    fails("manifest without a key", &|w| resealed(w, "next_sample", "next_simple"));
    fails("manifest of the future", &|w| {
        resealed(w, "\"format_version\": 5", "\"format_version\": 6");
    });
    fails("manifest that points elsewhere", &|w| {
        resealed(w, "model-part-00002-of-00002.safetensors", "../../secret");
    });
    fails("manifest with a gap", &|w| resealed(w, "\"offset\": 0,", "\"offset\": 1,"));
    insta::assert_snapshot!(messages.finish());
}

#[test]
fn a_run_folder_that_cannot_be_written_fails_at_once() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    let below_a_file = ["train", "run.toml", "--out", "run.toml/run"];
    messages.fails("run folder below a file", &workspace, &below_a_file);
    // A start that fails early and leaves the folder for the next run.
    workspace.kiln(&["train", "run.toml", "--out", "run", "--fault", "error@start:0:0"]);
    workspace.remove("run/checkpoints");
    workspace.write("run/checkpoints", "a file");
    let ended = messages.fails(
        "checkpoints that cannot be written",
        &workspace,
        &["train", "run.toml", "--out", "run"],
    );
    assert!(!ended.stdout.contains("step"), "{ended:?}");
    assert!(!workspace.path("run/metrics.jsonl").exists());
    insta::assert_snapshot!(messages.finish());
}

/// The weights of the last good step are kept, and the run can resume from them.
#[test]
fn a_loss_that_is_no_number_stops_the_run() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("checkpoint.every", "1")]);
    let arguments =
        ["train", "run.toml", "--out", "run", "--set", "optim.lr=1e30", "--set", "optim.warmup_steps=0"];
    messages.fails("learning rate out of this world", &workspace, &arguments);
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt1", "latest"]);
    insta::assert_snapshot!(messages.finish());
}

/// Checkpoints hold the work of a run: a search reports even unreadable ones, and no new run starts in their folder.
#[test]
fn checkpoints_that_cannot_be_read_are_none_the_less_there() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("checkpoint.every", "2")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let [older, newer] = [2, 4].map(|step| format!("run/checkpoints/fsdp_cpt{step}"));
    let manifest = |checkpoint: &str| format!("{checkpoint}/manifest.json");
    // A circular link makes a file unreadable even to root.
    for checkpoint in [&older, &newer] {
        fs::rename(workspace.path(manifest(checkpoint)), workspace.path(format!("{checkpoint}/kept")))
            .expect("a manifest");
    }
    symlink("manifest.json", workspace.path(manifest(&newer))).expect("a link");
    let train = ["train", "run.toml", "--out", "run"];
    let resume = [&train[..], &["--resume", "latest"]].concat();
    messages.refused("inspect", &workspace, &["inspect", "run"]);
    messages.refused("inspect the checkpoints", &workspace, &["inspect", "run/checkpoints"]);
    messages.refused("inspect one of them", &workspace, &["inspect", &newer]);
    messages.refused("resume", &workspace, &resume);
    messages.refused("start again", &workspace, &train);
    workspace.remove(&manifest(&newer));
    messages.refused("none is complete", &workspace, &["inspect", "run"]);
    // The newest checkpoint is damaged, and an older one exists.
    for checkpoint in [&older, &newer] {
        fs::rename(workspace.path(format!("{checkpoint}/kept")), workspace.path(manifest(checkpoint)))
            .expect("a manifest");
    }
    workspace.write(&manifest(&newer), "{");
    messages.fails("the newest is damaged", &workspace, &["inspect", "run"]);
    messages.fails("resume from the newest", &workspace, &resume);
    workspace.write(&manifest(&older), "{");
    messages.fails("all are damaged", &workspace, &resume);
    insta::assert_snapshot!(messages.finish());
}
