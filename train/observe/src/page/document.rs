//! The page: one self-contained HTML document. A report is the same document with all its data.

use std::collections::BTreeMap;
use std::path::PathBuf;

use hyper::body::Bytes;
use serde::Serialize;
use serde_json::{Value, json, to_value};
use sha2::{Digest, Sha256};

use super::comparison::comparison;
use super::details::{all_series, config, events, keys, look, samples};
use super::summary::runs as summaries;
use super::timeline::timeline;
use super::watched::{TimelinesAt, Watched, WatchedRun};
use crate::run::Run;
use crate::status::LookAt;

const FRAME: &str = include_str!("assets/index.html");

const STYLES: [&str; 2] = [include_str!("assets/uplot/uPlot.min.css"), include_str!("assets/style.css")];

const SCRIPTS: [&str; 13] = [
    include_str!("assets/js/dom.js"),
    include_str!("assets/js/format.js"),
    include_str!("assets/js/data.js"),
    include_str!("assets/js/chart.js"),
    include_str!("assets/js/table.js"),
    include_str!("assets/js/overview.js"),
    include_str!("assets/js/curves.js"),
    include_str!("assets/js/ranks.js"),
    include_str!("assets/js/timeline.js"),
    include_str!("assets/js/results.js"),
    include_str!("assets/js/memory.js"),
    include_str!("assets/js/texts.js"),
    include_str!("assets/js/main.js"),
];

const UPLOT: &str = include_str!("assets/uplot/uPlot.iife.min.js");
const UPLOT_LICENSE: &str = include_str!("assets/uplot/LICENSE");

/// Returns the page of a server. The browser runs only the script with `nonce`.
pub(super) fn served(nonce: &str) -> Bytes {
    Bytes::from(document(nonce, "", ""))
}

/// Returns the page as a file that contains all its data and loads nothing.
///
/// The nonce is a hash of the answers, so no text in them can contain it.
pub(super) fn inlined(answers: &impl Serialize) -> serde_json::Result<String> {
    // Prevents text in a JSON string from ending the element or starting a comment.
    let json = serde_json::to_string(answers)?.replace('<', "\\u003c");
    let nonce: String = Sha256::digest(&json)[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let rule = format!("{}; img-src data:; base-uri 'none'; form-action 'none'", rule(&nonce));
    let head = format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{rule}\">\n");
    Ok(document(&nonce, &head, &format!("<script type=\"application/json\" id=\"report\">{json}</script>\n")))
}

/// Returns a content security policy that allows only the script and the style sheet with `nonce`.
pub(super) fn rule(nonce: &str) -> String {
    format!("default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'")
}

fn document(nonce: &str, head: &str, data: &str) -> String {
    let script = format!("{UPLOT}\n(() => {{\n\"use strict\";\n{}\n}})();", SCRIPTS.join("\n"));
    FRAME
        .replace("@STYLE@", &STYLES.join("\n"))
        .replace("@SCRIPT@", &script)
        .replace("@LICENSE@", UPLOT_LICENSE)
        .replace("@VERSION@", env!("CARGO_PKG_VERSION"))
        .replace("@NONCE@", nonce)
        .replace("@HEAD@\n", head)
        // Last, because untrusted data may contain any mark.
        .replace("@DATA@\n", data)
}

const POINTS: usize = 800;

pub(crate) struct Snapshot {
    watched: Watched,
}

impl Snapshot {
    pub(crate) fn new(paths: Vec<PathBuf>, look_at: LookAt, timelines_at: Option<TimelinesAt>) -> Self {
        let watched = Watched::new(paths, look_at, timelines_at);
        watched.read_folders();
        for run in watched.runs() {
            run.want_timelines();
        }
        watched.ask_processes();
        Snapshot { watched }
    }

    /// Returns the page of the runs with all its data. `program` is the version of the program that writes the page.
    pub(crate) fn page(&self, program: &str) -> serde_json::Result<String> {
        let runs = self.watched.runs();
        // A report has no clock: the newest line's time is the current time.
        let now = runs
            .iter()
            .filter_map(|run| Some(run.read().metrics().get("time")?.last()?.1))
            .fold(0.0, f64::max);
        let answers = json!({
            "/api/runs": to_value(summaries(&self.watched, now, Vec::new(), false))?,
            "/api/config": to_value(config(&runs))?,
            "/api/comparison": to_value(comparison(&runs))?,
        });
        let of_runs: Result<BTreeMap<_, _>, _> =
            runs.iter().map(|run| Ok((run.id.clone(), for_run(run)?))).collect();
        inlined(&json!({ "program": program, "answers": answers, "runs": of_runs? }))
    }

    pub(crate) fn each(&self, mut with: impl FnMut(&str, &Run)) {
        self.watched.runs().iter().for_each(|run| with(&run.id, &run.read()));
    }
}

fn for_run(run: &WatchedRun) -> serde_json::Result<Value> {
    Ok(json!({
        "/api/series": to_value(all_series(run, POINTS))?,
        "/api/keys": to_value(keys(run))?,
        "/api/samples": to_value(samples(run))?,
        "/api/events": to_value(events(run))?,
        "/api/look": to_value(look(run))?,
        "/api/timeline": to_value(timeline(run))?,
    }))
}

/// Returns the page of the measurements of `kiln bench strategies`.
pub(crate) fn page_of_strategies(measured: &impl Serialize, program: &str) -> serde_json::Result<String> {
    inlined(&json!({ "program": program, "answers": { "/api/strategies": to_value(measured)? } }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(page: &str, nonce: &str) {
        for mark in ["@NONCE@", "@SCRIPT@", "@STYLE@", "@HEAD@", "@DATA@"] {
            assert!(!page.contains(mark), "{mark}");
        }
        assert_eq!(page.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
        assert!(page.contains("uPlot=function") && page.contains("The MIT License"));
        for outside in ["src=\"http", "href=\"http", "@import", "url(http", "//cdn", "</script>\n(()"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn pages_load_nothing() {
        let page = String::from_utf8(served("0123").to_vec()).unwrap();
        check(&page, "0123");
        assert_eq!(page.matches("</script>").count(), 1);
        assert!(!page.contains("id=\"report\""));
    }

    #[test]
    fn inlined_answers_stay_data() {
        let hostile = "</script><script>alert(1)</script><!-- <script> \u{2028} & \" ' @SCRIPT@";
        let page = inlined(&serde_json::json!({ "text": hostile })).unwrap();
        let (_, rest) = page.split_once("<script type=\"application/json\" id=\"report\">").unwrap();
        let (json, _) = rest.split_once("</script>").unwrap();
        assert_eq!(serde_json::from_str::<serde_json::Value>(json).unwrap()["text"], hostile);
        assert!(!json.contains('<'));
        assert_eq!((page.matches("<script").count(), page.matches("</script>").count()), (2, 2));
        let (_, rest) = page.split_once("script-src 'nonce-").unwrap();
        check(&page.replace("@SCRIPT@", ""), rest.split('\'').next().unwrap());
        assert!(page.contains("content=\"default-src 'none'; script-src 'nonce-"));
        assert_eq!(page, inlined(&serde_json::json!({ "text": hostile })).unwrap());
    }
}
