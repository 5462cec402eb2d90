//! `kiln config`: every key with its meaning, as text and as a schema for editors.

use std::path::{Path, PathBuf};

use kiln::config::{Config, json_schema, load};

use crate::support::Workspace;

fn repository(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file)
}

/// Returns the output of the command for `arguments`.
fn shown(arguments: &[&str]) -> String {
    let ended = Workspace::new().kiln(&[&["config"][..], arguments].concat());
    assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
    ended.stdout
}

#[test]
fn what_it_prints_is_a_configuration() {
    let read = |text: &str| toml::from_str::<Config>(text).expect("a configuration");
    assert_eq!(read(&shown(&[])), Config::default());
    assert_eq!(shown(&["--show"]), shown(&[]));
    for name in ["10m", "90m", "7b", "quickstart", "debug"] {
        let file = repository(&format!("configs/{name}.toml"));
        let printed = read(&shown(&[&file.display().to_string()]));
        let mut config = load(&file, &[]).expect("a configuration");
        // The sizes of a preset are printed expanded.
        config.model = printed.model.clone();
        assert_eq!(printed, config, "{name}");
    }
}

#[test]
fn a_value_that_is_no_default_says_so() {
    let file = repository("configs/90m.toml").display().to_string();
    let text = shown(&[&file, "--set", "train.seed=7", "--set", "optim.schedule=wsd"]);
    for line in ["seed = 7  # default: 0", "schedule = \"wsd\"  # default: \"cosine\"", "beta1 = 0.9\n"] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    // The user has set the preset, but not its sizes.
    for line in ["preset = \"90m\"  # default: not set", "d_model = 640\n"] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    let refused = Workspace::new().kiln(&["config", &file, "--set", "train.sed=7"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("did you mean `seed`?"), "{refused:?}");
}

/// `UPDATE_SCHEMA=1` regenerates `configs/schema.json`.
#[test]
fn editors_have_the_schema_of_this_version() {
    let file = repository("configs/schema.json");
    let now = shown(&["--schema"]);
    assert_eq!(serde_json::from_str::<serde_json::Value>(&now).expect("JSON"), json_schema());
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&file, &now).expect("the schema is written");
    }
    let kept = std::fs::read_to_string(&file).expect("the schema");
    assert!(kept.trim() == now.trim(), "run the test with UPDATE_SCHEMA=1, and commit {}", file.display());
}

#[test]
fn the_page_about_configuration_has_every_key() {
    let page = std::fs::read_to_string(repository("docs/configuration.md")).expect("the page");
    let schema = json_schema();
    for (section, described) in schema["properties"].as_object().expect("sections") {
        // The keys of `[experiment]` belong to the user.
        let Some(place) = described["$ref"].as_str().map(|place| place.trim_start_matches('#')) else {
            assert!(page.contains(&format!("## `[{section}]`")), "docs/configuration.md lacks [{section}]");
            continue;
        };
        let keys = schema.pointer(place).and_then(|section| section["properties"].as_object()).expect("keys");
        for key in keys.keys() {
            let names = [format!("`{key}`"), format!("`{section}.{key}`")];
            assert!(
                names.iter().any(|name| page.contains(name)),
                "docs/configuration.md lacks {section}.{key}"
            );
        }
    }
}
