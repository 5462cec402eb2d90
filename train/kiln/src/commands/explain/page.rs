//! The names of the pages, and the page of every error. No `match` has a catch-all arm, so that every new error variant
//! must get a page, or `None`: the error is no failure, reports another rank's failure, or wraps custom code's error.

use std::error::Error;
use std::io::ErrorKind;

use clap::ValueEnum;
use kiln_collectives::tcp::JoinError;
use kiln_collectives::{BufferError, CommError, Finding};
use kiln_model::layers::LayerError;
use kiln_shard::{MeshError, ShardError};

use crate::error::CommandError;
use crate::error::InspectError;
use kiln_checkpoint::CheckpointError;
use kiln_config::ConfigError;
use kiln_config::device::DeviceError;
use kiln_config::links::LinksError;
use kiln_data::DataError;
use kiln_debug::DebugError;
use kiln_debug::diff::DiffError;
use kiln_launch::place::EnvError;
use kiln_sys::files;
use kiln_train::error::{TrainError, causes};
use kiln_train::eval::EvalError;
use kiln_train::launch::{LaunchArgsError, LaunchError};
use kiln_train::logged::MetricError;
use kiln_train::run::FolderError;

/// A class of failures. Its page is the section of `docs/errors.md` with this name in lower case and hyphens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Page {
    Configuration,
    Environment,
    PartUnknown,
    OwnCode,
    Crash,
    OutOfMemory,
    GpuOutOfMemory,
    SystemLimit,
    NotBuilt,
    DriverMissing,
    DriverTooOld,
    GpuMissing,
    GpuTooOld,
    GpuShared,
    GpuFailed,
    LibraryMissing,
    NcclMissing,
    NcclFailed,
    PeerLost,
    CollectiveTimeout,
    CollectiveMismatch,
    RanksMissing,
    RanksDiffer,
    Mesh,
    PortInUse,
    Network,
    SecretMissing,
    SecretMismatch,
    MpiUnusable,
    CheckpointMissing,
    CheckpointDamaged,
    CheckpointIncomplete,
    CheckpointMismatch,
    OptimizerMismatch,
    WeightsNotFinite,
    OutputExists,
    RunFolder,
    RunInUse,
    RunFolderMoved,
    ResumeDiffers,
    ModelUnsupported,
    ModelDamaged,
    DownloadFailed,
    DataMissing,
    TextUnusable,
    TooLittleText,
    DataDamaged,
    DataChanged,
    DataPosition,
    TokenizerUnusable,
    TokenizerMismatch,
    EvaluationInput,
    DiskFull,
    DiskStalled,
    FileAccess,
    LossNotFinite,
    NotComparable,
}

