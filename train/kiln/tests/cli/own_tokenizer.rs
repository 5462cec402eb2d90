//! A model stays with the tokenizer that it was trained with: token ids mean nothing without it.

use kiln_testkit::wait_until;
use rustix::process::Signal;
use serde_json::Value as Json;

use crate::run_folder::{FOREVER, assert_refused, in_run};
use crate::support::{Workspace, signal};

/// Returns the workspace's tokenizer with the ids of two letters swapped.
fn other_tokenizer(workspace: &Workspace) -> String {
    let mut tokenizer = workspace.json("data/tokenizer.json");
    let vocab = &mut tokenizer["model"]["vocab"];
    let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
    assert!(a.is_u64() && b.is_u64());
    (vocab["a"], vocab["b"]) = (b, a);
    tokenizer.to_string()
}

/// Returns the workspace's tokenizer, formatted differently.
fn respelled(workspace: &Workspace) -> String {
    let text = workspace.text("data/tokenizer.json");
    let same = serde_json::from_str::<Json>(&text).expect("JSON").to_string();
    assert_ne!(same, text);
    same
}

#[test]
fn checkpoints_have_the_tokenizer_of_the_start() {
    let workspace = Workspace::new();
    let own = workspace.read("data/tokenizer.json");
    let saves = ["--set", "checkpoint.every=1", "--set", "checkpoint.keep=2"];
    let run = workspace.start(&in_run(&FOREVER, &saves));
    let latest = || std::fs::read_to_string(workspace.path("run/checkpoints/latest")).ok();
    let wait_for_another = || {
        let before = latest();
        wait_until("another checkpoint", || latest().is_some_and(|now| Some(now) != before));
    };
    wait_for_another();
    workspace.write("data/tokenizer.json", other_tokenizer(&workspace));
    wait_for_another();
    wait_for_another();
    workspace.remove("data/tokenizer.json");
    wait_for_another();
    signal(&run, Signal::USR1);
    let ended = workspace.end(run);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(75), ""), "{ended:?}");
    let checkpoints = workspace.checkpoints("run");
    assert_eq!(checkpoints.len(), 3, "{checkpoints:?}");
    for checkpoint in &checkpoints[..2] {
        let saved = workspace.read(format!("run/checkpoints/{checkpoint}/tokenizer.json"));
        assert!(saved == own, "{checkpoint}");
    }
    workspace.succeed(&["inspect", "--verify", "run"]);
}

#[test]
fn going_on_with_another_tokenizer_is_refused_unless_it_is_wanted() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    let other = other_tokenizer(&workspace);
    let resume = ["train", "run.toml", "--out", "run", "--resume", "latest", "--set"];
    workspace.write("data/tokenizer.json", respelled(&workspace));
    workspace.succeed(&[&resume[..], &["train.steps=3"]].concat());
    workspace.write("data/tokenizer.json", other);
    let on = [&resume[..], &["train.steps=4"]].concat();
    let differs = "the tokenizer in data/tokenizer.json is not the checkpoint's";
    assert_refused(&workspace.kiln(&on), &[differs, "--allow-changed data"]);
    let said = workspace.succeed(&[&on[..], &["--allow-changed", "data"]].concat());
    assert!(said.contains(differs), "{said}");
}

#[test]
fn a_loss_on_data_of_another_tokenizer_is_refused() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let eval = ["eval", "--checkpoint", "run", "--data", "moved"];
    let other = other_tokenizer(&workspace);
    workspace.copy("data", "moved");
    workspace.write("moved/tokenizer.json", respelled(&workspace));
    workspace.succeed(&eval);
    workspace.write("moved/tokenizer.json", other);
    let own = "not the same tokenizer as run/checkpoints/fsdp_cpt4/tokenizer.json";
    assert_refused(&workspace.kiln(&eval), &["moved/tokenizer.json is ", own]);
    // New weights may be trained from old ones with a different vocabulary.
    let init = ["--out", "on", "--set", "data.path=moved", "--set", "init.from=run"];
    let said = workspace.succeed(&[&["train", "run.toml"], &init[..]].concat());
    assert!(said.contains("have a different tokenizer from the initial weights"), "{said}");
}
