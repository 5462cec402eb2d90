//! Invalid configurations: refused before any work, with the key and the fix.

use crate::messages::Messages;
use crate::support::{RUN, Workspace};

/// A title, and the values to change in a valid configuration.
const VALUES: &[(&str, &[(&str, &str)])] = &[
    ("zero steps", &[("train.steps", "0")]),
    ("zero ranks", &[("train.ranks", "0")]),
    ("zero log interval", &[("log.every", "0")]),
    ("negative learning rate", &[("optim.lr", "-1e-3")]),
    ("learning rate that is not a number", &[("optim.lr", "nan")]),
    ("endless learning rate", &[("optim.lr", "inf")]),
    ("beta of one", &[("optim.beta1", "1.0")]),
    ("negative beta", &[("optim.beta2", "-0.5")]),
    ("negative clipping", &[("optim.grad_clip", "-1.0")]),
    (
        "decay that does not fit behind the warm-up",
        &[("optim.schedule", "'wsd'"), ("optim.decay_steps", "3")],
    ),
    (
        "decay of a group that does not fit",
        &[("optim.groups", "[{ parameters = ['*'], schedule = 'wsd', decay_steps = 3 }]")],
    ),
    (
        "ratio of a group that is out of range",
        &[("optim.groups", "[{ parameters = ['*'], warmup_steps = 5, min_lr_ratio = -1.0 }]")],
    ),
    ("batch that ranks cannot share", &[("train.ranks", "3")]),
    ("batch that micro-batches cannot fill", &[("train.micro_batch", "3")]),
    ("heads that do not divide the width", &[("model.heads", "3"), ("model.kv_heads", "3")]),
    ("kv heads that do not divide the heads", &[("model.kv_heads", "3")]),
    ("heads of odd width", &[("model.d_model", "12"), ("model.kv_heads", "4")]),
    ("heads of a given odd width", &[("model.head_dim", "5")]),
    ("frequencies that are squeezed", &[("model.rope_scaling", "{ kind = 'linear', factor = 0.5 }")]),
    ("no layers", &[("model.layers", "0")]),
    ("dropout of everything", &[("model.dropout", "1.0")]),
    ("unknown preset", &[("model.preset", "'10b'")]),
    ("hybrid without a size", &[("shard.strategy", "'HYBRID_SHARD'")]),
    (
        "shard size that does not divide the ranks",
        &[("shard.strategy", "'HYBRID_SHARD'"), ("shard.shard_size", "3")],
    ),
    ("shard size that the strategy has no use for", &[("shard.shard_size", "1")]),
    ("no data", &[("data.path", "''")]),
    ("vocabulary without room for bytes", &[("data.text", "['a.txt']"), ("data.vocab_size", "99")]),
    ("no time for communication", &[("comm.timeout_s", "0.0")]),
    ("no time for a save", &[("checkpoint.timeout_s", "0.0")]),
    ("a name to freeze that matches no parameter", &[("train.freeze", "['layer.0']")]),
    ("nothing left to train", &[("train.freeze", "['']")]),
    ("several problems at once", &[("train.steps", "0"), ("optim.lr", "-1.0"), ("train.ranks", "5")]),
];

#[test]
fn values_out_of_range_are_refused() {
    let mut messages = Messages::default();
    for (title, changes) in VALUES {
        let workspace = Workspace::new();
        workspace.config("bad.toml", changes);
        messages.refused(title, &workspace, &["train", "bad.toml", "--out", "run"]);
    }
    insta::assert_snapshot!(messages.finish());
}

/// A title, and the text to replace in a valid file: the message shows the line.
const TEXTS: &[(&str, &str, &str)] = &[
    ("not TOML", "d_model = 16", "d_model: 16"),
    ("unknown key", "warmup_steps = 2", "warm_up_steps = 2"),
    ("unknown section", "[optim]", "[optimizer]"),
    ("text for a number", "lr = 1e-2", "lr = \"1e-2\""),
    ("fraction for a count", "steps = 4", "steps = 4.5"),
    ("negative count", "steps = 4", "steps = -4"),
    ("number for a path", "path = \"data\"", "path = 3"),
    ("number for a switch", "seq_len = 8", "seq_len = 8\nshuffle = 1"),
    ("unknown schedule", "lr = 1e-2", "lr = 1e-2\nschedule = \"linear\""),
    ("key given twice", "steps = 4", "steps = 4\nsteps = 5"),
    ("unknown strategy", "[eval]", "[shard]\nstrategy = \"ZERO_3\"\n\n[eval]"),
    ("unknown scaling", "layers = 2", "layers = 2\nrope_scaling = { kind = \"yarn\", factor = 2.0 }"),
    ("scaling without its factor", "layers = 2", "layers = 2\nrope_scaling = { kind = \"linear\" }"),
    ("unknown dtype", "[eval]", "[precision]\ncompute = \"f8\"\n\n[eval]"),
    (
        "f16 without a GPU, on the wire, and with state on the host",
        "[eval]",
        "[shard]\noffload = true\n\n[precision]\ncompute = \"f16\"\nreduce = \"f16\"\n\n[eval]",
    ),
];

