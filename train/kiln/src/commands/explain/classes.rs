//! Maps errors to pages. No match has a catch-all arm, so a new variant must choose a page.
//!
//! `None` means that there is no page: the variant is not a failure, or it only reports that another rank has
//! failed (whose own error has a page), or it holds an error of a program's own code.

use std::error::Error;
use std::io::{self, ErrorKind};

use kiln_collectives::tcp::JoinError;
use kiln_collectives::{BufferError, CommError, Finding};
use kiln_model::layers::LayerError;
use kiln_shard::{MeshError, ShardError};

use super::page::Page;
use crate::error::CommandError;
use crate::error::InspectError;
use kiln_checkpoint::CheckpointError;
use kiln_checkpoint::hugging_face::HuggingFaceError;
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
use kiln_train::process::GraceError;
use kiln_train::run::{FolderError, MemoryError};

/// An error that users can encounter.
pub(crate) trait Explained {
    /// The page about this error, if there is one.
    fn page(&self) -> Option<Page>;
}

impl Explained for CommandError {
    fn page(&self) -> Option<Page> {
        match self {
            CommandError::Train(error) | CommandError::Debug(DebugError::Train(error)) => error.page(),
            CommandError::Debug(DebugError::Diff(error)) => error.page(),
            CommandError::Inspect(error) => error.page(),
        }
    }
}

impl Explained for TrainError {
    fn page(&self) -> Option<Page> {
        match self {
            TrainError::Config(error) => error.page(),
            TrainError::Device(error) => error.page(),
            TrainError::Memory(error) => error.page(),
            TrainError::Layer(error) => error.page(),
            TrainError::Data(error) => error.page(),
            TrainError::Shard(error) | TrainError::Recorded(error, _) => error.page(),
            TrainError::Loop(error) | TrainError::Metric(MetricError { source: error, .. }) => {
                of_causes(&**error)
            }
            TrainError::Records { .. } => Some(Page::RanksDiffer),
            TrainError::Checkpoint(error) => error.page(),
            TrainError::Eval(error) => error.page(),
            TrainError::Grace(error) => error.page(),
            TrainError::Env(error) => error.page(),
            TrainError::Launch(error) => error.page(),
            TrainError::Join(error) => error.page(),
            #[cfg(feature = "mpi")]
            TrainError::Mpi(error) => error.page(),
            #[cfg(feature = "cuda")]
            TrainError::Nccl { source, .. } => source.page(),
            TrainError::OtherConfig(_) => Some(Page::RanksDiffer),
            TrainError::Rank0 { .. } => None,
            TrainError::Folder(error) => error.page(),
            TrainError::OtherPosition { .. } => Some(Page::DataPosition),
            TrainError::NonFinite { .. } | TrainError::NotANumber { .. } => Some(Page::LossNotFinite),
            TrainError::Smoke { .. } => Some(Page::ResumeDiffers),
            TrainError::Links(LinksError::Read { .. }) => Some(Page::FileAccess),
            TrainError::Links(LinksError::Content { .. }) => None,
            // The output of the check includes the fixes.
            TrainError::Check { .. } => None,
            TrainError::Exists(_) => Some(Page::OutputExists),
            TrainError::Stopped | TrainError::Drill(_) => None,
            TrainError::Rank { source, .. } => source.page(),
            TrainError::Threads { .. } => Some(Page::SystemLimit),
            TrainError::Crash(_) => Some(Page::Crash),
        }
    }
}

