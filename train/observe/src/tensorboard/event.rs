//! Converting data to TensorBoard events.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message;
use toml::{Table, Value as Setting};

use super::proto::{
    AnyValue, DT_FLOAT, DT_STRING, Dimension, Event, HParamsPluginData, HistogramProto, Kind, PluginData,
    START, SessionLog, SessionStartInfo, Summary, SummaryMetadata, SummaryValue, TensorProto, TensorShape,
    Value, What,
};
use crate::config::flatten;
use crate::line::Line;

const GIB: f64 = (1u64 << 30) as f64;

/// Keys of `metrics.jsonl`, each with its tag and a factor for its value. Tags match torchtitan's, so that
/// TensorBoard can overlay runs of both.
const TAGS: [(&str, &str, f64); 13] = [
    ("loss", "loss_metrics/global_avg_loss", 1.0),
    ("tokens_per_s", "throughput(tps)", 1.0),
    ("mfu", "mfu(%)", 100.0),
    ("step_s", "time_metrics/end_to_end(s)", 1.0),
    ("data_s", "time_metrics/data_loading(s)", 1.0),
    ("forward_s", "time_metrics/forward(s)", 1.0),
    ("backward_s", "time_metrics/backward(s)", 1.0),
    ("optimizer_s", "time_metrics/optimizer(s)", 1.0),
    ("other_s", "time_metrics/other(s)", 1.0),
    ("wait_s", "comm/exposed(s)", 1.0),
    ("peak_bytes", "memory/max_reserved(GiB)", 1.0 / GIB),
    ("val_loss", "validation_metrics/loss", 1.0),
    ("tokens", "n_tokens_seen", 1.0),
];

const SHARES: [(&str, &str); 2] = [("data_s", "time_metrics/data_loading(%)"), ("wait_s", "comm/exposed(%)")];

/// A histogram with variable bucket widths.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Lowest value.
    pub min: f64,
    /// Highest value.
    pub max: f64,
    /// Sum of all values.
    pub sum: f64,
    /// Sum of the squares of all values.
    pub sum_squares: f64,
    /// Upper limits of the buckets, ascending.
    pub limits: Vec<f64>,
    /// Number of values in each bucket. A bucket starts at the limit of the previous one.
    pub counts: Vec<f64>,
}

/// Returns the tag for samples of the prompt at `index`.
pub fn sample_tag(index: usize) -> String {
    format!("samples/{index}")
}

pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// Returns a file's first event. TensorBoard honours [`start`] only after this version.
pub(super) fn version(time: f64) -> Event {
    Event { wall_time: time, step: 0, what: Some(What::FileVersion("brain.Event:2".to_owned())) }
}

/// Returns an event that voids earlier files' events of `step` and later steps.
pub(super) fn start(time: f64, step: u64) -> Event {
    let what = Some(What::SessionLog(SessionLog { status: START }));
    Event { wall_time: time, step: step.cast_signed(), what }
}

