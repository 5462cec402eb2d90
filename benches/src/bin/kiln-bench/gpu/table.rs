//! The results, as Markdown tables and as JSON.

use kiln::bench::median;
use serde::Serialize;

use super::predicted::PredictedStep;
use crate::report::StepReport;

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    Bytes(f64),
    Flops(f64),
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelRow {
    pub name: String,
    pub shapes: String,
    pub seconds: f64,
    pub work: Work,
    /// Work per second over a plain kernel's bytes per second or the data sheet's FLOP/s, if known.
    pub share: Option<f64>,
    pub peer_s: Option<f64>,
}

impl KernelRow {
    pub(super) fn held_against(mut self, bytes_per_s: f64, flops_per_s: Option<f64>) -> Self {
        let (work, most) = match self.work {
            Work::Bytes(bytes) => (bytes, Some(bytes_per_s)),
            Work::Flops(flops) => (flops, flops_per_s),
        };
        self.share = most.map(|most| work / self.seconds / most);
        self
    }

    fn line(&self) -> [String; 6] {
        let rate = match self.work {
            Work::Bytes(bytes) => format!("{:.1} GB/s", bytes / self.seconds / 1e9),
            Work::Flops(flops) => format!("{:.3} TFLOP/s", flops / self.seconds / 1e12),
        };
        [
            self.name.clone(),
            format!("{:.1}", self.seconds * 1e6),
            rate,
            percent(self.share),
            self.peer_s.map_or_else(unknown, |seconds| format!("{:.1}", seconds * 1e6)),
            ratio(self.peer_s.map(|seconds| seconds / self.seconds)),
        ]
    }
}

const HEAD: [&str; 12] = [
    "model",
    "ms",
    "predicted ms",
    "MFU",
    "predicted MFU",
    "host ms",
    "host µs per launch",
    "tok/s",
    "GB",
    "peer tok/s",
    "peer GB",
    "speed",
];

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepPair {
    pub name: String,
    pub predicted: Option<PredictedStep>,
    pub kiln: Vec<StepReport>,
    pub peer: Vec<serde_json::Value>,
    /// Reason why a turn failed; the figures are those of earlier turns.
    pub failure: Option<String>,
}

impl StepPair {
    fn kiln_median(&self, value: impl Fn(&StepReport) -> Option<f64>) -> Option<f64> {
        some_median(self.kiln.iter().filter_map(value).collect())
    }

    fn peer_median(&self, key: &str) -> Option<f64> {
        some_median(self.peer.iter().filter_map(|report| report[key].as_f64()).collect())
    }

    /// Returns Kiln's tokens per second over the peer's, median over the pairs.
    pub fn speed(&self) -> Option<f64> {
        let pairs = self.kiln.iter().zip(&self.peer);
        let ratio = |(ours, theirs): (&StepReport, &serde_json::Value)| {
            Some(ours.tokens_per_s / theirs["tokens_per_s"].as_f64()?)
        };
        some_median(pairs.filter_map(ratio).collect())
    }

    pub fn memory(&self) -> Option<f64> {
        let ours = self.kiln_median(|report| report.peak_reserved_bytes.map(|bytes| bytes as f64));
        Some(ours? / self.peer_median("peak_reserved_bytes")?)
    }

    /// Returns the maximum microseconds of the host per launch, if the number of launches is known.
    fn host_us_per_launch(&self) -> Option<f64> {
        let launches = self.predicted.as_ref()?.launches;
        Some(1e6 * self.kiln_median(|report| Some(report.queued_s))? / launches)
    }

    /// Describes Kiln's turns so far, in case the table is never printed.
    pub(super) fn told(&self) -> String {
        let line = self.line();
        let cells = HEAD.iter().zip(&line).skip(1).filter(|(_, cell)| **cell != unknown());
        let cells: Vec<_> = cells.map(|(head, cell)| format!("{head} {cell}")).collect();
        format!("{}: {}", self.name, cells.join("; "))
    }

