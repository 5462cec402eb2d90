//! The names of the pages.

use clap::ValueEnum;

/// A class of failures, which has a page: the section of `docs/errors.md` whose name is the variant's in
/// lower case, with hyphens.
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
    /// The name for `kiln explain`.
    pub(crate) fn name(self) -> String {
        // No variant is hidden.
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}