fn scalars(line: &Line) -> Vec<(Cow<'_, str>, f64)> {
    let mut scalars: Vec<(Cow<'_, str>, f64)> = Vec::with_capacity(line.values.len() + SHARES.len());
    for (key, value) in line.numbers() {
        let known = TAGS.iter().find(|(known, ..)| *known == key);
        scalars.push(known.map_or((key.into(), value), |(_, tag, factor)| ((*tag).into(), value * factor)));
    }
    let number = |wanted: &str| line.numbers().find(|(key, _)| *key == wanted).map(|(_, value)| value);
    for (key, tag) in SHARES {
        if let (Some(part), Some(whole)) = (number(key), number("step_s")) {
            scalars.push((tag.into(), 100.0 * part / whole));
        }
    }
    scalars
}

/// Returns the numbers of a line, or `None` if it has none. `time` replaces a missing time.
pub(crate) fn metrics(line: &Line, time: f64) -> Option<Event> {
    let values = scalars(line).into_iter().map(|(tag, value)| SummaryValue {
        tag: tag.into_owned(),
        metadata: None,
        // TensorBoard's scalars are 32 bits wide.
        value: Some(Value::Simple(value as f32)),
    });
    let values: Vec<_> = values.collect();
    (!values.is_empty()).then(|| summary(line.time.unwrap_or(time), line.step, values))
}

pub(crate) fn text(time: f64, step: u64, tag: &str, text: &str) -> Event {
    // TensorBoard interprets text as Markdown, which shows indented lines verbatim.
    let lines: Vec<_> = text.split('\n').map(|line| format!("    {line}")).collect();
    let tensor = TensorProto {
        dtype: DT_STRING,
        tensor_shape: Some(TensorShape::default()),
        string_val: vec![lines.join("\n").into_bytes()],
    };
    summary(time, step, vec![tensor_value(tag, "text", Vec::new(), tensor)])
}

pub(super) fn histogram(time: f64, step: u64, tag: &str, histogram: &Histogram) -> Event {
    let Histogram { min, max, sum, sum_squares, ref limits, ref counts } = *histogram;
    let has_values = |count: &f64| *count > 0.0;
    let first = counts.iter().position(has_values).unwrap_or(0);
    let end = counts.iter().rposition(has_values).map_or(0, |last| last + 1);
    // An empty bucket in front gives the first one its lower limit.
    let (first, end) = (first.saturating_sub(1), end.min(limits.len()));
    let proto = HistogramProto {
        min,
        max,
        num: counts.iter().sum(),
        sum,
        sum_squares,
        bucket_limit: limits.get(first..end).unwrap_or_default().to_vec(),
        bucket: counts.get(first..end).unwrap_or_default().to_vec(),
    };
    let value = SummaryValue { tag: tag.to_owned(), metadata: None, value: Some(Value::Histogram(proto)) };
    summary(time, step, vec![value])
}

/// Returns the configuration for TensorBoard's "HParams" tab, which reads the first such event per folder.
pub(crate) fn settings(time: f64, config: Table) -> Event {
    let setting = |(key, value)| {
        let kind = match value {
            Setting::Integer(number) => Kind::Number(number as f64),
            Setting::Float(number) => Kind::Number(number),
            Setting::Boolean(value) => Kind::Bool(value),
            Setting::String(text) => Kind::String(text),
            other => Kind::String(other.to_string()),
        };
        (key, AnyValue { kind: Some(kind) })
    };
    let hparams: BTreeMap<_, _> = flatten(config).into_iter().map(setting).collect();
    let info = SessionStartInfo { hparams, start_time_secs: time };
    let data = HParamsPluginData { version: 0, session_start_info: Some(info) };
    let nothing = TensorProto {
        dtype: DT_FLOAT,
        tensor_shape: Some(TensorShape { dim: vec![Dimension { size: 0 }] }),
        string_val: Vec::new(),
    };
    let tag = "_hparams_/session_start_info";
    summary(time, 0, vec![tensor_value(tag, "hparams", data.encode_to_vec(), nothing)])
}

fn tensor_value(tag: &str, plugin: &str, content: Vec<u8>, tensor: TensorProto) -> SummaryValue {
    let plugin_data = Some(PluginData { plugin_name: plugin.to_owned(), content });
    let metadata = Some(SummaryMetadata { plugin_data });
    SummaryValue { tag: tag.to_owned(), metadata, value: Some(Value::Tensor(tensor)) }
}

fn summary(time: f64, step: u64, value: Vec<SummaryValue>) -> Event {
    Event { wall_time: time, step: step.cast_signed(), what: Some(What::Summary(Summary { value })) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_are_named_as_in_torchtitan() {
        let line = r#"{"step":1,"loss":2.5,"grad_norm":1.0,"mfu":0.25,"peak_bytes":1610612736,"step_s":4.0,
            "wait_s":1.0,"layers.0.rms":0.5,"parameter":"lm_head"}"#;
        let line = Line::read(line.as_bytes()).unwrap();
        let expected = [
            ("loss_metrics/global_avg_loss", 2.5),
            ("grad_norm", 1.0),
            ("mfu(%)", 25.0),
            ("memory/max_reserved(GiB)", 1.5),
            ("time_metrics/end_to_end(s)", 4.0),
            ("comm/exposed(s)", 1.0),
            ("layers.0.rms", 0.5),
            ("comm/exposed(%)", 25.0),
        ];
        assert_eq!(scalars(&line), expected.map(|(tag, value)| (tag.into(), value)));
    }
}
