//! Reports of runs that are made up.

use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag};
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::run::Run;

const HOSTILE: &str = "</pre></code><script>alert(1)</script><img src=x onerror=alert(2)> [x](http://evil.example/) \
                       | `\u{1b}[2J\u{202e} &amp; \"'";

/// A folder with runs of known numbers.
struct Runs {
    root: TempDir,
}

impl Runs {
    fn new() -> Self {
        Runs { root: tempfile::tempdir().unwrap() }
    }

    fn write(&self, file: &str, text: impl AsRef<[u8]>) {
        let path = self.root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A run of 40 steps whose losses are those of the others up to step `same`.
    fn add(&self, name: &str, config: &str, same: u64, speed: f64) {
        let identity = json!({
            "kiln_run": 1, "created": "2026-11-25T07:17:49Z", "build": "0.1.0 (commit abc)", "device": "CPU",
        });
        self.write(&format!("{name}/run.json"), identity.to_string());
        let common = "[model]\nlayers = 4\nd_model = 96\n[log]\nevery = 1\n[data]\npath = \"a b\"\n";
        self.write(&format!("{name}/config.toml"), format!("{common}{config}"));
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
        let event = |time: f64, step: u64, kind: &str, text: &str| {
            format!("{}\n", json!({"time": time, "step": step, "kind": kind, "text": text}))
        };
        let events = [
            event(1e9, 0, "start", "the run began"),
            event(1e9 + 20.25, 20, "resume", "went on from step 20"),
            event(1e9 + 40.0, 40, "end", "40 steps"),
        ];
        self.write(&format!("{name}/events.jsonl"), events.concat());
        let sample = |step: u64| json!({"step": step, "prompt": "Once", "text": " upon\n\n```\na time"});
        self.write(&format!("{name}/samples.jsonl"), format!("{}\n{}\n", sample(20), sample(40)));
        let manifest = json!({"ranks": 2, "state": {"data_sha256": "3d3b"}});
        self.write(&format!("{name}/checkpoints/fsdp_cpt40/manifest.json"), manifest.to_string());
        self.write(&format!("{name}/.kiln/holder.json"), "{\"process\":{\"host\":\"vm\"}}   ");
    }

    /// The report of the runs in the order of their names.
    fn report(&self) -> Document {
        let folders = crate::run::find_runs(&[self.root.path().to_owned()]).unwrap();
        let runs: Vec<_> = folders.iter().map(|folder| Run::open(folder).unwrap()).collect();
        of_runs(&runs, "0.1.0 (commit abc)")
    }

    /// What is the same in every folder.
    fn stable(&self, text: &str) -> String {
        text.replace(&self.root.path().display().to_string(), "RUNS")
    }
}

fn settings(strategy: &str, ranks: u64, lr: f64) -> String {
    format!(
        "[train]\nsteps = 40\nranks = {ranks}\nseed = 7\n[optim]\nlr = {lr}\n[shard]\nstrategy = \"{strategy}\"\n"
    )
}

#[test]
fn runs_are_compared() {
    let runs = Runs::new();
    runs.add("a", &settings("FULL_SHARD", 2, 1e-3), 40, 100.0);
    runs.add("b", &settings("NO_SHARD", 2, 1e-3), 40, 200.0);
    runs.add("c", &settings("FULL_SHARD", 4, 2e-3), 10, 50.0);
    insta::assert_snapshot!(runs.stable(&markdown::page(&runs.report())));
}

#[test]
fn a_run_is_reported_alone() {
    let runs = Runs::new();
    runs.add("a", &settings("FULL_SHARD", 2, 1e-3), 40, 100.0);
    let page = markdown::page(&runs.report());
    assert!(page.starts_with("# Run a\n") && !page.contains("Strategies and ranks"), "{page}");
    assert!(page.contains("<summary>All 9 keys</summary>"), "{page}");
}

/// Half a line, a run that was killed, files of another build, and nothing but a name.
#[test]
fn what_is_missing_is_told() {
    let runs = Runs::new();
    runs.add("a", &settings("FULL_SHARD", 2, 1e-3), 40, 100.0);
    runs.write("b/run.json", "{\"kiln_run\":");
    runs.write("c/config.toml", "[train]\nsteps = 9\n");
    runs.write(
        "c/metrics.jsonl",
        "{\"step\":1,\"loss\":null}\nnot a line\n{\"step\":2,\"loss\":3.5}\n{\"step\":3,\"lo",
    );
    runs.write("c/metrics-superseded.jsonl", "");
    runs.write("d/run.json", "{\"kiln_run\":7,\"build\":\"9.0\",\"device\":[1]}");
    runs.write("d/config.toml", "= what");
    runs.write("d/checkpoints/fsdp_cpt5/manifest.json", "[");
    runs.write("d/checkpoints/fsdp_cptx/manifest.json", "[");
    let report = runs.report();
    insta::assert_snapshot!(runs.stable(&markdown::page(&report)));
    write(&report, &runs.root.path().join("report"), "--out").unwrap();
}

#[test]
fn a_run_that_diverged_is_not_reported_with_its_last_finite_loss() {
    let runs = Runs::new();
    runs.add("a", &settings("FULL_SHARD", 2, 1e-3), 40, 100.0);
    runs.add("b", &settings("NO_SHARD", 2, 1e-3), 40, 100.0);
    let path = runs.root.path().join("b/metrics.jsonl");
    let metrics = fs::read_to_string(&path).unwrap();
    let at_end = "{\"step\":40,\"loss\":null}\n{\"step\":40,\"val_loss\":null}\n";
    fs::write(&path, metrics + at_end).unwrap();
    let page = markdown::page(&runs.report());
    let row = |name: &str| page.lines().find(|line| line.contains(name)).unwrap();
    for name in ["Training loss, last logged step", "Last validation loss"] {
        assert!(row(name).contains("not finite (step 40)"), "{}", row(name));
    }
    assert!(row("Best validation loss").contains("(step 20)"), "{}", row("Best validation loss"));
    assert!(page.contains("differs from step 40 on, where one of the two is not finite (1 step)"), "{page}");
}

#[test]
fn many_checkpoints_do_not_hide_how_a_run_ended() {
    let runs = Runs::new();
    for name in ["a", "b"] {
        runs.add(name, &settings("FULL_SHARD", 2, 1e-3), 40, 100.0);
        let event = |index: u64| {
            let kind = if index == 99 { "failure" } else { "checkpoint" };
            let text = format!("event {index}");
            format!("{}\n", json!({"time": 1.0, "step": index, "kind": kind, "text": text}))
        };
        runs.write(&format!("{name}/events.jsonl"), (0..100).map(event).collect::<String>());
        runs.write(&format!("{name}/superseded-1/metrics.jsonl"), "");
    }
    let page = markdown::page(&runs.report());
    assert_eq!((page.matches("event 99").count(), page.matches("event 40 ").count()), (2, 2), "{page}");
    assert!(!page.contains("event 39 ") && page.contains("120 of 200 events"), "{page}");
    assert!(page.contains("lines are in superseded-1/metrics.jsonl."), "{page}");
    // Of what is no checkpoint, the first and the last.
    let skipped =
        |index: u64| json!({"time": 1.0, "step": index, "kind": "skipped", "text": format!("event {index}")});
    runs.write("a/events.jsonl", (0..100).map(|index| format!("{}\n", skipped(index))).collect::<String>());
    let page = markdown::page(&runs.report());
    let is_of_a = |index: u64| {
        page.lines().any(|line| line.starts_with("| a ") && line.contains(&format!("event {index} ")))
    };
    assert_eq!([0, 29, 30, 69, 70, 99].map(is_of_a), [true, true, false, false, true, true], "{page}");
}

/// Every attribute of a page by which a browser would load something, and its value.
fn references(page: &str) -> Vec<String> {
    let value = |mark: &str, end: char| {
        let parts: Vec<_> = page.split(mark).skip(1).collect();
        parts
            .into_iter()
            .map(|part| part.split(end).next().unwrap_or_default().to_owned())
            .collect::<Vec<_>>()
    };
    let marks =
        [(" href=\"", '"'), (" src=\"", '"'), ("xlink:href=\"", '"'), ("url(", ')'), ("@import", ';')];
    marks.into_iter().flat_map(|(mark, end)| value(mark, end)).collect()
}

#[test]
fn nothing_of_a_file_is_obeyed_and_nothing_is_loaded() {
    let runs = Runs::new();
    let name = "run <b>&\"'";
    runs.add(
        name,
        &format!("{}[experiment]\nnote = {}\n", settings("FULL_SHARD", 2, 1e-3), json!(HOSTILE)),
        40,
        1.0,
    );
    runs.add("other $x$ |", &settings(&HOSTILE.replace(['"', '\u{1b}'], ""), 3, 1e-3), 5, 1.0);
    let sample = json!({"step": 40, "prompt": HOSTILE, "text": HOSTILE});
    runs.write(&format!("{name}/samples.jsonl"), format!("{sample}\n"));
    let event = json!({"time": 1.0, "step": 1, "kind": HOSTILE, "text": HOSTILE});
    runs.write(&format!("{name}/events.jsonl"), format!("{event}\n"));
    let identity = json!({"kiln_run": 1, "build": HOSTILE, "device": HOSTILE, "created": HOSTILE});
    runs.write(&format!("{name}/run.json"), identity.to_string());
    let place = runs.root.path().join("report");
    let report = runs.report();
    write(&report, &place, "--out").unwrap();
    let text = |path: &Path| fs::read_to_string(path).unwrap();
    let page = text(&place.join("report.html"));
    for mark in ["<script", "<img", "<link", "<iframe", "<object", "onerror=alert(2)>", "\u{1b}", "\u{202e}"]
    {
        assert!(!page.contains(mark), "{mark}");
    }
    assert!(page.contains("&lt;script&gt;alert(1)"), "it is shown");
    let found = references(&page);
    assert!(found.len() > 10 && found.iter().all(|to| to.starts_with('#')), "{found:?}");
    // Names of XML are no addresses; all others are those of the text.
    let addresses = page.matches("://").count();
    let shown =
        page.matches("http://www.w3.org/2000/svg").count() + page.matches("http://evil.example/").count();
    assert_eq!(addresses, shown);
    let markdown = text(&place.join("report.md"));
    let html = Parser::new_ext(&markdown, Options::ENABLE_TABLES).filter_map(|event| match event {
        Event::Html(html) | Event::InlineHtml(html) => Some(html.trim().to_owned()),
        Event::Start(Tag::Link { dest_url, .. }) => Some(dest_url.into_string()),
        _ => None,
    });
    let ours = ["<details>", "<details><summary>", "<summary>", "</summary>", "</details>"];
    let html: Vec<_> = html
        .filter(|html| !ours.contains(&html.as_str()) && !html.starts_with("<details><summary>The "))
        .collect();
    assert!(html.is_empty() && !markdown.contains('\u{1b}'), "{html:?}");
    let mut plots: Vec<PathBuf> = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().path()).collect();
    plots.retain(|path| path.extension().is_some_and(|ending| ending == "svg"));
    assert!(plots.len() > 5);
    for path in plots {
        let plot = text(&path);
        assert!(!plot.contains("<script") && !plot.contains("<b>") && !plot.contains("var("), "{plot}");
        assert!(markdown.contains(&format!("]({})", path.file_name().unwrap().to_string_lossy())));
    }
}

