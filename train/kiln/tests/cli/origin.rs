//! Checkpoints name the parts they were trained with, and programs without these parts refuse them. The
//! example is a block whose parameters have the names and shapes of the built-in one but which computes
//! something else.

use burn::module::Module;
use burn::tensor::Tensor;
use kiln::checkpoint::{Architecture, Checkpoint};
use kiln::run::{Resume, RunOptions, Summary, TrainError};
use kiln_model::ModelConfig;
use kiln_model::layers::{Attention, Context, Layer, LayerInit, RmsNorm, SwiGlu};

use crate::messages::Messages;
use crate::support::Workspace;

/// Attention and feed-forward in parallel, with the fields of the built-in block.
#[derive(Module, Debug)]
struct Parallel {
    attention_norm: RmsNorm,
    attention: Attention,
    ffn_norm: RmsNorm,
    ffn: SwiGlu,
}

impl Parallel {
    fn new(init: LayerInit) -> Self {
        let norm = || RmsNorm::new(init.model.d_model, init.model.norm_eps, init.device);
        let (attention, ffn) = (Attention::new(init.fork("attention")), SwiGlu::new(init.fork("ffn")));
        Parallel { attention_norm: norm(), attention, ffn_norm: norm(), ffn }
    }
}

impl Layer for Parallel {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let mixed = self.attention.forward(self.attention_norm.forward(x.clone()), context);
        let fed = self.ffn.forward(self.ffn_norm.forward(x.clone()), context);
        x + mixed + fed
    }
}

/// Trains in `out` for `steps` steps with blocks called `name`, or with the built-in ones.
fn train(
    workspace: &Workspace,
    name: Option<&str>,
    out: &str,
    steps: u64,
    change: impl FnOnce(&mut RunOptions),
) -> Result<Summary, TrainError> {
    let data = format!("'{}'", workspace.path("data").display());
    let steps = steps.to_string();
    let block = name.map(|name| format!("'{name}'"));
    let mut changes =
        vec![("data.path", data.as_str()), ("train.steps", &steps), ("optim.schedule", "'constant'")];
    changes.extend(block.as_deref().map(|block| ("model.block", block)));
    let config = workspace.config("parallel.toml", &changes);
    let mut options = RunOptions { out: workspace.path(out).into(), ..RunOptions::default() };
    options.registry = options.registry.block(name.unwrap_or("unused"), |init| Ok(Parallel::new(init)));
    change(&mut options);
    kiln::run::train(config, &options)
}

fn resume(workspace: &Workspace, from: &str) -> impl FnOnce(&mut RunOptions) {
    let path = workspace.path(from);
    move |options| options.resume = Some(Resume::Path(path))
}

/// Trains two steps in `run`, with blocks called `parallel`.
fn trained() -> Workspace {
    let workspace = Workspace::new();
    train(&workspace, Some("parallel"), "run", 2, |_| {}).expect("a run");
    workspace
}

#[test]
fn every_command_refuses_parts_that_it_cannot_build() {
    let mut messages = Messages::default();
    let workspace = trained();
    workspace.succeed(&["convert", "--checkpoint", "run", "--out", "full"]);
    workspace.succeed(&["convert", "--checkpoint", "full", "--out", "three", "--ranks", "3"]);
    let checkpoint = "run/checkpoints/fsdp_cpt2";
    for from in [checkpoint, "full", "three"] {
        let mut refused = |title: &str, arguments: &[&str]| {
            messages.refused(&format!("{title} {from}"), &workspace, arguments);
        };
        refused("eval", &["eval", "--checkpoint", from, "--data", "data"]);
        let generate = ["--prompt", "a", "--max-tokens", "1"];
        refused("generate", &[&["generate", "--checkpoint", from][..], &generate].concat());
        refused("export", &["export", "--checkpoint", from, "--out", "hf"]);
        refused("resume", &["train", "run.toml", "--out", "new", "--resume", from]);
        let init = format!("init.from={from}");
        refused("init.from", &["train", "run.toml", "--out", "new", "--set", &init]);
    }
    insta::assert_snapshot!(messages.finish());

    // Inspecting, verifying and converting a checkpoint do not need its layers.
    for from in [checkpoint, "full", "three"] {
        let said = workspace.succeed(&["inspect", from]);
        assert!(said.contains("architecture: decoder with block `parallel`, not built in"), "{said}");
        assert!(said.contains("optimizer: adamw (state exp_avg, exp_avg_sq)"), "{said}");
        workspace.succeed(&["inspect", "--verify", from]);
    }
}

