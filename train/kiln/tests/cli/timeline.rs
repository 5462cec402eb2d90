//! `kiln train --trace`, `kiln trace summary`, and `--memory-profile`.

use crate::support::{Workspace, names};

#[test]
fn steps_are_traced_and_summed_up_and_keep_their_bits() {
    let workspace = Workspace::new();
    let train = |out: &str, more: &[&str]| {
        workspace.succeed(&[&["train", "run.toml", "--out", out, "--ranks", "2"], more].concat())
    };
    train("plain", &[]);
    let said = train("traced", &["--trace", "steps=2-3", "--memory-profile=2"]);
    assert!(said.contains("trace: traced/traces/steps-2-3.pftrace; open it at"), "{said}");
    assert_eq!(workspace.steps("plain"), workspace.steps("traced"));

    let file = "traced/traces/steps-2-3.pftrace";
    let summary = workspace.succeed(&["trace", "summary", file, "--json"]);
    let summary: serde_json::Value = serde_json::from_str(&summary).expect("JSON");
    let steps = summary["steps"].as_array().expect("steps");
    let numbers: Vec<_> = steps.iter().map(|step| step["step"].as_u64().expect("a number")).collect();
    assert_eq!(numbers, [2, 3]);
    for step in steps {
        let seconds = |value: &serde_json::Value| value.as_f64().expect("seconds");
        for rank in step["ranks"].as_array().expect("ranks") {
            let parts = ["computing_s", "data_s", "checkpoint_s", "exposed_s"].map(|key| seconds(&rank[key]));
            // Waits shorter than 2 us have no slice.
            let apart = (parts.iter().sum::<f64>() - seconds(&rank["step_s"])).abs();
            assert!(apart < 0.01 * seconds(&rank["step_s"]) + 1e-3, "{rank}");
        }
        let path = step["critical_path"].as_array().expect("parts");
        let all: f64 = path.iter().map(|part| seconds(&part["seconds"])).sum();
        assert!((all - seconds(&step["seconds"])).abs() < 1e-6, "{step}");
    }
    let text = workspace.succeed(&["trace", "summary", file]);
    assert!(text.contains("critical path") && text.lines().all(|line| line.chars().count() <= 80), "{text}");

    let peak = said.lines().find(|line| line.starts_with("memory of rank ")).expect("the peak");
    assert!(peak.contains(" in step 2: peak ") && peak.contains("weights "), "{peak}");
    assert!(!peak.contains("not explained") && !peak.contains("too many"), "{peak}");
    let expected = ["step-2-rank-0.svg", "step-2-rank-1.svg", "step-2.txt"];
    assert_eq!(names(&workspace.path("traced/memory")), expected);
}

#[test]
fn what_cannot_be_traced_is_refused_before_the_run() {
    let workspace = Workspace::new();
    for (flag, problem) in [
        ("--trace=steps=5000", "--trace steps=5000: the run has "),
        ("--trace=10-12", "expected steps=FIRST-LAST; write steps=10-12"),
        ("--memory-profile=5000", "--memory-profile=5000: the run has "),
        ("--memory-profile=0", "0 is not in 1.."),
    ] {
        let ended = workspace.kiln(&["train", "run.toml", "--out", "run", flag]);
        assert!(ended.code == Some(2) && ended.stderr.contains(problem), "{flag}: {ended:?}");
    }
    assert!(!workspace.path("run").exists());
    let ended = workspace.kiln(&["trace", "summary", "run.toml"]);
    assert!(ended.code == Some(2) && ended.stderr.contains("is not a Perfetto trace"), "{ended:?}");
}