    fn line(&self) -> [String; 12] {
        let predicted =
            |text: fn(&PredictedStep) -> String| self.predicted.as_ref().map_or_else(unknown, text);
        let milliseconds =
            |seconds: Option<f64>| seconds.map_or_else(unknown, |seconds| format!("{:.1}", 1e3 * seconds));
        let gigabytes =
            |bytes: Option<f64>| bytes.map_or_else(unknown, |bytes| format!("{:.2}", bytes / 1e9));
        let tokens = |value: Option<f64>| value.map_or_else(unknown, |value| format!("{value:.0}"));
        [
            self.name.clone(),
            milliseconds(self.kiln_median(|report| Some(median(report.step_s.clone())))),
            predicted(|step| format!("{:.1}, at least {:.1}", step.expected_ms, step.least_ms)),
            percent(self.kiln_median(|report| report.mfu)),
            predicted(|step| format!("{:.1} %, at most {:.1} %", step.expected_mfu, step.most_mfu)),
            milliseconds(self.kiln_median(|report| Some(report.queued_s))),
            self.host_us_per_launch().map_or_else(unknown, |micros| format!("{micros:.1}")),
            tokens(self.kiln_median(|report| Some(report.tokens_per_s))),
            gigabytes(self.kiln_median(|report| report.peak_reserved_bytes.map(|b| b as f64))),
            tokens(self.peer_median("tokens_per_s")),
            gigabytes(self.peer_median("peak_reserved_bytes")),
            ratio(self.speed()),
        ]
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuTable {
    pub version: &'static str,
    pub device: String,
    /// Bytes per second of a plain kernel; 0 if no operations were timed.
    pub copy_bytes_per_s: f64,
    pub kernels: Vec<KernelRow>,
    pub steps: Vec<StepPair>,
    pub failures: Vec<String>,
}

impl GpuTable {
    pub(super) fn new(device: String) -> Self {
        GpuTable {
            version: env!("CARGO_PKG_VERSION"),
            device,
            copy_bytes_per_s: 0.0,
            kernels: Vec::new(),
            steps: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Adds failed rows, and rows that miss the bar of the peer or of `least_mfu` (of 1b, in percent). A row without a
    /// figure for a bar misses it.
    pub(super) fn judge(&mut self, against_peer: bool, least_mfu: Option<f64>) {
        let mut failures = Vec::new();
        for row in &self.steps {
            failures.extend(row.failure.iter().map(|why| format!("{}: {why}", row.name)));
            if against_peer {
                let bars = [
                    ("tok/s over the peer's", row.speed(), true),
                    ("memory over the peer's", row.memory(), false),
                ];
                for (what, value, more_is_better) in bars {
                    let holds = value.is_some_and(|v| if more_is_better { v >= 1.0 } else { v <= 1.0 });
                    let (name, bound) = (&row.name, if more_is_better { "least" } else { "most" });
                    if !holds {
                        let value = ratio(value);
                        failures.push(format!("{name}: {what}: {value}, and the bar is at {bound} 1"));
                    }
                }
            }
        }
        if let Some(least) = least_mfu {
            let of_1b = self.steps.iter().filter(|row| row.name.starts_with("1b"));
            let best = of_1b
                .filter_map(|row| row.kiln_median(|report| report.mfu))
                .fold(None, |best: Option<f64>, mfu| Some(best.map_or(mfu, |best| best.max(mfu))));
            if best.is_none_or(|mfu| 100.0 * mfu < least) {
                let best = percent(best);
                failures.push(format!("1b: MFU {best}, and the bar is at least {least} %"));
            }
        }
        self.failures.extend(failures);
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    pub fn to_text(&self) -> String {
        let mut text = format!("{}\n", self.device);
        if !self.kernels.is_empty() {
            let rate = self.copy_bytes_per_s / 1e9;
            text += &format!("a plain kernel reads and writes {rate:.1} GB/s\n");
        }
        let mut shapes: Vec<&str> = Vec::new();
        for row in &self.kernels {
            if !shapes.contains(&row.shapes.as_str()) {
                shapes.push(&row.shapes);
            }
        }
        for shapes in shapes {
            let rows = self.kernels.iter().filter(|row| row.shapes == shapes);
            text += &format!("\n{shapes}\n\n");
            let head = ["operation", "µs", "reached", "of what it could", "peer µs", "speed"];
            text += &markdown(head, rows.map(KernelRow::line).collect());
        }
        if !self.steps.is_empty() {
            text += "\nwhole steps\n\n";
            text += &markdown(HEAD, self.steps.iter().map(StepPair::line).collect());
            text += "\nhost ms: time to queue a step; the host waits if the GPU is 1,000 launches behind\n";
            if let Some(step) = self.steps.iter().find_map(|row| row.predicted.as_ref()) {
                text += &format!("predicted for {}, with the predicted number of launches\n", step.gpu);
            }
        }
        for failure in &self.failures {
            text += &format!("\nFAILED {failure}");
        }
        text.trim_end().to_owned()
    }
}

fn markdown<const N: usize>(head: [&str; N], rows: Vec<[String; N]>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(&head.map(str::to_owned));
    text += &line(&vec!["---".to_owned(); N]);
    rows.iter().for_each(|row| text += &line(row));
    text
}

fn some_median(values: Vec<f64>) -> Option<f64> {
    if values.is_empty() { None } else { Some(median(values)) }
}

fn unknown() -> String {
    "-".to_owned()
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(unknown, |share| format!("{:.1} %", 100.0 * share))
}

fn ratio(value: Option<f64>) -> String {
    value.map_or_else(unknown, |value| format!("{value:.2} x"))
}

#[cfg(test)]
mod tests {
    use kiln::config::Config;
    use kiln::device::Peak;

    use super::{GpuTable, KernelRow, PredictedStep, StepPair, Work};
    use crate::measure::Measured;
    use crate::report::StepReport;

    fn row(work: Work) -> KernelRow {
        let (name, shapes) = ("rotary".to_owned(), "tiny".to_owned());
        KernelRow { name, shapes, seconds: 1e-3, work, share: None, peer_s: Some(2e-3) }
    }

    #[test]
    fn work_is_held_against_what_the_device_could_do() {
        let bytes = row(Work::Bytes(5e8)).held_against(1e12, None);
        assert_eq!(bytes.share, Some(0.5));
        let line = ["rotary", "1000.0", "500.0 GB/s", "50.0 %", "2000.0", "2.00 x"];
        assert_eq!(bytes.line(), line);
        let flops = row(Work::Flops(1e10));
        assert_eq!(flops.clone().held_against(1e12, None).share, None);
        assert_eq!(flops.held_against(1e12, Some(1e14)).share, Some(0.1));
    }

    fn pair(name: &str, seconds: f64, reserved: u64, peer: serde_json::Value) -> StepPair {
        let mut config = Config::default();
        config.model.preset = Some("10m".to_owned());
        let model = config.resolve_model(None, Some(4096)).expect("a model");
        let measured = Measured {
            steps: vec![seconds; 3],
            updates: vec![0.1; 3],
            queued: vec![0.004; 3],
            parameters: 8_959_232,
            flops_per_token: 6.0 * 8_959_232.0,
            device_bytes: Some(reserved),
            ..Measured::default()
        };
        let report = StepReport::new(&config, model, String::new(), Some(Peak::given(1e12)), measured);
        let (name, peer) = (name.to_owned(), vec![peer]);
        StepPair { name, predicted: None, kiln: vec![report], peer, failure: None }
    }

    #[test]
    fn a_prediction_stands_beside_what_was_measured() {
        let mut row = pair("10m", 0.08, 2_000_000_000, serde_json::Value::Null);
        let without = row.line();
        assert_eq!((&*without[1], &*without[2], &*without[4]), ("80.0", "-", "-"));
        assert_eq!((&*without[5], &*without[6]), ("4.0", "-"));
        row.predicted = Some(PredictedStep {
            gpu: "h100".to_owned(),
            preset: "10m".to_owned(),
            tokens: 16_384,
            launches: 1000.0,
            least_ms: 71.9,
            expected_ms: 86.7,
            most_mfu: 47.9,
            expected_mfu: 39.7,
        });
        let with = row.line();
        assert_eq!((&*with[2], &*with[4]), ("86.7, at least 71.9", "39.7 %, at most 47.9 %"));
        assert_eq!((&*with[5], &*with[6]), ("4.0", "4.0"));
        let mut table = GpuTable::new("a GPU".to_owned());
        table.steps = vec![row];
        assert!(table.to_text().contains("predicted for h100, with"), "{}", table.to_text());
    }

    fn judged(table: &mut GpuTable, peer: bool, least_mfu: Option<f64>) -> Vec<String> {
        table.failures.clear();
        table.judge(peer, least_mfu);
        table.failures.clone()
    }

    #[test]
    fn bars_hold_or_say_what_does_not() {
        let tokens = (Config::default().train.global_batch * 256) as f64;
        let peer = serde_json::json!({ "tokens_per_s": tokens / 2.0, "peak_reserved_bytes": 100 });
        let mut table = GpuTable::new("a GPU".to_owned());
        table.steps = vec![pair("1b", 1.0, 90, peer.clone())];
        assert_eq!(judged(&mut table, true, Some(1e-6)), Vec::<String>::new());
        assert_eq!((table.steps[0].speed(), table.steps[0].memory()), (Some(2.0), Some(0.9)));

        assert_eq!(judged(&mut table, false, Some(99.0)).len(), 1);
        table.steps = vec![pair("90m", 3.0, 101, peer)];
        assert_eq!(judged(&mut table, true, Some(1e-6)).len(), 3);
        assert_eq!(judged(&mut table, false, None), Vec::<String>::new());
        table.steps = vec![pair("90m", 1.0, 1, serde_json::Value::Null)];
        assert_eq!(judged(&mut table, true, None).len(), 2);
        table.steps[0].failure = Some("no memory".to_owned());
        table.failures = vec!["rotary: it panicked".to_owned()];
        table.judge(false, None);
        assert_eq!(table.failures, ["rotary: it panicked", "90m: no memory"]);
        assert!(table.to_text().contains("FAILED 90m: no memory"), "{}", table.to_text());
    }
}