#[test]
fn a_program_goes_on_with_blocks_of_the_same_name_only() {
    let workspace = trained();
    let run = |name: Option<&str>, from: &str, out: &str, allow: bool| {
        let resume = resume(&workspace, from);
        train(&workspace, name, out, 4, |options| {
            resume(options);
            options.allow_other_parts = allow;
        })
        .map_err(|error| {
            assert!(error.is_usage(), "{error}");
            assert!(!workspace.path(out).exists(), "{out} was begun");
            error.to_string()
        })
    };
    train(&workspace, Some("parallel"), "whole", 4, |_| {}).expect("a run");
    run(Some("parallel"), "run", "same", false).expect("a run");
    assert_eq!(workspace.steps("same"), workspace.steps("whole")[2..]);

    let said = run(Some("serial"), "run", "other", false).expect_err("another name");
    for part in ["run/checkpoints/fsdp_cpt2 was trained with block `parallel`", "--allow-other-parts"] {
        assert!(said.contains(part), "{said}");
    }
    let said = run(None, "run", "other", false).expect_err("the built-in block");
    assert!(said.contains("block `parallel`"), "{said}");

    // The user can rename a block, or confirm that the difference is intended.
    run(Some("renamed"), "run", "renamed", true).expect("a run");
    assert_eq!(workspace.steps("renamed"), workspace.steps("whole")[2..]);
    let architecture = |out: &str| {
        let checkpoint = Checkpoint::open(&workspace.path(out)).expect("a checkpoint");
        checkpoint.manifest().architecture.clone()
    };
    let model =
        ModelConfig { block: Some("renamed".to_owned()), ..ModelConfig::preset("10m").expect("a preset") };
    assert_eq!(architecture("renamed"), Architecture::from_model(&model));

    train(&workspace, None, "stock", 2, |_| {}).expect("a run");
    assert_eq!(architecture("stock"), Architecture::decoder());
    let said = run(Some("parallel"), "stock", "other", false).expect_err("a stock checkpoint");
    assert!(said.contains("stock/checkpoints/fsdp_cpt2 was trained without block `parallel`"), "{said}");

    let arguments = ["train", "run.toml", "--out", "taken", "--set", "init.from=run"];
    let ended = workspace.kiln(&[&arguments[..], &["--allow-other-parts"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("block `parallel`"), "{ended:?}");
}

#[test]
fn moments_of_another_optimizer_are_refused() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    let folder = "run/checkpoints/fsdp_cpt2";
    workspace.replace_in_manifest(folder, "\"adamw\"", "\"lion\"");
    workspace.succeed(&["convert", "--checkpoint", "run", "--out", "full"]);
    let mut messages = Messages::default();
    for from in [folder, "full"] {
        let arguments = ["train", "run.toml", "--out", "new", "--resume", from];
        messages.refused(&format!("resume {from}"), &workspace, &arguments);
    }
    insta::assert_snapshot!(messages.finish());
    // The weights of the full checkpoint can be used like any others.
    workspace.succeed(&["eval", "--checkpoint", "full", "--data", "data"]);
    workspace.succeed(&["train", "run.toml", "--out", "new", "--set", "init.from=full"]);
}

/// The index of a full checkpoint has the layout of Hugging Face.
#[test]
fn a_checkpoint_is_not_imported_as_a_folder_of_hugging_face() {
    let workspace = trained();
    workspace.succeed(&["convert", "--checkpoint", "run", "--out", "full"]);
    workspace.write("full/config.json", r#"{"architectures": ["LlamaForCausalLM"]}"#);
    let ended = workspace.kiln(&["import", "--hf", "full", "--out", "imported"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("it is a checkpoint of Kiln"), "{ended:?}");
    let ended = workspace.kiln(&["eval", "--checkpoint", "full", "--data", "data"]);
    assert!(ended.stderr.contains("block `parallel`"), "{ended:?}");
}
