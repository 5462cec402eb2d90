//! `kiln generate`.

use crate::support::{Workspace, tokenizer};

/// A model that has learned that the alphabet's first letters follow each other. There are seven of
/// them, so that samples of eight tokens start with each.
fn trained() -> Workspace {
    let workspace = Workspace::new();
    let ids = tokenizer().encode(&"abcdefg".repeat(250)).expect("ids");
    let ids: Vec<u16> = ids.into_iter().map(|id| u16::try_from(id).expect("a small id")).collect();
    workspace.write_data("data", &ids);
    workspace.config("run.toml", &[("train.steps", "40"), ("optim.lr", "3e-2")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    workspace
}

fn generate(workspace: &Workspace, checkpoint: &str, prompt: &str, options: &[&str]) -> String {
    let arguments =
        ["generate", "--checkpoint", checkpoint, "--prompt", prompt, "--max-tokens", "12"];
    workspace.succeed(&[&arguments, options].concat())
}

#[test]
fn text_depends_on_the_seed_and_nothing_else() {
    let workspace = trained();
    let hot =
        |seed: &str| generate(&workspace, "run", "abc", &["--temperature", "3", "--seed", seed]);
    assert_eq!(hot("1"), hot("1"));
    assert_ne!(hot("1"), hot("2"));
    // A run folder stands for its newest checkpoint.
    let from = |checkpoint: &str| generate(&workspace, checkpoint, "abc", &[]);
    assert_eq!(from("run"), from("run/checkpoints/fsdp_cpt40"));
    assert_eq!(from("run"), from("run/checkpoints"));
}

#[test]
fn a_temperature_of_zero_takes_the_likeliest_token() {
    let workspace = trained();
    for seed in ["1", "2"] {
        let options = ["--temperature", "0", "--seed", seed];
        assert_eq!(generate(&workspace, "run", "abc", &options), "abcdefgabcdefga\n");
    }
    // Without a prompt it starts as a document does, and says something.
    let text = generate(&workspace, "run", "", &["--temperature", "0"]);
    assert!(!text.trim().is_empty(), "{text:?}");
    // A prompt longer than the model has ever seen.
    let long = "abcdefg".repeat(5);
    assert!(generate(&workspace, "run", &long, &["--temperature", "0"]).starts_with(&long));
}

/// The sample at the end of a run comes from the weights of its last checkpoint.
#[test]
fn a_run_ends_with_a_sample() {
    let workspace = trained();
    workspace.config(
        "sample.toml",
        &[("sample.prompt", "'abc'"), ("sample.temperature", "0.0"), ("sample.max_tokens", "5")],
    );
    let arguments = ["--resume", "latest", "--out", "run"];
    let said = workspace.succeed(&[&["train", "sample.toml"], &arguments[..]].concat());
    assert!(said.ends_with("sample: abcdefga\n"), "{said}");
}
