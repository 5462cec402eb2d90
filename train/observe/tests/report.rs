//! Reports of made-up runs, checked by the data in their page.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_observe::report::{Report, ReportError};
use kiln_observe::status::LookAt;
use serde_json::{Value, json};
use tempfile::TempDir;

const PROGRAM: &str = "0.1.0 (commit abc)";

const HOSTILE: &str =
    "</script><script>alert(1)</script><!-- <script> <img src=x onerror=alert(2)> \u{1b}[2J \" '";

/// A folder with runs of known numbers.
struct Runs {
    root: TempDir,
}

impl Runs {
    fn new() -> Self {
        Runs { root: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn write(&self, file: &str, text: impl AsRef<[u8]>) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Adds a run of 40 steps whose losses equal those of the others up to step `same`.
    fn add(&self, name: &str, config: &str, same: u64, speed: f64) {
        let identity = json!({
            "kiln_run": 1, "created": "2026-11-25T07:17:49Z", "build": "0.1.0 (commit abc)", "device": "CPU",
        });
        self.write(&format!("{name}/run.json"), identity.to_string());
        self.write(
            &format!("{name}/config.toml"),
            format!("[model]\nlayers = 4\n[data]\npath = \"a b\"\n{config}"),
        );
        let mut metrics = String::new();
        for step in 1..=40_u64 {
            let away = if step > same { 1e-3 } else { 0.0 };
            let line = json!({
                "step": step, "time": 1e9 + step as f64, "loss": 2.0 + 6.0 / step as f64 + away, "grad_norm": 1.0,
                "lr": 1e-3, "tokens_per_s": speed + (step % 5) as f64, "tokens": 1024 * step, "mfu": 0.5,
                "peak_bytes": 2 << 20, "step_s": 0.1, "data_s": 0.01, "forward_s": 0.02, "backward_s": 0.04,
                "optimizer_s": 0.01, "other_s": 0.0, "wait_s": 0.02, "tflops": 0.25,
            });
            metrics += &format!("{line}\n");
            if step % 20 == 0 {
                metrics += &format!("{}\n", json!({"step": step, "val_loss": 3.0 + step as f64 / 100.0}));
            }
        }
        self.write(&format!("{name}/metrics.jsonl"), metrics);
        let event = |time: f64, step: u64, kind: &str| {
            format!("{}\n", json!({"time": time, "step": step, "kind": kind, "text": "as it happened"}))
        };
        let events = [event(1e9, 0, "start"), event(1e9 + 20.0, 20, "resume"), event(1e9 + 40.0, 40, "end")];
        self.write(&format!("{name}/events.jsonl"), events.concat());
        let manifest = json!({"ranks": 2, "state": {"data_sha256": "3d3b"}});
        self.write(&format!("{name}/checkpoints/fsdp_cpt40/manifest.json"), manifest.to_string());
        self.write(&format!("{name}/.kiln/holder.json"), "{\"process\":{\"host\":\"vm\"}}   ");
    }

    fn report(&self) -> Report {
        let look_at: LookAt = Arc::new(|_| Err("no process can be asked".to_owned()));
        Report::from_runs(vec![self.root.path().to_owned()], look_at, None, PROGRAM).unwrap()
    }

    /// Writes the report and returns its page.
    fn page(&self, place: &Path) -> String {
        self.report().write(place, "--out").unwrap();
        fs::read_to_string(place.join("report.html")).unwrap()
    }

    /// Returns the data of the report.
    fn data(&self) -> Value {
        let place = tempfile::tempdir().unwrap();
        data_of(&self.page(place.path()))
    }
}

fn data_of(page: &str) -> Value {
    let (_, rest) = page.split_once("<script type=\"application/json\" id=\"report\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

fn settings(strategy: &str, ranks: u64, lr: f64) -> String {
    format!(
        "[train]\nsteps = 40\nranks = {ranks}\nseed = 7\n[optim]\nlr = {lr}\n[shard]\nstrategy = \"{strategy}\"\n"
    )
}

/// Returns the run of this name in the comparison.
fn compared<'a>(data: &'a Value, name: &str) -> &'a Value {
    let runs = data["answers"]["/api/comparison"]["runs"].as_array().unwrap();
    runs.iter().find(|run| run["id"] == name).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn runs_are_compared() {
    let runs = Runs::new();
    runs.add("a", &settings("FULL_SHARD", 2, 1e-3), 40, 100.0);
    runs.add("b", &settings("NO_SHARD", 2, 1e-3), 40, 200.0);
    runs.add("c", &settings("FULL_SHARD", 4, 2e-3), 10, 50.0);
    let data = runs.data();
    assert_eq!(data["program"], PROGRAM);
    let comparison = &data["answers"]["/api/comparison"];
    assert_eq!((&comparison["is_spread"], &comparison["other_keys"]), (&json!(true), &json!(["optim.lr"])));
    let [a, b, c] = ["a", "b", "c"].map(|name| compared(&data, name));
    // Steps 5 to 40 are steady: their speeds repeat 100, 101, 102, 103 and 104.
    assert_eq!(a["tokens_per_s"], json!({"lower": 101.0, "median": 102.0, "upper": 103.0}));
    assert_eq!(b["tokens_per_s"]["median"], 202.0);
    assert_eq!(
        (&a["loss"], &a["best_val_loss"], &a["val_loss"]),
        (
            &json!({"step": 40, "value": 2.15}),
            &json!({"step": 20, "value": 3.2}),
            &json!({"step": 40, "value": 3.4}),
        )
    );
    assert_eq!(
        [&a["mesh"], &b["mesh"], &c["mesh"]],
        ["replicate 1 × shard 2", "replicate 2 × shard 1", "replicate 1 × shard 4"]
    );
    assert_eq!(a["losses"], Value::Null);
    assert_eq!(b["losses"], "the same bits at 40 steps that both have logged, up to step 40");
    assert_eq!(c["losses"], "differs from step 11 on by at most 4.7e-4 relative");
    let spent: Vec<_> = a["spent"].as_array().unwrap().iter().map(|part| part[1].as_f64().unwrap()).collect();
    assert!((spent.iter().sum::<f64>() - 0.1).abs() < 1e-9, "{spent:?}");
    assert!((a["waits"].as_f64().unwrap() - 0.2).abs() < 1e-9, "{a}");
    assert_eq!(
        (&a["restarts"], &a["checkpoints"], &a["peak_bytes"]),
        (&json!(1), &json!([40]), &json!(2097152.0))
    );
    assert_eq!(
        [&a["build"], &a["device"], &a["host"], &a["data"], &a["seed"], &a["created"]],
        ["0.1.0 (commit abc)", "CPU", "vm", "3d3b", "7", "2026-11-25T07:17:49Z"]
    );
    assert_eq!((&a["seconds"], &a["tokens"], &a["missing"]), (&json!(39.0), &json!(40960.0), &json!([])));
    let config = data["answers"]["/api/config"]["keys"].as_array().unwrap();
    let differing: Vec<_> =
        config.iter().filter(|key| key["differs"] == true).map(|key| &key["key"]).collect();
    assert_eq!(differing, ["optim.lr", "shard.strategy", "train.ranks"]);
}

#[test]
fn equal_strategies_are_not_compared() {
    let runs = Runs::new();
    runs.add("a", &settings("FULL_SHARD", 2, 1e-3), 40, 100.0);
    runs.add("b", &settings("FULL_SHARD", 2, 2e-3), 10, 100.0);
    runs.write("b/run.json", json!({"kiln_run": 1, "build": "0.2.0", "device": "CPU"}).to_string());
    let data = runs.data();
    assert_eq!(data["answers"]["/api/comparison"]["is_spread"], false);
    assert_eq!(compared(&data, "b")["losses"], Value::Null);
    assert_eq!(data["answers"]["/api/comparison"]["differences"], json!(["build of the program"]));
}

/// Half a line, a killed run, files of another build, and a folder with nothing but a name.
#[test]
fn gaps_are_named() {
    let runs = Runs::new();
    runs.write("b/run.json", "{\"kiln_run\":");
    runs.write("c/config.toml", "[train]\nsteps = 9\n");
    let lines = "{\"step\":1,\"loss\":null}\nnot a line\n{\"step\":2,\"loss\":3.5}\n{\"step\":3,\"lo";
    runs.write("c/metrics.jsonl", lines);
    runs.write("c/metrics-superseded.jsonl", "");
    runs.write("c/superseded-1/metrics.jsonl", "");
    runs.write("d/run.json", "{\"kiln_run\":7,\"build\":\"9.0\",\"device\":[1]}");
    runs.write("d/config.toml", "= what");
    runs.write("d/checkpoints/fsdp_cpt5/manifest.json", "[");
    runs.write("d/checkpoints/fsdp_cptx/manifest.json", "[");
    let data = runs.data();
    let missing = |name: &str| compared(&data, name)["missing"].to_string();
    for (name, text) in [
        ("b", "run.json: EOF while parsing"),
        ("b", "its build, device and start are unknown"),
        ("b", "No training step is recorded"),
        ("c", "run.json: the file is missing"),
        ("c", "skipped 1 line that this build cannot read"),
        ("c", "recorded up to step 2 of 9"),
        ("c", "not finite at 1 logged step"),
        ("c", "No validation loss is recorded"),
        ("c", "No breakdown of step times is recorded"),
        ("c", "restarts are unknown"),
        ("c", "lines are in metrics-superseded.jsonl, superseded-1/metrics.jsonl"),
        ("d", "run.json has version 7"),
        ("d", "the SHA-256 of its data is unknown"),
        ("d", "config.toml: "),
    ] {
        assert!(missing(name).contains(text), "{name}: {text}: {}", missing(name));
    }
    assert_eq!(compared(&data, "d")["checkpoints"], json!([5]));
    assert_eq!(compared(&data, "d")["build"], "9.0");
}

#[test]
fn diverged_runs_show_no_finite_loss() {
    let runs = Runs::new();
    runs.add("a", &settings("FULL_SHARD", 2, 1e-3), 40, 100.0);
    runs.add("b", &settings("NO_SHARD", 2, 1e-3), 40, 100.0);
    let metrics = fs::read_to_string(runs.path("b/metrics.jsonl")).unwrap();
    let at_end = "{\"step\":40,\"loss\":null}\n{\"step\":40,\"val_loss\":null}\n";
    runs.write("b/metrics.jsonl", metrics + at_end);
    let data = runs.data();
    let b = compared(&data, "b");
    assert_eq!([&b["loss"], &b["val_loss"]], [&json!({"step": 40, "value": null}); 2]);
    assert_eq!(b["best_val_loss"]["step"], 20);
    assert_eq!(b["losses"], "differs from step 40 on; one of the two is not finite at 1 step");
    assert_eq!(data["answers"]["/api/runs"]["runs"][1]["loss"], Value::Null);
}

#[test]
fn pages_hold_every_curve() {
    let runs = Runs::new();
    let mut lines = String::new();
    for step in 1..=10_000_u64 {
        let loss = if step == 777 { 50.0 } else { 1.0 / step as f64 };
        lines += &format!(
            "{{\"step\":{step},\"loss\":{loss},\"lr\":0.5,\"tokens\":{},\"layers.3.rms\":1}}\n",
            64 * step
        );
        if step % 1000 == 0 {
            lines += &format!("{{\"step\":{step},\"val_loss\":2.5}}\n");
        }
    }
    runs.write("long/run.json", "{}");
    runs.write("long/metrics.jsonl", lines);
    let data = runs.data();
    let answer = &data["runs"]["long"]["/api/series"];
    let (axes, series) = (answer["axes"].as_array().unwrap(), &answer["series"]);
    assert_eq!(axes.len(), 2, "curves of the same steps share an axis");
    let axis = |key: &str| &axes[series[key]["axis"].as_u64().unwrap() as usize];
    assert_eq!(axis("loss"), axis("layers.3.rms"));
    let steps = axis("loss")["steps"].as_array().unwrap();
    assert!(steps.len() <= 800 && steps.len() == series["loss"]["mean"].as_array().unwrap().len());
    assert!(series["loss"]["high"].as_array().unwrap().contains(&json!(50.0)), "no peak is lost");
    assert_eq!(axis("val_loss")["steps"].as_array().unwrap().len(), 10);
    assert_eq!(axis("val_loss")["tokens"][0], 64_000.0);
    assert_eq!(
        data["runs"]["long"]["/api/keys"]["keys"],
        json!(["loss", "lr", "tokens", "layers.3.rms", "val_loss"])
    );
}

#[test]
fn text_of_runs_stays_data() {
    let runs = Runs::new();
    let name = "run <b>&\"'";
    let note = format!("{}[experiment]\nnote = {}\n", settings("FULL_SHARD", 2, 1e-3), json!(HOSTILE));
    runs.add(name, &note, 40, 1.0);
    runs.add("other $x$ |", &settings("NO_SHARD", 3, 1e-3), 5, 1.0);
    let sample = json!({"step": 40, "prompt": HOSTILE, "text": HOSTILE});
    runs.write(&format!("{name}/samples.jsonl"), format!("{sample}\n"));
    let event = json!({"time": 1.0, "step": 1, "kind": HOSTILE, "text": HOSTILE});
    runs.write(&format!("{name}/events.jsonl"), format!("{event}\n"));
    let identity = json!({"kiln_run": 1, "build": HOSTILE, "device": HOSTILE, "created": HOSTILE});
    runs.write(&format!("{name}/run.json"), identity.to_string());
    let place = runs.path("report");
    let page = runs.page(&place);
    // The data, and the page's own script.
    assert_eq!((page.matches("<script").count(), page.matches("</script>").count()), (2, 2));
    for mark in ["<img", "<iframe", "<object", "\u{1b}", "<b>&", "<!--"] {
        assert!(!page.contains(mark), "{mark}");
    }
    let policy = "default-src 'none'; script-src 'nonce-";
    assert!(page.contains(policy) && !page.contains("connect-src") && !page.contains("unsafe"));
    let data = data_of(&page);
    assert_eq!(data["runs"][name]["/api/samples"]["samples"][0]["text"], HOSTILE);
    assert_eq!(data["runs"][name]["/api/events"]["events"][0]["kind"], HOSTILE);
    assert_eq!(compared(&data, name)["device"], HOSTILE);
    let curves: Vec<_> = names(&place).into_iter().filter(|name| name.ends_with(".svg")).collect();
    let all = ["gradient-norm", "learning-rate", "loss", "throughput", "validation-loss"];
    assert_eq!(curves, all.map(|name| format!("{name}.svg")));
    for file in curves {
        let curve = fs::read_to_string(place.join(file)).unwrap();
        assert!(curve.starts_with("<svg") && !curve.contains("<script") && !curve.contains("<b>"), "{curve}");
        assert!(curve.contains("run &lt;b&gt;&amp;&quot;"), "{curve}");
    }
}

#[test]
fn same_runs_make_the_same_report() {
    let runs = Runs::new();
    runs.add("a", &settings("FULL_SHARD", 2, 1e-3), 40, 100.0);
    runs.add("b", &settings("NO_SHARD", 2, 1e-3), 40, 200.0);
    let places = tempfile::tempdir().unwrap();
    let places = ["one", "two"].map(|place| places.path().join(place));
    let pages = places.each_ref().map(|place| runs.page(place));
    assert!(pages[0] == pages[1]);
    assert_eq!(names(&places[0]), names(&places[1]));
    for name in names(&places[0]) {
        assert_eq!(
            fs::read(places[0].join(&name)).unwrap(),
            fs::read(places[1].join(&name)).unwrap(),
            "{name}"
        );
    }
}

#[test]
fn reports_overwrite_nothing() {
    let root = tempfile::tempdir().unwrap();
    let report = Report::from_strategies(&json!({"rows": []}), PROGRAM).unwrap();
    let place = root.path().join("a/report");
    report.write(&place, "--out").unwrap();
    assert_eq!(names(&place), ["report.html"]);
    let again = report.write(&place, "--out").unwrap_err().to_string();
    assert!(again.ends_with("name a new folder with --out DIR, or remove that one"), "{again}");
    let (empty, file) = (root.path().join("empty"), root.path().join("file"));
    fs::create_dir(&empty).unwrap();
    fs::write(&file, "mine").unwrap();
    report.write(&empty, "--out").unwrap();
    assert!(matches!(report.write(&file, "--out"), Err(ReportError::Exists { .. })));
    assert_eq!(fs::read(&file).unwrap(), b"mine");
    assert_eq!(names(root.path()), ["a", "empty", "file"]);
}

#[test]
fn strategies_are_reported() {
    let measured =
        json!({"parameters": 10_500_000, "rows": [{"strategy": "FULL_SHARD", "tokens_per_s": 100.0}]});
    let folder = tempfile::tempdir().unwrap();
    Report::from_strategies(&measured, PROGRAM).unwrap().write(folder.path(), "--report").unwrap();
    assert_eq!(names(folder.path()), ["report.html"]);
    let data = data_of(&fs::read_to_string(folder.path().join("report.html")).unwrap());
    assert_eq!((&data["program"], &data["answers"]["/api/strategies"]), (&json!(PROGRAM), &measured));
}
