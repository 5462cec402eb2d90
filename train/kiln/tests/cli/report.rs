//! `kiln report`, and the report of `kiln bench strategies`.

use serde_json::{Value, json};

use crate::support::Workspace;

fn names(workspace: &Workspace, folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(workspace.path(folder)).expect("a folder");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Returns the data embedded in the page of a report.
fn data(workspace: &Workspace, folder: &str) -> Value {
    let page = workspace.text(format!("{folder}/report.html"));
    let (_, rest) = page.split_once("<script type=\"application/json\" id=\"report\">").expect("data");
    serde_json::from_str(rest.split_once("</script>").expect("its end").0).expect("JSON")
}

#[test]
fn runs_are_reported_with_their_numbers() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "runs/a"]);
    let other = ["--set", "shard.strategy=NO_SHARD", "--set", "train.ranks=1"];
    workspace.succeed(&[&["train", "run.toml", "--out", "runs/b"][..], &other].concat());
    let said = workspace.succeed(&["report", "runs/a", "runs/b", "--out", "report"]);
    assert_eq!(said, "the report is in report/report.html\n");
    let files = names(&workspace, "report");
    for curve in ["gradient-norm", "learning-rate", "loss", "throughput"] {
        assert!(files.contains(&format!("{curve}.svg")), "{files:?}");
        assert!(workspace.text(format!("report/{curve}.svg")).starts_with("<svg"));
    }
    let data = data(&workspace, "report");
    let answers = &data["answers"];
    let states: Vec<_> = (0..2).map(|run| &answers["/api/runs"]["runs"][run]["state"]).collect();
    assert_eq!(states, ["finished", "finished"]);
    let compared = &answers["/api/comparison"];
    assert_eq!(compared["is_spread"], true);
    let meshes: Vec<_> = (0..2).map(|run| &compared["runs"][run]["mesh"]).collect();
    assert_eq!(meshes, ["replicate 1 × shard 2", "replicate 1 × shard 1"]);
    let keys = answers["/api/config"]["keys"].as_array().expect("keys");
    let strategy = keys.iter().find(|row| row["key"] == "shard.strategy").expect("the key");
    assert_eq!(strategy["values"], json!(["FULL_SHARD", "NO_SHARD"]));
    let last: Value = workspace
        .text("runs/a/metrics.jsonl")
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .rfind(|line: &Value| line["loss"].is_number())
        .expect("a step");
    assert_eq!(compared["runs"][0]["loss"], json!({"step": 4, "value": last["loss"]}));
    let curve = &data["runs"]["a"]["/api/series"]["series"]["loss"]["mean"];
    let (drawn, logged) = (curve.as_array().expect("a curve"), last["loss"].as_f64().expect("a loss"));
    let drawn = drawn.last().and_then(Value::as_f64).expect("a value");
    assert!((drawn - logged).abs() <= 1e-5 * logged, "{drawn} {logged}");
    // The same runs give the same report, and the commands in the report reproduce the runs.
    workspace.succeed(&["report", "runs", "--out", "again"]);
    for file in files {
        assert!(
            workspace.read(format!("report/{file}")) == workspace.read(format!("again/{file}")),
            "{file} differs"
        );
    }
    workspace.succeed(&["train", "runs/a/config.toml", "--out", "a-again"]);
}

#[test]
fn reports_replace_nothing_and_need_runs() {
    let workspace = Workspace::new();
    workspace.write("taken/mine", "mine");
    workspace.write("odd/run.json", "{");
    for (arguments, says) in [
        (["report", "odd", "--out", "taken"], "taken exists and is not empty; reports overwrite nothing"),
        (["report", "data", "--out", "new"], "data is not a run folder"),
        (["report", "absent", "--out", "new"], "absent is not a run folder: it does not exist"),
    ] {
        let ended = workspace.kiln(&arguments);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(says), "{ended:?}");
    }
    assert_eq!(workspace.text("taken/mine"), "mine");
    assert!(!workspace.path("new").exists());
    workspace.succeed(&["report", "odd", "--out", "new"]);
    let missing = data(&workspace, "new")["answers"]["/api/comparison"]["runs"][0]["missing"].to_string();
    assert!(missing.contains("No training step is recorded."), "{missing}");
}

#[test]
fn strategies_are_reported() {
    let workspace = Workspace::new();
    workspace.config("bench.toml", &[("model.vocab_size", "300")]);
    let bench = ["bench", "strategies", "bench.toml", "--ranks", "2", "--steps", "1", "--rounds", "1"];
    let said = workspace.succeed(&[&bench[..], &["--report", "report"]].concat());
    assert!(said.ends_with("\nthe report is in report/report.html\n"), "{said}");
    let measured = &data(&workspace, "report")["answers"]["/api/strategies"];
    let rows = measured["rows"].as_array().expect("rows");
    let named: Vec<_> = rows.iter().map(|row| row["strategy"].as_str().expect("a name")).collect();
    let all = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP"];
    assert!(named.len() == all.len() && all.iter().all(|one| named.contains(one)), "{named:?}");
    for row in rows {
        assert!(row["mesh"].as_str().is_some_and(|mesh| mesh.starts_with("replicate ")), "{row}");
        let speed = row["tokens_per_s"].as_f64().expect("a speed");
        assert_eq!(row["tokens_per_s_range"], json!([speed, speed]), "one round has one speed");
    }
    let words = json!([&bench[..], &["--report", "report"]].concat());
    let command = measured["command"].as_array().expect("words");
    assert_eq!(json!(command[1..]), words);
    // Nothing is measured if the folder for the report exists already.
    let again = workspace.kiln(&[&bench[..], &["--report", "report"]].concat());
    assert_eq!((again.code, again.stdout.as_str()), (Some(2), ""), "{again:?}");
}
