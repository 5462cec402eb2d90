//! The configuration of a run.
//!
//! A TOML file is parsed to [`Config`], checked by [`Config::validate`], and completed from the data. The run folder
//! stores the complete [`Config`], which can start the same run again.

/// Declares a section of a configuration: its keys, each with its default.
macro_rules! section {
    ($(#[$doc:meta])* $name:ident { $($(#[$attribute:meta])* $key:ident: $kind:ty = $default:expr,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $($(#[$attribute])* pub $key: $kind,)*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($key: $default,)* }
            }
        }
    };
}

mod choice;
pub mod device;
mod events;
mod forms;
mod keys;
pub mod links;
mod load;
mod model;
mod optim;
pub mod optimizers;
mod rewrite;
pub mod schedule;
mod schema;
mod sections;
mod settle;
mod size;
mod trained;
mod validate;

pub use choice::Choice;
pub use events::EventFolder;
pub use forms::http_address;
pub use keys::{ConfigArgs, json_schema};
pub use load::{ConfigError, load, typed};
pub use model::ModelSection;
use optim::{ADAMW, LrSchedule};
pub use optim::{MUON, MuonSection, OptimGroup, OptimSection, Schedule};
pub use rewrite::rewritten;
pub use schema::{
    Backend, BadLines, CROSS_ENTROPY, CheckpointSection, CommBackend, CommSection, Config, DataSection,
    DeviceSection, EvalSection, InitSection, LogSection, LoraSection, LossSection, NonFinite, OnFailure,
    Precision, PrecisionSection, SampleSection, ShardSection, TrainSection,
};
pub use sections::key_of_flag;
pub use settle::DeviceDefaults;
pub use size::ByteSize;
pub use trained::Frozen;
pub use validate::thread_ranks;
