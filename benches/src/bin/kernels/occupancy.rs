//! The number of blocks of a kernel that share a multiprocessor of compute capability 9.0.

/// Registers of a multiprocessor, which are allocated to warps in units of 256.
const REGISTERS: u64 = 65_536;
const REGISTER_UNIT: u64 = 256;
/// Shared memory of a multiprocessor, and the extra amount per block.
const SHARED: u64 = 228 << 10;
const SHARED_BESIDE: u64 = 1 << 10;
const WARPS: u64 = 64;
const BLOCKS: u64 = 32;

/// Returns how many blocks of `threads` threads, `registers` registers per thread and `shared` bytes of shared memory a
/// multiprocessor runs at the same time.
pub fn blocks(threads: u64, registers: u64, shared: u64) -> u64 {
    let warps = threads.div_ceil(32).max(1);
    let by_registers = REGISTERS / ((registers.max(1) * 32).next_multiple_of(REGISTER_UNIT) * warps);
    by_registers.min(SHARED / (shared + SHARED_BESIDE)).min(WARPS / warps).min(BLOCKS)
}

#[cfg(test)]
mod tests {
    use super::blocks;

    /// As in the occupancy calculator of the CUDA toolkit for compute capability 9.0.
    #[test]
    fn blocks_share_a_multiprocessor() {
        assert_eq!(blocks(256, 32, 0), 8);
        assert_eq!(blocks(128, 255, 0), 2);
        assert_eq!(blocks(128, 168, 0), 3);
        assert_eq!(blocks(128, 210, 56_000), 2);
        assert_eq!(blocks(128, 32, 100 << 10), 2);
        assert_eq!(blocks(32, 16, 0), 32);
    }
}