/// The page of the first Kiln error among the causes of an error of a program's own code.
fn of_causes(error: &(dyn Error + 'static)) -> Option<Page> {
    causes(error).find_map(|error| {
        None.or_else(|| error.downcast_ref::<TrainError>()?.page())
            .or_else(|| error.downcast_ref::<ShardError>()?.page())
            .or_else(|| error.downcast_ref::<ConfigError>()?.page())
            .or_else(|| error.downcast_ref::<CheckpointError>()?.page())
            .or_else(|| error.downcast_ref::<DataError>()?.page())
    })
}

impl Explained for ConfigError {
    fn page(&self) -> Option<Page> {
        match self {
            ConfigError::Read { .. }
            | ConfigError::Parse { .. }
            | ConfigError::Override { .. }
            | ConfigError::OverrideValue { .. }
            | ConfigError::Invalid { .. } => Some(Page::Configuration),
        }
    }
}

impl Explained for DeviceError {
    fn page(&self) -> Option<Page> {
        Some(match self {
            DeviceError::NotBuilt | DeviceError::WgpuNotBuilt => Page::NotBuilt,
            DeviceError::NoDriver { .. } => Page::DriverMissing,
            DeviceError::DriverFails { .. } => Page::GpuFailed,
            DeviceError::DriverTooOld { .. } => Page::DriverTooOld,
            DeviceError::NoGpu { .. } | DeviceError::FewerGpus { .. } | DeviceError::NoWgpu => {
                Page::GpuMissing
            }
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
            DeviceError::Unusable { reason } => return reason.page(),
        })
    }
}

impl Explained for MemoryError {
    fn page(&self) -> Option<Page> {
        Some(Page::OutOfMemory)
    }
}

impl Explained for LayerError {
    fn page(&self) -> Option<Page> {
        match self {
            LayerError::Unknown { .. } => Some(Page::PartUnknown),
            LayerError::Extra { .. } | LayerError::Shape(_) => Some(Page::Configuration),
        }
    }
}

impl Explained for DataError {
    fn page(&self) -> Option<Page> {
        Some(match self {
            DataError::Stopped => return None,
            DataError::NoInputs
            | DataError::UnknownBuiltin { .. }
            | DataError::ValidationFraction { .. }
            | DataError::NoStartOfText
            | DataError::UnknownToken { .. }
            | DataError::ZeroSequenceLength => Page::Configuration,
            DataError::Missing { .. } | DataError::NoFolder { .. } | DataError::NotPrepared { .. } => {
                Page::DataMissing
            }
            DataError::NotText { .. } | DataError::JsonLine { .. } | DataError::Parquet { .. } => {
                Page::TextUnusable
            }
            DataError::ParquetDisabled { .. } => Page::NotBuilt,
            DataError::Walk { .. } => Page::FileAccess,
            DataError::NoText { .. }
            | DataError::EmptyInputs { .. }
            | DataError::TooLittleText { .. }
            | DataError::TooFewTokens { .. }
            | DataError::NoSamples
            | DataError::SampleOutOfRange { .. } => Page::TooLittleText,
            DataError::VocabularyTooSmall { .. }
            | DataError::VocabularyTooLarge { .. }
            | DataError::TokenizerTraining { .. }
            | DataError::TokenizerFile { .. }
            | DataError::NoEndOfText { .. }
            | DataError::Encode { .. }
            | DataError::Decode { .. } => Page::TokenizerUnusable,
            DataError::AlreadyPrepared { .. } | DataError::Output { .. } => Page::OutputExists,
            DataError::PreparedFromOther { .. } => Page::DataChanged,
            DataError::Info { .. }
            | DataError::Version { .. }
            | DataError::FileSize { .. }
            | DataError::Truncated { .. }
            | DataError::TokenOutOfRange { .. }
            | DataError::ChangedTokens { .. }
            | DataError::BlockSums { .. }
            | DataError::Damaged { .. } => Page::DataDamaged,
            DataError::Io { source, .. } => of_io(source),
        })
    }
}

/// The page about a file that cannot be read or written.
fn of_io(error: &io::Error) -> Page {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Page::DiskFull,
        _ if files::limit_of(error).is_some() => Page::SystemLimit,
        _ => Page::FileAccess,
    }
}

impl Explained for ShardError {
    fn page(&self) -> Option<Page> {
        Some(match self {
            ShardError::Comm(error) => return error.page(),
            ShardError::Buffer(error) => return error.page(),
            ShardError::Mesh(error) => return error.page(),
            ShardError::PlanMismatch { .. } => Page::RanksDiffer,
            ShardError::UnsupportedDType { .. } => Page::Configuration,
            ShardError::DuplicateParameter { .. }
            | ShardError::HostRule { .. }
            | ShardError::Update { .. }
            | ShardError::Pinned { .. }
            | ShardError::Captured { .. }
            | ShardError::NoGradient { .. }
            | ShardError::UnknownParameter { .. }
            | ShardError::WrongLength { .. }
            | ShardError::InitialValues { .. }
            | ShardError::Unreadable { .. }
            | ShardError::Gradient { .. } => Page::OwnCode,
        })
    }
}

