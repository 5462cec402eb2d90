//! `kiln report`, and the report of `kiln bench strategies`.

use crate::support::Workspace;

fn names(workspace: &Workspace, folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(workspace.path(folder)).expect("a folder");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn runs_are_reported_with_their_numbers() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "runs/a"]);
    let other = ["--set", "shard.strategy=NO_SHARD", "--set", "train.ranks=1"];
    workspace.succeed(&[&["train", "run.toml", "--out", "runs/b"][..], &other].concat());
    let said = workspace.succeed(&["report", "runs/a", "runs/b", "--out", "report"]);
    assert_eq!(said, "the report is in report/report.html and report/report.md\n");
    let plots = ["gradient-norm", "learning-rate", "loss", "peak-memory", "strategies", "throughput"];
    let files = names(&workspace, "report");
    for plot in plots {
        assert!(files.contains(&format!("{plot}.svg")), "{files:?}");
        assert!(workspace.text(format!("report/{plot}.svg")).starts_with("<svg"));
    }
    let markdown = workspace.text("report/report.md");
    assert!(markdown.contains("| State | complete, step 4 of 4 | complete, step 4 of 4 |"), "{markdown}");
    assert!(markdown.contains("| `shard.strategy` | `FULL_SHARD` | `NO_SHARD` |"), "{markdown}");
    assert!(markdown.contains("| Mesh | replicate 1 × shard 2 | replicate 1 × shard 1 |"), "{markdown}");
    let last: serde_json::Value = workspace
        .text("runs/a/metrics.jsonl")
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .rfind(|line: &serde_json::Value| line["loss"].is_number())
        .expect("a step");
    let loss = format!("{:.4} (step 4)", last["loss"].as_f64().expect("a loss"));
    assert!(markdown.contains(&loss), "{loss}: {markdown}");
    let page = workspace.text("report/report.html");
    assert!(
        page.contains(&loss) && !page.contains("<script") && page.matches("<figure").count() >= plots.len()
    );
    // The same runs make the same report, and what they name repeats them.
    workspace.succeed(&["report", "runs", "--out", "again"]);
    for file in files {
        assert_eq!(
            workspace.read(format!("report/{file}")),
            workspace.read(format!("again/{file}")),
            "{file}"
        );
    }
    workspace.succeed(&["train", "runs/a/config.toml", "--out", "a-again"]);
}

#[test]
fn a_report_replaces_nothing_and_needs_a_run() {
    let workspace = Workspace::new();
    workspace.write("taken/mine", "mine");
    workspace.write("odd/run.json", "{");
    for (arguments, says) in [
        (
            ["report", "odd", "--out", "taken"],
            "taken is there already and is not empty; nothing is overwritten",
        ),
        (["report", "data", "--out", "new"], "data is not the folder of a run"),
        (["report", "absent", "--out", "new"], "absent is not the folder of a run: it is not there"),
    ] {
        let ended = workspace.kiln(&arguments);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(says), "{ended:?}");
    }
    assert_eq!(workspace.text("taken/mine"), "mine");
    assert!(!workspace.path("new").exists());
    workspace.succeed(&["report", "odd", "--out", "new"]);
    assert!(workspace.text("new/report.md").contains("odd: no training step is recorded."));
}

#[test]
fn strategies_are_reported() {
    let workspace = Workspace::new();
    workspace.config("bench.toml", &[("model.vocab_size", "300")]);
    let bench =
        ["bench", "strategies", "--config", "bench.toml", "--ranks", "2", "--steps", "1", "--rounds", "1"];
    let said = workspace.succeed(&[&bench[..], &["--report", "report"]].concat());
    assert!(said.ends_with("\nthe report is in report/report.html and report/report.md\n"), "{said}");
    let plots = ["exposed.svg", "peak-memory.svg", "sent-bytes.svg", "throughput.svg"];
    let files = names(&workspace, "report");
    assert!(plots.iter().all(|plot| files.contains(&(*plot).to_owned())), "{files:?}");
    let markdown = workspace.text("report/report.md");
    for strategy in ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP"] {
        assert!(markdown.contains(&format!("| {strategy} | replicate ")), "{markdown}");
    }
    let command = "bench strategies --config bench.toml --ranks 2 --steps 1 --rounds 1 --report report";
    assert!(markdown.contains(command), "{markdown}");
    // Nothing is measured for a place that is taken.
    let again = workspace.kiln(&[&bench[..], &["--report", "report"]].concat());
    assert_eq!((again.code, again.stdout.as_str()), (Some(2), ""), "{again:?}");
}
