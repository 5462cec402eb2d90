//! The instructions of `wgmma`, and the registers they use.

use crate::types::Kind;

/// A product of `wgmma`: 64 rows, a number of columns, and 16 elements along the sum.
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
    /// Orders earlier accesses to registers before later products.
    Fence,
    Commit,
    /// Waits for all groups except the latest `.0`.
    Wait(u32),
    /// Result: d, which is also read. Operands: a or its descriptor, descriptor of b, whether d is added.
    Product(WarpgroupProduct),
}

/// The effect of an instruction on registers of `wgmma` products and on their copies, counted from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProductUse {
    pub reads: Vec<u16>,
    pub writes: Vec<u16>,
    /// Set if it copies a register.
    pub is_move: bool,
}

/// The registers of `wgmma` products and their copies: their number, and the instructions that use them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProductUses {
    pub registers: usize,
    /// For each instruction of the code, 0 or its position in `all`, counted from 1.
    pub at: Vec<u32>,
    pub all: Vec<ProductUse>,
}

impl ProductUses {
    /// Returns the uses by the instruction at this index of the code.
    pub fn of(&self, at: usize) -> Option<&ProductUse> {
        self.all.get((*self.at.get(at)? as usize).checked_sub(1)?)
    }
}