impl Explained for CommError {
    fn page(&self) -> Option<Page> {
        Some(match self {
            CommError::Invalid { .. } | CommError::Mismatch { .. } => Page::CollectiveMismatch,
            CommError::TimedOut { verdict, .. } => match verdict.finding {
                Finding::Died | Finding::Silent => Page::PeerLost,
                Finding::Mismatch => Page::CollectiveMismatch,
                Finding::Missing
                | Finding::Late
                | Finding::Stopped
                | Finding::Transfer
                | Finding::Nothing => Page::CollectiveTimeout,
            },
            CommError::Aborted { .. } => Page::PeerLost,
        })
    }
}

impl Explained for BufferError {
    fn page(&self) -> Option<Page> {
        match self {
            BufferError::DType { .. } | BufferError::OnDevice { .. } => Some(Page::OwnCode),
            BufferError::Device { .. } => Some(Page::GpuFailed),
        }
    }
}

impl Explained for MeshError {
    fn page(&self) -> Option<Page> {
        match self {
            MeshError::Empty
            | MeshError::MissingShardSize { .. }
            | MeshError::Indivisible { .. }
            | MeshError::Contradiction { .. }
            | MeshError::UnevenNodes { .. }
            | MeshError::InterleavedNodes { .. } => Some(Page::Mesh),
        }
    }
}

impl Explained for CheckpointError {
    fn page(&self) -> Option<Page> {
        Some(match self {
            CheckpointError::NotFound { .. } => Page::CheckpointMissing,
            CheckpointError::NoneUsable { .. } | CheckpointError::Damaged { .. } => Page::CheckpointDamaged,
            CheckpointError::DamagedButEarlier { source, .. } => return source.page(),
            CheckpointError::Io { source, .. } => of_io(source),
            CheckpointError::OtherModel { .. } | CheckpointError::Names { .. } => Page::CheckpointMismatch,
            CheckpointError::OtherArchitecture { .. } => Page::PartUnknown,
            CheckpointError::Layer(error) => return error.page(),
            CheckpointError::OtherOptimizer { .. } | CheckpointError::Slots { .. } => Page::OptimizerMismatch,
            CheckpointError::NotFinite { .. } => Page::WeightsNotFinite,
            CheckpointError::Context { .. } => Page::OwnCode,
            CheckpointError::Exists { .. } => Page::OutputExists,
            CheckpointError::MissingParts { .. } => Page::CheckpointIncomplete,
            CheckpointError::NotHeld { .. } => Page::RunFolderMoved,
            CheckpointError::Stalled { .. } => Page::DiskStalled,
            CheckpointError::OtherRank => return None,
            CheckpointError::HuggingFace(error) => return error.page(),
            CheckpointError::Data(error) => return error.page(),
            CheckpointError::Shard(error) => return error.page(),
        })
    }
}

impl Explained for HuggingFaceError {
    fn page(&self) -> Option<Page> {
        Some(match self {
            HuggingFaceError::Io { source, .. } => of_io(source),
            HuggingFaceError::NotAModel { .. }
            | HuggingFaceError::Unsupported { .. }
            | HuggingFaceError::NoArchitecture { .. }
            | HuggingFaceError::Unnamed { .. }
            | HuggingFaceError::Range { .. } => Page::ModelUnsupported,
            HuggingFaceError::LeadsOut { .. }
            | HuggingFaceError::Json { .. }
            | HuggingFaceError::Key { .. }
            | HuggingFaceError::Shape { .. }
            | HuggingFaceError::Damaged { .. }
            | HuggingFaceError::Names { .. } => Page::ModelDamaged,
            HuggingFaceError::OtherModel { .. } => Page::CheckpointMismatch,
            HuggingFaceError::Layer(error) => return error.page(),
            HuggingFaceError::Occupied { .. } => Page::OutputExists,
            HuggingFaceError::NoHub { .. } => Page::NotBuilt,
            HuggingFaceError::RepoName { .. } | HuggingFaceError::Download { .. } => Page::DownloadFailed,
        })
    }
}

