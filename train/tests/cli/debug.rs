//! `configs/debug.toml` from text to a model that has learned something.

use crate::presets::folder;
use crate::support::Workspace;

#[test]
fn the_debug_configuration_learns() {
    let workspace = Workspace::new();
    let config = folder().join("debug.toml");
    let said = workspace.succeed(&["train", config.to_str().expect("UTF-8"), "--out", "run"]);
    assert!(said.contains("done: 20 steps"), "{said}");
    let val_loss = workspace.val_loss("run");
    // What a model that knows nothing has.
    let uniform = 300_f64.ln();
    assert!(val_loss < uniform, "{val_loss} is not below {uniform}");
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt10", "fsdp_cpt20", "latest"]);
}
