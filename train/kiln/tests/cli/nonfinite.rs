//! Steps with a gradient that is not finite, under `train.nonfinite = "skip"`.

use std::path::Path;

use kiln::run::MAX_SKIPPED;
use safetensors::SafeTensors;

use crate::support::{Workspace, assert_same_curve, names};

const SKIP: [(&str, &str); 4] = [
    ("train.nonfinite", "'skip'"),
    ("train.steps", "6"),
    ("checkpoint.every", "1"),
    ("model.dropout", "0.1"),
];

/// Returns all weights and moments of a checkpoint, by file.
fn tensors(workspace: &Workspace, out: &str, step: u64) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(out).join(format!("checkpoints/fsdp_cpt{step}"));
    names(&workspace.path(&folder))
        .into_iter()
        .filter(|name| name.ends_with(".safetensors"))
        .map(|name| (name.clone(), workspace.read(folder.join(name))))
        .collect()
}

#[test]
fn a_skipped_step_leaves_weights_and_moments_as_they_were() {
    for changes in [
        &[][..],
        &[("shard.strategy", "'NO_SHARD'")],
        &[
            ("shard.strategy", "'HYBRID_SHARD'"),
            ("shard.shard_size", "2"),
            ("train.ranks", "4"),
            ("train.micro_batch", "1"),
        ],
    ] {
        let workspace = Workspace::new();
        workspace.config("run.toml", &[&SKIP[..], changes].concat());
        let drill = ["train", "run.toml", "--out", "run", "--fault", "nan@backward:3:1"];
        let said = workspace.succeed(&drill);
        let line = said.lines().find(|line| line.contains("was skipped")).expect("it is said");
        assert!(
            line.starts_with("step     3/6 | the gradient norm is NaN (first in the gradient of `"),
            "{line}"
        );
        let where_from = "; all tensors are finite when the passes are repeated: the value came from a \
             collective or corrupted memory";
        assert!(line.ends_with(&format!("{where_from}: the update was skipped (1 so far)")), "{line}");

        assert!(tensors(&workspace, "run", 2) == tensors(&workspace, "run", 3), "unchanged");
        assert!(tensors(&workspace, "run", 3) != tensors(&workspace, "run", 4), "it goes on");
        let steps: Vec<_> = workspace.steps("run").into_iter().map(|(step, ..)| step).collect();
        assert_eq!(steps, [1, 2, 4, 5, 6]);
        let metrics = workspace.metrics("run");
        let skipped = metrics.iter().find(|line| line.get("skipped").is_some()).expect("a line");
        assert_eq!((&skipped["step"], &skipped["skipped"]), (&3.into(), &1.into()));
        let name = skipped["parameter"].as_str().expect("a parameter");
        assert!(line.contains(name), "{name}: {line}");
        let state = |step| workspace.state(&format!("run/checkpoints/fsdp_cpt{step}"));
        assert!(state(2).get("skipped").is_none());
        assert_eq!((&state(3)["skipped"], &state(3)["step"]), (&1.into(), &3.into()));
        // The position in the data advances.
        assert_eq!(state(3)["next_sample"], 3 * 8);

        // The checkpoint stores how many updates AdamW has made.
        for from in [2, 3, 4] {
            let (out, from) = (format!("from{from}"), format!("run/checkpoints/fsdp_cpt{from}"));
            let resume = ["train", "run.toml", "--out", &out, "--resume", &from];
            workspace.succeed(&[&resume, &drill[4..]].concat());
            let straight = workspace.steps("run");
            let resumed = workspace.steps(&out);
            assert_same_curve(&out, &resumed, &straight[straight.len() - resumed.len()..], 0.0);
            assert!(tensors(&workspace, &out, 6) == tensors(&workspace, "run", 6), "{out}");
        }
    }
}

/// AdamW's first update moves a weight by the learning rate, whatever the gradient; so does the update in step 2,
/// if step 1 was skipped.
#[test]
fn bias_correction_counts_updates_and_not_steps() {
    let workspace = Workspace::new();
    let plain = [
        ("optim.schedule", "'constant'"),
        ("optim.warmup_steps", "0"),
        ("optim.lr", "0.01"),
        ("optim.weight_decay", "0.0"),
        ("optim.grad_clip", "0.0"),
        ("optim.eps", "1e-20"),
    ];
    workspace.config("run.toml", &[&SKIP[..], &plain].concat());
    workspace.succeed(&["train", "run.toml", "--out", "run", "--fault", "nan@backward:1:0"]);
    let weights = |step| {
        let mut values: Vec<f32> = Vec::new();
        for (_, bytes) in
            tensors(&workspace, "run", step).iter().filter(|(name, _)| name.starts_with("model"))
        {
            let file = SafeTensors::deserialize(bytes).expect("tensors");
            let mut tensors = file.tensors();
            tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
            for (_, tensor) in tensors {
                let floats = tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
                values.extend(floats);
            }
        }
        values
    };
    let moves = weights(1).into_iter().zip(weights(2)).map(|(before, after)| (after - before).abs());
    let moves: Vec<f32> = moves.filter(|by| *by != 0.0).collect();
    assert!(moves.len() > 1000, "{}", moves.len());
    for by in moves {
        assert!((by - 0.01).abs() < 1e-4, "{by}");
    }
    // A run can resume from a checkpoint without moments.
    let from = ["train", "run.toml", "--out", "on", "--resume", "run/checkpoints/fsdp_cpt1"];
    workspace.succeed(&from);
    assert_same_curve("on", &workspace.steps("on"), &workspace.steps("run"), 0.0);
}

#[test]
fn too_many_in_a_row_end_the_run() {
    let workspace = Workspace::new();
    // The weights are so large that no step has a finite gradient.
    let endless = [("train.nonfinite", "'skip'"), ("train.steps", "20"), ("model.init_std", "1e30")];
    workspace.config("run.toml", &endless);
    let ended = workspace.kiln(&["train", "run.toml", "--out", "run"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.starts_with("error: step 10: the gradient norm is NaN"), "{}", ended.stderr);
    assert!(ended.stderr.contains("as in the 9 steps before"), "{}", ended.stderr);
    let skipped = workspace.metrics("run").len() as u64;
    assert_eq!(skipped, MAX_SKIPPED - 1);
}
