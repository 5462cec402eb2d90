//! The TensorBoard messages and fields that Kiln writes, from `event.proto`, `summary.proto`, `tensor.proto`,
//! `tensor_shape.proto`, `histogram.proto`, `struct.proto` and `plugins/hparams/plugin_data.proto`.

use std::collections::BTreeMap;

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub(super) what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SessionLog {
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

/// [`SessionLog::status`]: voids earlier events of this step and later ones.
pub(super) const START: i32 = 1;

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) value: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SummaryValue {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<SummaryMetadata>,
    #[prost(oneof = "Value", tags = "2, 5, 8")]
    pub(super) value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Value {
    #[prost(float, tag = "2")]
    Simple(f32),
    #[prost(message, tag = "5")]
    Histogram(HistogramProto),
    #[prost(message, tag = "8")]
    Tensor(TensorProto),
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SummaryMetadata {
    #[prost(message, optional, tag = "1")]
    pub(super) plugin_data: Option<PluginData>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub(super) plugin_name: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) content: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct HistogramProto {
    #[prost(double, tag = "1")]
    pub(super) min: f64,
    #[prost(double, tag = "2")]
    pub(super) max: f64,
    #[prost(double, tag = "3")]
    pub(super) num: f64,
    #[prost(double, tag = "4")]
    pub(super) sum: f64,
    #[prost(double, tag = "5")]
    pub(super) sum_squares: f64,
    #[prost(double, repeated, tag = "6")]
    pub(super) bucket_limit: Vec<f64>,
    #[prost(double, repeated, tag = "7")]
    pub(super) bucket: Vec<f64>,
}

pub(super) const DT_FLOAT: i32 = 1;

pub(super) const DT_STRING: i32 = 7;

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TensorProto {
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) tensor_shape: Option<TensorShape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub(super) string_val: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TensorShape {
    #[prost(message, repeated, tag = "2")]
    pub(super) dim: Vec<Dimension>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Dimension {
    #[prost(int64, tag = "1")]
    pub(super) size: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct HParamsPluginData {
    #[prost(int32, tag = "1")]
    pub(super) version: i32,
    #[prost(message, optional, tag = "3")]
    pub(super) session_start_info: Option<SessionStartInfo>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SessionStartInfo {
    #[prost(btree_map = "string, message", tag = "1")]
    pub(super) hparams: BTreeMap<String, AnyValue>,
    #[prost(double, tag = "5")]
    pub(super) start_time_secs: f64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct AnyValue {
    #[prost(oneof = "Kind", tags = "2, 3, 4")]
    pub(super) kind: Option<Kind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Kind {
    #[prost(double, tag = "2")]
    Number(f64),
    #[prost(string, tag = "3")]
    String(String),
    #[prost(bool, tag = "4")]
    Bool(bool),
}
