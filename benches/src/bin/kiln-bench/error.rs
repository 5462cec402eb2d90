//! Errors of measurements.

use kiln::run::TrainError;

/// A problem with the arguments, the device or the peer.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The configuration is invalid, or a step has failed.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// The program was built without CUDA.
    #[error(
        "--device cuda: this program was built without CUDA; build it with `cargo build --release -p \
         kiln-benches --features cuda`, which needs no CUDA, or choose another device"
    )]
    NoCuda,
    /// The program was built without wgpu.
    #[error(
        "--device wgpu: this program was built without wgpu; build it with `cargo build --release -p \
         kiln-benches --features wgpu`, or choose another device"
    )]
    NoWgpu,
    /// The device lacks a number format.
    #[error("--dtype {dtype}: this device does not support it; omit --dtype, or use f32")]
    NoDType {
        /// The format.
        dtype: &'static str,
    },
    /// `--only` names no row.
    #[error("--only {wanted}: unknown row; choose from {}", .rows.join(", "))]
    NoRow {
        /// The requested name.
        wanted: String,
        /// The existing names.
        rows: Vec<String>,
    },
    /// PyTorch does not run on this device.
    #[error("--peer runs PyTorch, which does not support wgpu; use --device cuda")]
    NoPeer,
    /// The peer's script does not exist.
    #[error("--peer-script {script}: no such file; run kiln-bench from the root of a clone, or set its path")]
    NoScript {
        /// The path of the script.
        script: String,
    },
    /// The peer cannot be started, or ended with an error.
    #[error("--peer: `{command}` {problem}")]
    Peer {
        /// The command that started it.
        command: String,
        /// A description of the problem.
        problem: String,
    },
    /// The file of predictions cannot be used.
    #[error("--predicted {file}: {problem}")]
    Predicted {
        /// The file.
        file: String,
        /// A description of the problem.
        problem: String,
    },
    /// wgpu has no device.
    #[error("the device failed: wgpu finds no GPU")]
    #[cfg(feature = "wgpu")]
    NoGpu,
}

impl BenchError {
    /// Returns true if the arguments are the cause.
    pub fn is_usage(&self) -> bool {
        match self {
            BenchError::Train(error) => error.is_usage(),
            BenchError::Peer { .. } => false,
            #[cfg(feature = "wgpu")]
            BenchError::NoGpu => false,
            _ => true,
        }
    }
}