impl Page {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Returns the page about `error`, if there is one.
pub(crate) fn page_of(error: &CommandError) -> Option<Page> {
    match error {
        CommandError::Train(error) | CommandError::Debug(DebugError::Train(error)) => train(error),
        CommandError::Debug(DebugError::Diff(error)) => diff(error),
        CommandError::Inspect(error) => inspect(error),
    }
}

fn train(error: &TrainError) -> Option<Page> {
    match error {
        TrainError::Config(error) => config(error),
        TrainError::Device(error) => device(error),
        TrainError::Memory(_) => Some(Page::OutOfMemory),
        TrainError::Layer(error) => layer(error),
        TrainError::Data(error) => data(error),
        TrainError::Shard(error) | TrainError::Recorded(error, _) => shard(error),
        TrainError::Loop(error)
        | TrainError::Command { source: error, .. }
        | TrainError::Metric(MetricError { source: error, .. }) => first_of_causes(&**error),
        TrainError::Records { .. } => Some(Page::RanksDiffer),
        TrainError::Checkpoint(error) => checkpoint(error),
        TrainError::Eval(error) => eval(error),
        TrainError::Grace(_) => Some(Page::Environment),
        TrainError::Env(error) => env(error),
        TrainError::Launch(error) => launch_args(error),
        TrainError::Join(error) => join(error),
        #[cfg(feature = "mpi")]
        TrainError::Mpi(error) => mpi(error),
        #[cfg(feature = "cuda")]
        TrainError::Nccl { source, .. } => nccl(source),
        TrainError::OtherConfig(_) => Some(Page::RanksDiffer),
        TrainError::Rank0 { .. } => None,
        TrainError::Folder(error) => folder(error),
        TrainError::OtherPosition { .. } => Some(Page::DataPosition),
        TrainError::NonFinite { .. } | TrainError::NotANumber { .. } => Some(Page::LossNotFinite),
        TrainError::Smoke { .. } => Some(Page::ResumeDiffers),
        TrainError::Links(LinksError::Read { .. }) => Some(Page::FileAccess),
        TrainError::Links(LinksError::Content { .. }) => None,
        // The output of the check includes the fixes.
        TrainError::Check { .. } => None,
        TrainError::Exists(_) => Some(Page::OutputExists),
        TrainError::Stopped | TrainError::Drill(_) => None,
        TrainError::Rank { source, .. } => train(source),
        TrainError::Threads { .. } => Some(Page::SystemLimit),
        TrainError::Crash(_) => Some(Page::Crash),
    }
}

/// Returns the page of the first Kiln error among the causes of an error of custom code.
fn first_of_causes(error: &(dyn Error + 'static)) -> Option<Page> {
    causes(error).find_map(|error| {
        None.or_else(|| train(error.downcast_ref()?))
            .or_else(|| shard(error.downcast_ref()?))
            .or_else(|| config(error.downcast_ref()?))
            .or_else(|| checkpoint(error.downcast_ref()?))
            .or_else(|| data(error.downcast_ref()?))
    })
}

fn config(error: &ConfigError) -> Option<Page> {
    match error {
        ConfigError::Read { .. }
        | ConfigError::Parse { .. }
        | ConfigError::Override { .. }
        | ConfigError::OverrideValue { .. }
        | ConfigError::Invalid { .. } => Some(Page::Configuration),
    }
}

fn device(error: &DeviceError) -> Option<Page> {
    Some(match error {
        DeviceError::NotBuilt | DeviceError::WgpuNotBuilt => Page::NotBuilt,
        DeviceError::NoDriver { .. } => Page::DriverMissing,
        DeviceError::DriverFails { .. } => Page::GpuFailed,
        DeviceError::DriverTooOld { .. } => Page::DriverTooOld,
        DeviceError::NoGpu { .. } | DeviceError::FewerGpus { .. } | DeviceError::NoWgpu => Page::GpuMissing,
        DeviceError::SharedGpu { .. }
        | DeviceError::Mixed { .. }
        | DeviceError::WgpuProcesses
        | DeviceError::NoTransport => Page::GpuShared,
        DeviceError::LowMemory { .. } => Page::GpuOutOfMemory,
        DeviceError::OldGpu { .. } => Page::GpuTooOld,
        DeviceError::NoLibrary { library, .. } | DeviceError::OldLibrary { library, .. } => {
            if library.starts_with("NCCL") { Page::NcclMissing } else { Page::LibraryMissing }
        }
        DeviceError::NoHeaders { .. } | DeviceError::CompilerFails { .. } => Page::LibraryMissing,
        DeviceError::Unusable { reason } => return device(reason),
    })
}

fn layer(error: &LayerError) -> Option<Page> {
    match error {
        LayerError::Unknown { .. } => Some(Page::PartUnknown),
        LayerError::Extra { .. } | LayerError::Unread(_) | LayerError::Shape(_) => Some(Page::Configuration),
    }
}

fn data(error: &DataError) -> Option<Page> {
    Some(match error {
        DataError::Stopped => return None,
        DataError::NoInputs
        | DataError::UnknownBuiltin { .. }
        | DataError::ValidationFraction { .. }
        | DataError::NoStartOfText
        | DataError::ChatTokenizer
        | DataError::UnknownToken { .. }
        | DataError::ZeroSequenceLength
        | DataError::Source { .. } => Page::Configuration,
        DataError::Missing { .. } | DataError::NoFolder { .. } | DataError::NotPrepared { .. } => {
            Page::DataMissing
        }
        DataError::NotText { .. }
        | DataError::JsonLine { .. }
        | DataError::Conversation { .. }
        | DataError::NotConversations { .. }
        | DataError::Parquet { .. } => Page::TextUnusable,
        DataError::ParquetDisabled { .. } => Page::NotBuilt,
        DataError::Walk { .. } => Page::FileAccess,
        DataError::NoText { .. }
        | DataError::EmptyInputs { .. }
        | DataError::TooLittleText { .. }
        | DataError::TooFewConversations { .. }
        | DataError::NothingCounts { .. }
        | DataError::TooFewTokens { .. }
        | DataError::NoSamples
        | DataError::SampleOutOfRange { .. } => Page::TooLittleText,
        DataError::VocabularyTooSmall { .. }
        | DataError::VocabularyTooLarge { .. }
        | DataError::TokenizerTraining { .. }
        | DataError::TokenizerFile { .. }
        | DataError::NoChatTemplate { .. }
        | DataError::ChatTemplate { .. }
        | DataError::ChatTemplateLimit { .. }
        | DataError::NoEndOfText { .. }
        | DataError::Encode { .. }
        | DataError::Decode { .. } => Page::TokenizerUnusable,
        DataError::AlreadyPrepared { .. } | DataError::Output { .. } => Page::OutputExists,
        DataError::PreparedFromOther { .. } | DataError::OtherSource { .. } => Page::DataChanged,
        DataError::Info { .. }
        | DataError::Version { .. }
        | DataError::FileSize { .. }
        | DataError::Truncated { .. }
        | DataError::TokenOutOfRange { .. }
        | DataError::ChangedTokens { .. }
        | DataError::BlockSums { .. }
        | DataError::Damaged { .. } => Page::DataDamaged,
        DataError::Io { source, .. } => io(source),
    })
}

fn io(error: &std::io::Error) -> Page {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Page::DiskFull,
        _ if files::limit_of(error).is_some() => Page::SystemLimit,
        _ => Page::FileAccess,
    }
}

fn shard(error: &ShardError) -> Option<Page> {
    Some(match error {
        ShardError::Comm(error) => return comm(error),
        ShardError::Buffer(error) => return buffer(error),
        ShardError::Mesh(error) => return mesh(error),
        ShardError::PlanMismatch { .. } => Page::RanksDiffer,
        ShardError::UnsupportedDType { .. } => Page::Configuration,
        ShardError::DuplicateParameter { .. }
        | ShardError::HostRule { .. }
        | ShardError::SlotName { .. }
        | ShardError::Update { .. }
        | ShardError::Pinned { .. }
        | ShardError::Captured { .. }
        | ShardError::NoGradient { .. }
        | ShardError::UnknownParameter { .. }
        | ShardError::WrongLength { .. }
        | ShardError::InitialValues { .. }
        | ShardError::Unreadable { .. }
        | ShardError::Gradient { .. }
        | ShardError::UnknownSlot { .. }
        | ShardError::NotWhole { .. } => Page::OwnCode,
    })
}

fn comm(error: &CommError) -> Option<Page> {
    Some(match error {
        CommError::Invalid { .. } | CommError::Mismatch { .. } => Page::CollectiveMismatch,
        CommError::TimedOut { verdict, .. } => match verdict.finding {
            Finding::Died | Finding::Silent => Page::PeerLost,
            Finding::Mismatch => Page::CollectiveMismatch,
            Finding::Missing | Finding::Late | Finding::Stopped | Finding::Transfer | Finding::Nothing => {
                Page::CollectiveTimeout
            }
        },
        CommError::Aborted { .. } => Page::PeerLost,
    })
}

fn buffer(error: &BufferError) -> Option<Page> {
    match error {
        BufferError::DType { .. } | BufferError::OnDevice { .. } => Some(Page::OwnCode),
        BufferError::Device { .. } => Some(Page::GpuFailed),
    }
}

fn mesh(error: &MeshError) -> Option<Page> {
    match error {
        MeshError::Empty
        | MeshError::MissingShardSize { .. }
        | MeshError::Indivisible { .. }
        | MeshError::Contradiction { .. }
        | MeshError::UnevenNodes { .. }
        | MeshError::InterleavedNodes { .. } => Some(Page::Mesh),
    }
}

fn checkpoint(error: &CheckpointError) -> Option<Page> {
    Some(match error {
        CheckpointError::NotFound { .. } => Page::CheckpointMissing,
        CheckpointError::NoneUsable { .. } | CheckpointError::Damaged { .. } => Page::CheckpointDamaged,
        CheckpointError::DamagedButEarlier { source, .. } => return checkpoint(source),
        CheckpointError::Io { source, .. } => io(source),
        CheckpointError::OtherModel { .. }
        | CheckpointError::Names { .. }
        | CheckpointError::UnusedAdapters { .. }
        | CheckpointError::Base { .. } => Page::CheckpointMismatch,
        CheckpointError::NoAdapters { .. } => Page::ModelUnsupported,
        CheckpointError::OtherArchitecture { .. } => Page::PartUnknown,
        CheckpointError::Layer(error) => return layer(error),
        CheckpointError::OtherOptimizer { .. }
        | CheckpointError::Slots { .. }
        | CheckpointError::Frozen { .. } => Page::OptimizerMismatch,
        CheckpointError::NotFinite { .. } => Page::WeightsNotFinite,
        CheckpointError::Context { .. } => Page::OwnCode,
        CheckpointError::Exists { .. } => Page::OutputExists,
        CheckpointError::MissingParts { .. } => Page::CheckpointIncomplete,
        CheckpointError::NotHeld { .. } => Page::RunFolderMoved,
        CheckpointError::Stalled { .. } => Page::DiskStalled,
        CheckpointError::OtherRank => return None,
        CheckpointError::NotAModel { .. }
        | CheckpointError::Unsupported { .. }
        | CheckpointError::NoArchitecture { .. }
        | CheckpointError::Unnamed { .. }
        | CheckpointError::Range { .. } => Page::ModelUnsupported,
        CheckpointError::LeadsOut { .. }
        | CheckpointError::Json { .. }
        | CheckpointError::Key { .. }
        | CheckpointError::Shape { .. }
        | CheckpointError::DamagedWeights { .. }
        | CheckpointError::Tensors { .. }
        | CheckpointError::Adapters { .. }
        | CheckpointError::BaseModel { .. } => Page::ModelDamaged,
        CheckpointError::NoHub { .. } => Page::NotBuilt,
        CheckpointError::RepoName { .. } | CheckpointError::Download { .. } => Page::DownloadFailed,
        CheckpointError::Data(error) => return data(error),
        CheckpointError::Shard(error) => return shard(error),
    })
}

fn eval(error: &EvalError) -> Option<Page> {
    Some(match error {
        EvalError::NoData { .. }
        | EvalError::DataGone { .. }
        | EvalError::DataNotFound { .. }
        | EvalError::DataMissing { .. } => Page::DataMissing,
        EvalError::OtherData { .. } => Page::DataChanged,
        EvalError::NoTargets { .. } => Page::TooLittleText,
        EvalError::OtherVocabulary { .. } | EvalError::OtherTokenizer { .. } => Page::TokenizerMismatch,
        EvalError::TooLong { .. }
        | EvalError::TooFewTokens { .. }
        | EvalError::PairTooLong { .. }
        | EvalError::EmptyAnswer { .. }
        | EvalError::NoLines { .. }
        | EvalError::UnknownToken { .. } => Page::EvaluationInput,
        EvalError::Line { .. } => Page::TextUnusable,
        EvalError::Read { source, .. } | EvalError::Write { source, .. } => io(source),
    })
}

fn env(error: &EnvError) -> Option<Page> {
    match error {
        EnvError::Value { .. } | EnvError::Missing { .. } | EnvError::Contradiction { .. } => {
            Some(Page::Environment)
        }
    }
}

fn launch_args(error: &LaunchArgsError) -> Option<Page> {
    match error {
        LaunchArgsError::Env(error) => env(error),
        LaunchArgsError::Arguments(_) => None,
        LaunchArgsError::Launch(error) => launch(error),
    }
}

fn launch(error: &LaunchError) -> Option<Page> {
    match error {
        LaunchError::Start { source, .. } | LaunchError::Log { source, .. } => Some(io(source)),
        LaunchError::System { .. } => Some(Page::SystemLimit),
    }
}

fn inspect(error: &InspectError) -> Option<Page> {
    match error {
        InspectError::Damaged { .. } => Some(Page::CheckpointDamaged),
        InspectError::Nothing { .. } => None,
    }
}

fn diff(error: &DiffError) -> Option<Page> {
    match error {
        DiffError::Missing { .. }
        | DiffError::Unknown { .. }
        | DiffError::Nothing { .. }
        | DiffError::Apart { .. } => Some(Page::NotComparable),
        DiffError::File { .. } => Some(Page::FileAccess),
    }
}

fn folder(error: &FolderError) -> Option<Page> {
    Some(match error {
        FolderError::File(_)
        | FolderError::Foreign(..)
        | FolderError::Occupied(_)
        | FolderError::Unsaved(..)
        | FolderError::Dangling { .. }
        | FolderError::OtherJob(..)
        | FolderError::Identity(..) => Page::RunFolder,
        FolderError::NotTheSame(_) => Page::RunFolderMoved,
        FolderError::Held(..) => Page::RunInUse,
        FolderError::Io { source, .. } => io(source),
    })
}

fn join(error: &JoinError) -> Option<Page> {
    Some(match error {
        JoinError::Rank { .. } => Page::Environment,
        JoinError::OpenSecret { .. } | JoinError::SealWithoutSecret { .. } => Page::SecretMissing,
        JoinError::Resolve { .. } | JoinError::Io { .. } => Page::Network,
        JoinError::Listen { .. } | JoinError::PortsTaken { .. } => Page::PortInUse,
        JoinError::Incomplete { distrust: true, .. } => Page::SecretMismatch,
        JoinError::Incomplete { distrust: false, .. } => Page::RanksMissing,
        JoinError::Stopped { .. } => return None,
        JoinError::OtherSettings { .. } | JoinError::Refused { .. } => Page::RanksDiffer,
    })
}

#[cfg(feature = "mpi")]
fn mpi(error: &kiln_collectives::mpi::MpiError) -> Option<Page> {
    use kiln_collectives::mpi::MpiError;
    match error {
        MpiError::Started | MpiError::Threads { .. } => Some(Page::MpiUnusable),
        MpiError::Thread(_) => Some(Page::SystemLimit),
    }
}

#[cfg(feature = "cuda")]
fn nccl(error: &kiln_collectives::nccl::NcclError) -> Option<Page> {
    use kiln_collectives::nccl::NcclError;
    Some(match error {
        NcclError::NoDriver => Page::DriverMissing,
        NcclError::NoDevice { .. } => Page::GpuMissing,
        NcclError::NoLibrary { .. } | NcclError::NoSymbol { .. } => Page::NcclMissing,
        NcclError::Driver { .. } => Page::GpuFailed,
        NcclError::Call { .. } | NcclError::TimedOut { .. } => Page::NcclFailed,
        // The error of another rank gives the reason.
        NcclError::Peers { .. } => return None,
        NcclError::SharedDevice { .. } => Page::GpuShared,
        NcclError::Attached => Page::OwnCode,
        NcclError::Group(error) => return comm(error),
    })
}