impl Explained for EvalError {
    fn page(&self) -> Option<Page> {
        Some(match self {
            EvalError::NoData { .. }
            | EvalError::DataGone { .. }
            | EvalError::DataNotFound { .. }
            | EvalError::DataMissing { .. } => Page::DataMissing,
            EvalError::OtherData { .. } => Page::DataChanged,
            EvalError::OtherVocabulary { .. } | EvalError::OtherTokenizer { .. } => Page::TokenizerMismatch,
            EvalError::TooLong { .. }
            | EvalError::TooFewTokens { .. }
            | EvalError::PairTooLong { .. }
            | EvalError::EmptyAnswer { .. }
            | EvalError::NoPairs { .. }
            | EvalError::UnknownToken { .. } => Page::EvaluationInput,
            EvalError::Line { .. } => Page::TextUnusable,
            EvalError::Read { source, .. } | EvalError::Write { source, .. } => of_io(source),
        })
    }
}

impl Explained for GraceError {
    fn page(&self) -> Option<Page> {
        Some(Page::Environment)
    }
}

impl Explained for EnvError {
    fn page(&self) -> Option<Page> {
        match self {
            EnvError::Value { .. } | EnvError::Missing { .. } | EnvError::Contradiction { .. } => {
                Some(Page::Environment)
            }
        }
    }
}

impl Explained for LaunchArgsError {
    fn page(&self) -> Option<Page> {
        match self {
            LaunchArgsError::Env(error) => error.page(),
            LaunchArgsError::Arguments(_) => None,
            LaunchArgsError::Launch(error) => error.page(),
        }
    }
}

impl Explained for LaunchError {
    fn page(&self) -> Option<Page> {
        match self {
            LaunchError::Start { source, .. } | LaunchError::Log { source, .. } => Some(of_io(source)),
            LaunchError::System { .. } => Some(Page::SystemLimit),
        }
    }
}

impl Explained for InspectError {
    fn page(&self) -> Option<Page> {
        match self {
            InspectError::Damaged { .. } => Some(Page::CheckpointDamaged),
            InspectError::Nothing { .. } => None,
        }
    }
}

impl Explained for DiffError {
    fn page(&self) -> Option<Page> {
        match self {
            DiffError::Missing { .. }
            | DiffError::Unknown { .. }
            | DiffError::Nothing { .. }
            | DiffError::Apart { .. } => Some(Page::NotComparable),
            DiffError::File { .. } => Some(Page::FileAccess),
        }
    }
}

impl Explained for FolderError {
    fn page(&self) -> Option<Page> {
        Some(match self {
            FolderError::File(_)
            | FolderError::Foreign(..)
            | FolderError::Occupied(_)
            | FolderError::Unsaved(..)
            | FolderError::Dangling { .. }
            | FolderError::OtherJob(..)
            | FolderError::Identity(..) => Page::RunFolder,
            FolderError::NotTheSame(_) => Page::RunFolderMoved,
            FolderError::Held(..) => Page::RunInUse,
            FolderError::Io { source, .. } => of_io(source),
        })
    }
}

impl Explained for JoinError {
    fn page(&self) -> Option<Page> {
        Some(match self {
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
}

#[cfg(feature = "mpi")]
impl Explained for kiln_collectives::mpi::MpiError {
    fn page(&self) -> Option<Page> {
        use kiln_collectives::mpi::MpiError;
        match self {
            MpiError::Started | MpiError::Threads { .. } => Some(Page::MpiUnusable),
            MpiError::Thread(_) => Some(Page::SystemLimit),
        }
    }
}

#[cfg(feature = "cuda")]
impl Explained for kiln_collectives::nccl::NcclError {
    fn page(&self) -> Option<Page> {
        use kiln_collectives::nccl::NcclError;
        Some(match self {
            NcclError::NoDriver => Page::DriverMissing,
            NcclError::NoDevice { .. } => Page::GpuMissing,
            NcclError::NoLibrary { .. } | NcclError::NoSymbol { .. } => Page::NcclMissing,
            NcclError::Driver { .. } => Page::GpuFailed,
            NcclError::Call { .. } | NcclError::TimedOut { .. } => Page::NcclFailed,
            // The other ranks report the reason.
            NcclError::Peers { .. } => return None,
            NcclError::SharedDevice { .. } => Page::GpuShared,
            NcclError::Attached => Page::OwnCode,
            NcclError::Group(error) => return error.page(),
        })
    }
}
