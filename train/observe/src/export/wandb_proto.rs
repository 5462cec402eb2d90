//! The messages of `wandb/proto/wandb_internal.proto` that are written, with the fields that are needed here.

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Record {
    /// From 1.
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
    #[prost(oneof = "What", tags = "2, 3, 17, 18, 21")]
    pub(super) what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum What {
    #[prost(message, tag = "2")]
    History(History),
    #[prost(message, tag = "3")]
    Summary(Summary),
    #[prost(message, tag = "17")]
    Run(RunRecord),
    #[prost(message, tag = "18")]
    Exit(Exit),
    #[prost(message, tag = "21")]
    Header(Header),
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Header {
    #[prost(message, optional, tag = "1")]
    pub(super) version_info: Option<VersionInfo>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct VersionInfo {
    #[prost(string, tag = "1")]
    pub(super) producer: String,
    #[prost(string, tag = "2")]
    pub(super) min_consumer: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RunRecord {
    #[prost(string, tag = "1")]
    pub(super) run_id: String,
    #[prost(string, tag = "3")]
    pub(super) project: String,
    #[prost(message, optional, tag = "4")]
    pub(super) config: Option<Summary>,
    #[prost(string, tag = "8")]
    pub(super) display_name: String,
    #[prost(message, optional, tag = "17")]
    pub(super) start_time: Option<Timestamp>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Timestamp {
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(super) nanos: i32,
}

/// The numbers of a step.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct History {
    #[prost(message, repeated, tag = "1")]
    pub(super) item: Vec<Item>,
    #[prost(message, optional, tag = "2")]
    pub(super) step: Option<Step>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Step {
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
}

/// Keys that get values: `SummaryRecord` and `ConfigRecord`, which are alike.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) update: Vec<Item>,
}

/// A key and its value: `HistoryItem`, `SummaryItem` and `ConfigItem`, which are alike.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Item {
    /// The key; of several names if the value is within others.
    #[prost(string, repeated, tag = "2")]
    pub(super) nested_key: Vec<String>,
    #[prost(string, tag = "16")]
    pub(super) value_json: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Exit {
    #[prost(int32, tag = "1")]
    pub(super) exit_code: i32,
    /// Seconds.
    #[prost(int32, tag = "2")]
    pub(super) runtime: i32,
}
