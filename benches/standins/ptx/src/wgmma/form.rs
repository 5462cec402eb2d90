//! The instructions of `wgmma`, and the registers that they use.

use crate::types::Kind;

/// A product of `wgmma`: 64 rows, so many columns, and 16 along the sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WarpgroupProduct {
    pub columns: u16,
    pub kind: Kind,
    pub a_in_registers: bool,
    pub transposed_a: bool,
    pub transposed_b: bool,
}

/// `wgmma`, which all lanes of the four warps of a warpgroup execute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarpgroupOp {
    /// Other accesses to registers come before products behind it.
    Fence,
    Commit,
    /// Waits for all groups but so many.
    Wait(u32),
    /// d, which is read as well; a or its descriptor, descriptor of b, whether d is added
    Product(WarpgroupProduct),
}

/// What an instruction does with registers of `wgmma` products and their copies, which are counted from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProductUse {
    pub reads: Vec<u16>,
    pub writes: Vec<u16>,
    /// Whether it copies a register.
    pub is_move: bool,
}

/// The registers of `wgmma` products and their copies: how many, and the instructions that use them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProductUses {
    pub registers: usize,
    /// For each instruction of the code, 0 or its place in `all`, counted from 1.
    pub at: Vec<u32>,
    pub all: Vec<ProductUse>,
}

impl ProductUses {
    /// What the instruction at this place of the code uses.
    pub fn of(&self, at: usize) -> Option<&ProductUse> {
        self.all.get((*self.at.get(at)? as usize).checked_sub(1)?)
    }
}
