//! Errors of measurements.

use kiln::run::TrainError;

/// An error of the arguments, the device or the peer.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(
        "--device cuda: this program was built without CUDA; build it with `cargo build --release -p \
         kiln-benches --features cuda`, which needs no CUDA, or choose another device"
    )]
    NoCuda,
    #[error(
        "--device wgpu: this program was built without wgpu; build it with `cargo build --release -p \
         kiln-benches --features wgpu`, or choose another device"
    )]
    NoWgpu,
    #[error("--dtype {dtype}: this device does not support it; omit --dtype, or use f32")]
    NoDType { dtype: &'static str },
    #[error("--only {wanted}: unknown row; choose from {}", .rows.join(", "))]
    NoRow { wanted: String, rows: Vec<String> },
    #[error("--peer runs PyTorch, which does not support wgpu; use --device cuda")]
    NoPeer,
    #[error("--peer-script {script}: no such file; run kiln-bench from the root of a clone, or set its path")]
    NoScript { script: String },
    #[error("--peer: `{command}` {problem}")]
    Peer { command: String, problem: String },
    #[error("--predicted {file}: {problem}")]
    Predicted { file: String, problem: String },
    #[error("the device failed: wgpu finds no GPU")]
    #[cfg(feature = "wgpu")]
    NoGpu,
}

impl BenchError {
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
