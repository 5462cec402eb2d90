//! `configs/debug.toml` from text to a model that has learned something.

use kiln::data::DataInfo;

use crate::presets::folder;
use crate::support::Workspace;

#[test]
fn the_debug_configuration_learns() {
    let workspace = Workspace::new();
    let config = folder().join("debug.toml");
    let said = workspace.succeed(&["train", config.to_str().expect("UTF-8"), "--out", "run"]);
    assert!(said.contains("done: 100 steps"), "{said}");
    let val_loss = workspace.val_loss("run");
    // The best loss of a model that ignores context.
    let data = DataInfo::load(workspace.path("runs/data/debug")).expect("prepared data");
    let unigram = data.unigram_entropy.expect("its unigram entropy").validation;
    assert!(val_loss < unigram, "{val_loss} is not below {unigram}");
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt100", "fsdp_cpt50", "latest"]);
}
