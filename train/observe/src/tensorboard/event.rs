//! Converting data to TensorBoard events.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use toml::Value as Setting;

use super::proto::{
    AnyValue, DT_FLOAT, DT_STRING, Dimension, Event, HParamsPluginData, HistogramProto, Kind, PluginData,
    SessionLog, SessionStartInfo, SessionStatus, Summary, SummaryMetadata, SummaryValue, TensorProto,
    TensorShape, Value, What,
};
use super::tags::scalars;
use crate::line::Line;

/// The number of values in each bucket.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// The lowest value.
    pub min: f64,
    /// The highest value.
    pub max: f64,
    /// The sum of all values.
    pub sum: f64,
    /// The sum of their squares.
    pub sum_squares: f64,
    /// Upper limits of the buckets, ascending.
    pub limits: Vec<f64>,
    /// Number of values in each bucket, which begins where the one before it ends.
    pub counts: Vec<f64>,
}

/// The version of event files, which also defines the meaning of a START in them.
const FILE_VERSION: &str = "brain.Event:2";

/// The tag under which the plugin `hparams` looks for settings.
const HPARAMS_TAG: &str = "_hparams_/session_start_info";

/// The tag of texts that a run generates from the prompt at `index`.
pub fn sample_tag(index: usize) -> String {
    format!("samples/{index}")
}

/// Returns the current time in seconds since 1970.
pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// Returns the first event of a file.
pub(super) fn version(time: f64) -> Event {
    Event { wall_time: time, step: 0, what: Some(What::FileVersion(FILE_VERSION.to_owned())) }
}

/// Returns an event that makes events of `step` and later ones, in files before this one, void.
pub(super) fn start(time: f64, step: u64) -> Event {
    let log = SessionLog { status: SessionStatus::Start.into() };
    Event { wall_time: time, step: step_of(step), what: Some(What::SessionLog(log)) }
}

/// Returns the numbers of a line of metrics; `time` is used if the line does not record when it was written.
/// `None` if it has no numbers.
pub(super) fn metrics(line: &Line, time: f64) -> Option<Event> {
    let value = |(tag, value): (std::borrow::Cow<'_, str>, f64)| SummaryValue {
        tag: tag.into_owned(),
        metadata: None,
        // TensorBoard has no wider scalars.
        value: Some(Value::Simple(value as f32)),
    };
    let values: Vec<_> = scalars(line).into_iter().map(value).collect();
    (!values.is_empty()).then(|| summary(line.time.unwrap_or(time), line.step, values))
}

/// Returns a text that is shown verbatim.
pub(super) fn text(time: f64, step: u64, tag: &str, text: &str) -> Event {
    // TensorBoard interprets texts as Markdown, in which indented lines are shown verbatim.
    let lines: Vec<_> = text.split('\n').map(|line| format!("    {line}")).collect();
    let tensor = TensorProto {
        dtype: DT_STRING,
        tensor_shape: Some(TensorShape::default()),
        string_val: vec![lines.join("\n").into_bytes()],
    };
    summary(time, step, vec![tensor_value(tag, "text", Vec::new(), tensor)])
}

/// Returns a histogram. Empty buckets at its ends are omitted.
pub(super) fn histogram(time: f64, step: u64, tag: &str, histogram: &Histogram) -> Event {
    let Histogram { min, max, sum, sum_squares, ref limits, ref counts } = *histogram;
    let has_values = |count: &f64| *count > 0.0;
    let first = counts.iter().position(has_values).unwrap_or(0);
    let end = counts.iter().rposition(has_values).map_or(0, |last| last + 1);
    // An empty bucket in front provides the lower limit of the first one.
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

/// Returns the settings of a run, for the plugin `hparams`.
pub(super) fn settings(time: f64, settings: Vec<(String, Setting)>) -> Event {
    let kind = |value: Setting| match value {
        Setting::Integer(number) => Kind::Number(number as f64),
        Setting::Float(number) => Kind::Number(number),
        Setting::Boolean(value) => Kind::Bool(value),
        Setting::String(text) => Kind::String(text),
        other => Kind::String(other.to_string()),
    };
    let hparams: BTreeMap<_, _> =
        settings.into_iter().map(|(key, value)| (key, AnyValue { kind: Some(kind(value)) })).collect();
    let info = SessionStartInfo { hparams, start_time_secs: time };
    let data = HParamsPluginData { version: 0, session_start_info: Some(info) };
    // The metadata holds the relevant content.
    let nothing = TensorProto {
        dtype: DT_FLOAT,
        tensor_shape: Some(TensorShape { dim: vec![Dimension { size: 0 }] }),
        string_val: Vec::new(),
    };
    let content = prost::Message::encode_to_vec(&data);
    summary(time, 0, vec![tensor_value(HPARAMS_TAG, "hparams", content, nothing)])
}

fn tensor_value(tag: &str, plugin: &str, content: Vec<u8>, tensor: TensorProto) -> SummaryValue {
    let plugin_data = PluginData { plugin_name: plugin.to_owned(), content };
    let metadata = SummaryMetadata { plugin_data: Some(plugin_data) };
    SummaryValue { tag: tag.to_owned(), metadata: Some(metadata), value: Some(Value::Tensor(tensor)) }
}

fn summary(time: f64, step: u64, value: Vec<SummaryValue>) -> Event {
    Event { wall_time: time, step: step_of(step), what: Some(What::Summary(Summary { value })) }
}

fn step_of(step: u64) -> i64 {
    i64::try_from(step).unwrap_or(i64::MAX)
}
