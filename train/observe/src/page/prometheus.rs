//! Runs in Prometheus' text format: `/metrics`.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

use super::summary::{ACTIVITIES, summary};
use super::watched::{Watched, WatchedRun};
use crate::status::{Look, State};

/// Prometheus name and help, key in `metrics.jsonl`, and factor to the unit in the name.
const VALUES: [(&str, &str, &str, f64); 11] = [
    ("kiln_loss", "Training loss of the last logged step, in nats per token.", "loss", 1.0),
    ("kiln_validation_loss", "Loss of the last evaluation, in nats per token.", "val_loss", 1.0),
    ("kiln_answer_loss", "Loss of the answers to eval.prompts, in nats per token.", "answer_loss", 1.0),
    ("kiln_gradient_norm", "Norm of the gradient before clipping.", "grad_norm", 1.0),
    ("kiln_learning_rate", "Learning rate of the last logged step.", "lr", 1.0),
    ("kiln_tokens_per_second", "Tokens per second of all ranks together.", "tokens_per_s", 1.0),
    ("kiln_model_flops_per_second", "Model FLOP/s of all ranks together.", "tflops", 1e12),
    (
        "kiln_model_flops_utilization_ratio",
        "Share of the hardware's FLOP/s that the model uses (MFU).",
        "mfu",
        1.0,
    ),
    ("kiln_step_duration_seconds", "Duration of the last logged step.", "step_s", 1.0),
    ("kiln_memory_peak_bytes", "Most memory that any rank has held.", "peak_bytes", 1.0),
    ("kiln_last_line_timestamp_seconds", "When the last line of metrics was written.", "time", 1.0),
];

const STATES: [State; 10] = [
    State::Starting,
    State::Healthy,
    State::Slow,
    State::Held,
    State::Suspicion,
    State::Trouble,
    State::Finished,
    State::Stopped,
    State::Failed,
    State::Dead,
];

struct Family {
    help: &'static str,
    kind: &'static str,
    samples: Vec<(String, f64)>,
}

