//! Why a measurement cannot be made.

/// What is wrong with arguments, the device or a peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BenchError {
    /// The program knows no NVIDIA GPUs.
    #[error(
        "--device cuda: this program was built without CUDA; build it with `cargo build --release \
         --features cuda`, which needs no CUDA, or choose another device"
    )]
    NoCuda,
    /// The program knows no GPUs of other makers.
    #[error(
        "--device wgpu: this program was built without wgpu; build it with `cargo build --release \
         --features wgpu`, or choose another device"
    )]
    NoWgpu,
    /// The device lacks a number format.
    #[error("--dtype {dtype}: this device cannot compute in it; leave --dtype out, or say f32")]
    NoDType {
        /// The format.
        dtype: &'static str,
    },
    /// Nothing is called so.
    #[error("--only {wanted}: nothing is called so; there are {}", .rows.join(", "))]
    NoRow {
        /// What was asked for.
        wanted: String,
        /// What there is.
        rows: Vec<String>,
    },
    /// A number of steps or rounds is out of its range.
    #[error("{argument} must be from 1 to {most}")]
    Count {
        /// The argument.
        argument: &'static str,
        /// The most that is measured.
        most: usize,
    },
    /// There is nothing to compare with on this device.
    #[error("--peer runs PyTorch on the same device, and PyTorch knows no wgpu; use --device cuda")]
    NoPeer,
    /// The peer's script is not there.
    #[error(
        "--peer-script {script}: there is no such file; run kiln from the root of a clone, or name it"
    )]
    NoScript {
        /// Where it was looked for.
        script: String,
    },
    /// The peer cannot be started, or ended with an error.
    #[error("--peer: `{command}` {problem}")]
    Peer {
        /// How it was started.
        command: String,
        /// What happened.
        problem: String,
    },
    /// The device reports an error.
    #[error("the device failed: {reason}")]
    Device {
        /// What it says.
        reason: String,
    },
}

impl BenchError {
    /// Whether the arguments are the cause.
    pub fn is_usage(&self) -> bool {
        !matches!(self, BenchError::Device { .. } | BenchError::Peer { .. })
    }
}
