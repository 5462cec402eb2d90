//! The position of a thread in its block and grid.

use crate::lanes::ALL;
use crate::program::Special;

/// The values of special registers.
pub struct Position {
    pub block: [u32; 3],
    pub grid_size: [u32; 3],
    pub block_size: [u32; 3],
    pub dynamic_shared: u32,
}

impl Position {
    /// Returns the value of a special register in a lane of the warp whose first thread is `first`.
    pub fn special(&self, special: Special, first: u32, lane: u32) -> u32 {
        match special {
            Special::Thread(axis) => unfolded(first + lane, self.block_size)[usize::from(axis)],
            Special::Block(axis) => self.block[usize::from(axis)],
            Special::BlockSize(axis) => self.block_size[usize::from(axis)],
            Special::GridSize(axis) => self.grid_size[usize::from(axis)],
            Special::Lane => lane,
            Special::Warp => first / 32,
            Special::LanesBelow => (1 << lane) - 1,
            Special::LanesUpTo => ALL >> (31 - lane),
            Special::LaneMask => 1 << lane,
            Special::LanesFrom => ALL << lane,
            Special::LanesAbove => !(ALL >> (31 - lane)),
            Special::DynamicSharedSize => self.dynamic_shared,
        }
    }
}

/// Returns the position of a thread counted along x, then y, then z.
pub fn unfolded(number: u32, size: [u32; 3]) -> [u32; 3] {
    [number % size[0], number / size[0] % size[1], number / size[0] / size[1]]
}