#[derive(Default)]
struct Page(BTreeMap<&'static str, Family>);

impl Page {
    fn add(&mut self, name: &'static str, help: &'static str, labels: &[(&str, &str)], value: Option<f64>) {
        let Some(value) = value else { return };
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        let family = self.0.entry(name).or_insert_with(|| Family { help, kind, samples: Vec::new() });
        let labels: Vec<_> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        family.samples.push((labels.join(","), value));
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (name, Family { help, kind, samples }) in &self.0 {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in samples {
                let _ = writeln!(text, "{name}{{{labels}}} {}", number(*value));
            }
        }
        text
    }
}

pub(super) fn metrics(watched: &Watched) -> String {
    let mut page = Page::default();
    let version = env!("CARGO_PKG_VERSION");
    page.add("kiln_build_info", "Version of the server.", &[("version", version)], Some(1.0));
    for run in watched.runs() {
        add_run(&mut page, &run);
        let look = run.seen().look.clone();
        if let Some(look) = look {
            add_look(&mut page, &run.id, &look);
        }
    }
    page.text()
}

fn add_run(page: &mut Page, watched: &WatchedRun) {
    let id = watched.id.as_str();
    let summary = summary(watched);
    let run = watched.read();
    let config = |key: &str| run.config().get(key).map_or("", String::as_str);
    let folder = run.folder().display().to_string();
    let labels = [
        ("run", id),
        ("folder", &folder),
        ("preset", config("model.preset")),
        ("strategy", config("shard.strategy")),
    ];
    page.add("kiln_run_info", "A run and its main settings.", &labels, Some(1.0));
    let run_label = [("run", id)];
    let count = |count: u64| count as f64;
    page.add("kiln_step", "Optimizer steps that are done.", &run_label, summary.progress.step.map(count));
    page.add(
        "kiln_planned_steps",
        "Optimizer steps of the whole run.",
        &run_label,
        summary.progress.steps.map(count),
    );
    page.add(
        "kiln_checkpoint_step",
        "Step of the newest checkpoint.",
        &run_label,
        summary.progress.saved.map(count),
    );
    let last = |key: &str| Some(run.metrics().get(key)?.last()?.1);
    page.add("kiln_tokens_total", "Tokens that were trained on.", &run_label, last("tokens"));
    for (name, help, key, factor) in VALUES {
        page.add(name, help, &run_label, last(key).map(|value| value * factor));
    }
    for (activity, key) in ACTIVITIES {
        const HELP: &str = "Seconds of the last logged step on rank 0, by activity.";
        page.add("kiln_step_activity_seconds", HELP, &[("run", id), ("activity", activity)], last(key));
    }
    for state in STATES {
        let is_it = summary.state.map(|now| f64::from(u8::from(now == state)));
        page.add(
            "kiln_run_state",
            "1 for the state of the run, 0 for all others.",
            &[("run", id), ("state", &word(&state))],
            is_it,
        );
    }
    let mut kinds: BTreeMap<&str, u32> = BTreeMap::new();
    run.events().iter().for_each(|event| *kinds.entry(&event.kind).or_default() += 1);
    for (kind, count) in kinds {
        let labels = [("run", id), ("kind", kind)];
        page.add("kiln_events_total", "Events of the run, by kind.", &labels, Some(f64::from(count)));
    }
}

fn add_look(page: &mut Page, id: &str, look: &Look) {
    for rank in &look.ranks {
        let number = rank.rank.to_string();
        let labels = [("run", id), ("rank", number.as_str())];
        let up = f64::from(u8::from(rank.silent.is_none()));
        page.add("kiln_rank_up", "1 if the rank answers, 0 otherwise.", &labels, Some(up));
        page.add("kiln_rank_step", "Step that the rank is in.", &labels, rank.step.map(|step| step as f64));
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        page.add("kiln_rank_memory_bytes", "Memory that the rank holds.", &labels, bytes(rank.bytes));
        const PEAK: &str = "Most memory that the rank has held.";
        page.add("kiln_rank_memory_peak_bytes", PEAK, &labels, bytes(rank.peak_bytes));
        const WAITING: &str = "Seconds since the rank entered its collective; 0 outside of collectives.";
        let waiting = rank.pending.as_ref().map_or(0.0, |call| call.seconds);
        page.add("kiln_rank_waiting_seconds", WAITING, &labels, rank.silent.is_none().then_some(waiting));
    }
}

fn word(state: &State) -> String {
    match serde_json::to_value(state) {
        Ok(Value::String(word)) => word,
        _ => String::new(),
    }
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn number(value: f64) -> String {
    match (value.is_nan(), value.is_infinite()) {
        (true, _) => "NaN".to_owned(),
        (_, true) => if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned(),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_as_prometheus_reads_it() {
        let mut page = Page::default();
        page.add("kiln_loss", "Loss.", &[("run", "a\"b\\c\nd")], Some(2.5));
        page.add("kiln_tokens_total", "Tokens.", &[("run", "a")], Some(1e12));
        page.add("kiln_step", "Steps.", &[], None);
        page.add("kiln_loss", "Loss.", &[("run", "b")], Some(f64::NAN));
        let expected = "# HELP kiln_loss Loss.\n# TYPE kiln_loss gauge\nkiln_loss{run=\"a\\\"b\\\\c\\nd\"} 2.5\n\
                        kiln_loss{run=\"b\"} NaN\n# HELP kiln_tokens_total Tokens.\n\
                        # TYPE kiln_tokens_total counter\nkiln_tokens_total{run=\"a\"} 1000000000000\n";
        assert_eq!(page.text(), expected);
        assert_eq!(
            [number(f64::INFINITY), number(-f64::INFINITY), number(1e-9)],
            ["+Inf", "-Inf", "0.000000001"]
        );
    }
}
