//! Data that is missing, damaged or does not fit the model.

use std::fs::File;

use crate::messages::Messages;
use crate::support::{TRAIN_TOKENS, VOCAB, Workspace, tokens};

const TRAIN: [&str; 4] = ["train", "run.toml", "--out", "run"];

/// Creates a workspace and damages it.
fn broken(damage: impl FnOnce(&Workspace)) -> Workspace {
    let workspace = Workspace::new();
    damage(&workspace);
    workspace
}

#[test]
fn missing_or_unfit_data_is_refused() {
    let mut messages = Messages::default();
    let mut refused = |title: &str, damage: &dyn Fn(&Workspace)| {
        messages.refused(title, &broken(damage), &TRAIN);
    };
    refused("missing folder", &|w| w.remove("data"));
    refused("folder without data.json", &|w| w.remove("data/data.json"));
    refused("folder without train.bin", &|w| w.remove("data/train.bin"));
    refused("folder without a tokenizer", &|w| w.remove("data/tokenizer.json"));
    refused("sequences longer than the data", &|w| {
        w.config("run.toml", &[("data.seq_len", "1801")]);
    });
    refused("sequences longer than the validation data", &|w| {
        w.config("run.toml", &[("data.seq_len", "200")]);
    });
    refused("tokenizer larger than the model", &|w| {
        w.config("run.toml", &[("model.vocab_size", "200")]);
    });
    refused("tokenizer larger than data.json says, and than the model", &|w| {
        w.replace("data/data.json", &format!("\"vocab_size\":{VOCAB}"), "\"vocab_size\":200");
        w.config("run.toml", &[("model.vocab_size", "200")]);
    });
    refused("text to prepare that is not there", &|w| {
        w.config("run.toml", &[("data.path", "'new'"), ("data.text", "['a.txt']")]);
    });
    refused("a place to prepare that is taken", &|w| {
        w.write("taken/notes.txt", "x");
        w.config("run.toml", &[("data.path", "'taken'"), ("data.text", "['run.toml']")]);
    });
    insta::assert_snapshot!(messages.finish());
}

#[test]
fn damaged_data_stops_the_start() {
    let mut messages = Messages::default();
    let mut fails = |title: &str, damage: &dyn Fn(&Workspace)| {
        let workspace = broken(damage);
        messages.fails(title, &workspace, &TRAIN);
        assert!(!workspace.path("run").exists(), "{title}");
    };
    fails("truncated train.bin", &|w| w.write("data/train.bin", [0; 100]));
    fails("truncated val.bin", &|w| w.write("data/val.bin", ""));
    fails("data.json that is not JSON", &|w| w.write("data/data.json", "{\"format_version\": 1,"));
    fails("data.json without a key", &|w| w.replace("data/data.json", "\"dtype\":\"u16\",", ""));
    fails("data.json of the future", &|w| {
        w.replace("data/data.json", "\"format_version\":1", "\"format_version\":2");
    });
    fails("damaged tokenizer", &|w| w.write("data/tokenizer.json", "{}"));
    insta::assert_snapshot!(messages.finish());
}

/// The error appears when the token is read; until then the run proceeds normally.
#[test]
fn token_outside_the_vocabulary_is_located() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    let mut train = tokens(TRAIN_TOKENS);
    // The invalid token is in the third step, on any rank.
    train[2 * 8 * 8 + 5] = 999;
    workspace.write_data("data", &train);
    workspace.config("run.toml", &[("data.shuffle", "false")]);
    messages.fails("token outside the vocabulary", &workspace, &TRAIN);
    assert_eq!(workspace.steps("run").len(), 2);
    assert!(workspace.checkpoints("run").is_empty());
    insta::assert_snapshot!(messages.finish());
}

/// The run ends with an error message, and is not killed by a signal.
#[test]
fn truncated_data_stops_the_run() {
    for ranks in ["1", "2"] {
        let workspace = Workspace::new();
        workspace.config("run.toml", &[("train.steps", "1000000"), ("train.ranks", ranks)]);
        let run = workspace.start(&TRAIN);
        workspace.wait_for_steps("run", 2);
        let file = File::options().write(true).open(workspace.path("data/train.bin"));
        file.expect("a file").set_len(0).expect("a shorter file");
        let ended = workspace.end(run);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let message = "error: data/train.bin became shorter while it was in use: it had 3602 bytes \
                       and has 0 now, so sample ";
        assert!(ended.stderr.contains(message), "{ended:?}");
    }
}
