//! `kiln-bench checkpoint`.

use crate::support::{Workspace, names};

#[test]
fn checkpoints_are_measured_and_leave_nothing() {
    let workspace = Workspace::new();
    workspace.config("bench.toml", &[("model.vocab_size", "300")]);
    let arguments = ["checkpoint", "--config", "bench.toml", "--ranks", "2"];
    let more = ["--rounds", "1", "--folder", ".", "--json"];
    let before = names(&workspace.path(""));
    let said = workspace.succeed(&[&arguments[..], &more].concat());
    let table: serde_json::Value = serde_json::from_str(&said).unwrap();
    let parameters = table["parameters"].as_u64().unwrap();
    assert!(table["bytes"].as_u64().unwrap() > 12 * parameters);
    // Every byte of weights and moments is read once.
    assert_eq!(table["read_over_bytes"], 1.0);
    for key in ["save_over_raw", "load_over_raw", "held_over_save", "slowed_over_save"] {
        assert!(table[key].is_number(), "{key}: {table}");
    }
    assert_eq!(names(&workspace.path("")), before);
    let text = workspace.succeed(&[&arguments[..], &more[..4]].concat());
    assert!(text.contains("x plain writing") && text.contains("% of a save"), "{text}");
}

/// On the device that wgpu finds.
#[cfg(feature = "wgpu")]
#[test]
fn checkpoints_of_a_gpu_are_measured() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("model.vocab_size", "300")]);
    // This key is for the CPU only.
    workspace.replace("run.toml", "threads = 1\n", "");
    workspace.replace("run.toml", "\"cpu\"", "\"wgpu\"");
    let arguments = ["checkpoint", "--folder", ".", "--config", "run.toml", "--ranks", "2"];
    let said = workspace.succeed(&[&arguments[..], &["--rounds", "1", "--json"]].concat());
    let table: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(table["read_over_bytes"], 1.0);
}