#[test]
fn files_that_cannot_be_understood_are_refused() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    for (title, from, to) in TEXTS {
        assert!(RUN.contains(from), "{title}");
        workspace.write("bad.toml", RUN.replacen(from, to, 1));
        messages.refused(title, &workspace, &["train", "bad.toml", "--out", "run"]);
    }
    messages.refused("missing file", &workspace, &["train", "none.toml", "--out", "run"]);
    messages.refused("a folder", &workspace, &["train", "data", "--out", "run"]);
    workspace.write("bad.toml", b"[model]\nd_model = \xFF\n");
    messages.refused("not UTF-8", &workspace, &["train", "bad.toml", "--out", "run"]);
    insta::assert_snapshot!(messages.finish());
}

#[test]
fn overrides_are_checked_like_the_file() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    for (title, argument) in [
        ("no value", "train.steps"),
        ("no key", "train=3"),
        ("nothing", ""),
        ("too deep", "train.steps.more=3"),
        ("unknown key", "train.step=3"),
        ("unknown section", "trian.steps=3"),
        ("wrong type", "train.steps=many"),
        ("unknown choice", "shard.strategy=full_shards"),
        ("value out of range", "optim.lr=-1"),
        ("text for a number", "optim.lr=fast"),
        ("text for a switch", "data.shuffle=sometimes"),
        ("number for a switch", "data.shuffle=1"),
        ("list without quotes", "data.text=[a.txt]"),
        ("text for a list", "sample.prompts=a"),
        ("list for a number", "train.steps=[1]"),
        ("fraction for a count", "train.steps=4.5"),
        ("number for a section", "model.rope_scaling=3"),
        ("switch for a choice", "comm.seal=true"),
        ("number for a choice", "train.micro_batch=0.5"),
        ("ports that do not exist", "comm.ports=310000"),
        ("time beyond all bounds", "comm.timeout_s=9e18"),
        ("time that ends before it begins", "comm.join_timeout_s=-1"),
    ] {
        let arguments = ["train", "run.toml", "--out", "run", "--set", argument];
        messages.refused(title, &workspace, &arguments);
    }
    for (title, key) in [("whole number", "train.steps"), ("number", "optim.lr")] {
        let set = format!("{key}={}", "9".repeat(309));
        let arguments = ["train", "run.toml", "--out", "run", "--set", &set];
        messages.refused(&format!("{title} of 309 digits"), &workspace, &arguments);
    }
    let arguments = ["train", "run.toml", "--out", "run", "--ranks", "3"];
    messages.refused("ranks that cannot share the batch", &workspace, &arguments);
    let arguments = ["train", "run.toml", "--out", "run", "--ranks", "0"];
    messages.refused("no ranks", &workspace, &arguments);
    insta::assert_snapshot!(messages.finish());
}

/// Numbers, booleans and dates are accepted where a string is expected, so users need not quote
/// for both the shell and TOML.
#[test]
fn texts_need_no_quotes_whatever_they_look_like() {
    for value in ["31000", "true", "1.50", "2026-01-01", "0x10", "'7'"] {
        let workspace = Workspace::new();
        let name = value.trim_matches('\'');
        std::fs::rename(workspace.path("data"), workspace.path(name)).expect("another name");
        let set = format!("data.path={value}");
        workspace.succeed(&["train", "run.toml", "--out", "run", "--set", &set]);
        let written = workspace.text("run/config.toml");
        assert!(written.contains(&format!("path = \"{name}\"\n")), "{written}");
    }
}

#[test]
fn a_warm_up_longer_than_the_run_is_shortened() {
    let workspace = Workspace::new();
    let long = ["train", "run.toml", "--out", "long", "--set", "optim.warmup_steps=100"];
    let said = workspace.succeed(&long);
    assert!(
        said.contains("the warm-up of 100 steps is longer than the run: it is shortened to 4 steps"),
        "{said}"
    );
    workspace.succeed(&["train", "run.toml", "--out", "whole", "--set", "optim.warmup_steps=4"]);
    assert_eq!(workspace.steps("long"), workspace.steps("whole"));
    // The saved configuration has the number of warm-up steps that the run used.
    assert!(workspace.text("long/config.toml").contains("warmup_steps = 4"));
}
