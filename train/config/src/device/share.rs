//! Several processes on one GPU.

/// Environment variable that lets NCCL 2.30 and newer place several ranks on one GPU.
const SHARE_GPU: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// Returns whether several processes may use the same GPU.
pub fn share_gpu() -> bool {
    std::env::var(SHARE_GPU).is_ok_and(|value| value == "1")
}