#[test]
fn strategies_are_shown() {
    let row = |strategy: &str, tokens_per_s: f64| StrategyRow {
        strategy: strategy.to_owned(),
        mesh: "replicate 1 x shard 2".to_owned(),
        tokens_per_s,
        tokens_per_s_range: (tokens_per_s - 1.0, tokens_per_s + 1.0),
        relative_speed: tokens_per_s / 100.0,
        peak_bytes: 3 << 20,
        sent_bytes: 1 << 20,
        gathers: 10,
        reductions: 5,
        wait_share: 0.25,
    };
    let measured = Strategies {
        parameters: 10_500_000,
        ranks: 2,
        global_batch: 8,
        seq_len: 64,
        seed: 3,
        steps: 5,
        rounds: 3,
        program: "0.1.0".to_owned(),
        device: "CPU".to_owned(),
        facts: vec![("Compute dtype".to_owned(), "f32".to_owned())],
        command: ["kiln", "bench", "strategies", "--config", "a b.toml"].map(str::to_owned).to_vec(),
        rows: vec![row("FULL_SHARD", 100.0), row("NO_SHARD", 150.0)],
    };
    let report = of_strategies(&measured);
    insta::assert_snapshot!(markdown::page(&report));
    let folder = tempfile::tempdir().unwrap();
    write(&report, folder.path(), "--report").unwrap();
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert_eq!(page.matches("<figure").count(), 4);
}
