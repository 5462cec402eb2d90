//! The version that `kiln --version` prints.

use kiln_train::version;

const FEATURES: [(&str, bool); 5] = [
    ("cuda", cfg!(feature = "cuda")),
    ("wgpu", cfg!(feature = "wgpu")),
    ("hub", cfg!(feature = "hub")),
    ("mpi", cfg!(feature = "mpi")),
    ("parquet", cfg!(feature = "parquet")),
];

/// Returns the version, commit and features of this program, on one line, and passes them to the trainer.
pub(crate) fn version() -> &'static str {
    version::set_version(describe());
    version::version()
}

fn describe() -> String {
    let commit = match env!("KILN_COMMIT") {
        "" => "unknown",
        commit => commit,
    };
    let features: Vec<_> = FEATURES.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
    let features = if features.is_empty() { "none".to_owned() } else { features.join(", ") };
    format!("{} (commit {commit}; features: {features})", env!("CARGO_PKG_VERSION"))
}
