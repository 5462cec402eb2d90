//! Kernels in executable form: instructions with register numbers instead of names.

use std::sync::Arc;

use crate::error::Space;
use crate::parse::Variable;
pub use crate::types::{Kind, Mode, Round, Type};
use crate::wgmma::form::{ProductUses, WarpgroupOp};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int1 {
    Not,
    Neg,
    Abs,
    CountOnes,
    LeadingZeros,
    Reverse,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int2 {
    Add,
    Sub,
    Mul,
    MulHigh,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float1 {
    Neg,
    Abs,
    Reciprocal,
    Sqrt,
    ReciprocalSqrt,
    Exp2,
    Log2,
    Sin,
    Cos,
    Tanh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float2 {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    /// The result is NaN if an operand is.
    MinNan,
    MaxNan,
    /// The second operand with the sign of the first.
    CopySign,
}

/// A comparison. For floats, those that end in `OrNan` are true if an operand is NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    EqualOrNan,
    NotEqualOrNan,
    LessOrNan,
    LessEqualOrNan,
    GreaterOrNan,
    GreaterEqualOrNan,
    /// Neither operand is NaN.
    Numbers,
    /// At least one operand is NaN.
    Nan,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logic {
    And,
    Or,
    Xor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Atomic {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareAndSwap,
}

/// A matrix of `D = A · B + C`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    A,
    B,
    Accumulator,
}

/// An access to memory at a register plus `offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    pub space: Space,
    pub ty: Type,
    /// Number of consecutive elements, as in `.v4`.
    pub count: u8,
    pub offset: i32,
    /// Set if the address is in a 64-bit register.
    pub wide: bool,
}

/// Elements of `wmma`: 16 rows and columns, and `k` elements along the sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fragment {
    pub matrix: Matrix,
    pub k: u8,
    pub ty: Type,
    pub row_major: bool,
}

/// An operation. Docs name the registers of results first, then those of operands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Op {
    /// A target of branches, where paths may meet.
    Label,
    Branch(u32),
    Return,
    Trap,
    /// Operand: number of the barrier.
    Barrier,
    /// Operand: mask of lanes.
    WarpBarrier,
    Move32,
    Move64,
    MovePredicate,
    /// Converts the address of a variable in this space to a generic address, or back.
    ToGeneric(Space),
    FromGeneric(Space),
    Int1(Int1, Type),
    Int2(Int2, Type),
    /// a · b in twice the bits, plus c if there is one
    MulWide {
        signed: bool,
        bits: u32,
        add: bool,
    },
    /// a · b + c
    MulAdd(Type),
    /// Operands: bits to insert, value to insert them into, position, length.
    Insert32,
    Float1(Float1, Mode),
    Float2(Float2, Mode),
    MulAddFloat(Mode),
    Half2(Float2, Kind),
    HalfMulAdd(Kind),
    /// Results: predicate, optionally its opposite. Operands: a, b, optionally a second predicate.
    Compare {
        compare: Compare,
        ty: Type,
        flush: bool,
        with: Option<Logic>,
        opposite: bool,
    },
    /// Result: 1.0, or all bits of an integer, if the comparison holds. Operands: a, b.
    Set {
        compare: Compare,
        ty: Type,
        flush: bool,
        yes: u32,
    },
    Select32,
    Select64,
    Logic(Logic),
    NotPredicate,
    Convert {
        to: Type,
        from: Type,
        mode: Mode,
        integral: bool,
    },
    /// Two floats to one register with two halves: high, low
    ConvertPair {
        kind: Kind,
        mode: Mode,
    },
    /// Parts of this many bits, lowest first, to or from one register.
    Pack {
        bits: u32,
    },
    Unpack {
        bits: u32,
    },
    Load(Access),
    /// Loads values that are only used in [`Op::StoreMoved`] and [`Op::SelectMoved`].
    LoadMoved(Access),
    Store(Access),
    /// Stores values that only come from [`Op::LoadMoved`].
    StoreMoved(Access),
    /// [`Op::Select32`] where at least one of the two values comes from [`Op::LoadMoved`].
    SelectMoved([bool; 2]),
    /// Operands: target address, source address, number of bytes to read from the source.
    CopyAsync {
        bytes: u8,
        target: i32,
        source: i32,
        wide_target: bool,
    },
    CopyCommit,
    /// Waits for all groups except the latest `left`.
    CopyWait {
        left: u32,
        uncommitted: bool,
    },
    LoadMatrix {
        transposed: bool,
        access: Access,
    },
    /// Result: d. Operands: a, b, c.
    Mma {
        k: u8,
        kind: Kind,
    },
    WmmaLoad(Fragment, Access),
    WmmaStore(Access, bool),
    WmmaMma {
        k: u8,
        kind: Kind,
    },
    Warpgroup(WarpgroupOp),
    /// Orders writes to shared memory before later reads of `wgmma`.
    ProxyFence,
    /// Results: d, optionally a predicate. Operands: a, b, limits, mask.
    Shuffle(Shuffle),
    Vote(Vote),
    ActiveMask,
    /// Result: optionally the previous value. Operands: address, a, optionally b.
    Atomic {
        op: Atomic,
        access: Access,
    },
}

impl Op {
    /// Returns `true` if results are also operands, unless the last operand, a predicate, is false.
    pub fn adds_to_results(&self) -> bool {
        matches!(self, Op::Warpgroup(WarpgroupOp::Product(_)))
    }
}

/// One instruction. Its registers are `operands[first..]`, results first.
#[derive(Debug, Clone, Copy)]
pub struct Instr {
    pub op: Op,
    /// The predicate under which it executes, and whether the predicate is negated.
    pub guard: Option<(u16, bool)>,
    pub results: u8,
    pub operands: u8,
    pub first: u32,
    pub line: u32,
    /// Set if the kernel's `watches` or `product_uses` contain it.
    pub watched: bool,
}

/// A value that a kernel starts with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Special {
    Thread(u8),
    Block(u8),
    BlockSize(u8),
    GridSize(u8),
    Lane,
    Warp,
    /// Masks of lanes: below, up to, this one, from, above.
    LanesBelow,
    LanesUpTo,
    LaneMask,
    LanesFrom,
    LanesAbove,
    DynamicSharedSize,
}

/// A kernel that can be executed.
#[derive(Debug)]
pub struct Kernel {
    pub name: String,
    pub code: Vec<Instr>,
    pub operands: Vec<u16>,
    /// Parameters with their positions in the bytes that `ld.param` reads.
    pub parameters: Vec<(Variable, u32)>,
    pub parameter_bytes: u32,
    pub most_threads: Option<u32>,
    /// Bytes of shared memory whose size is in the text. The memory requested by the launch follows.
    pub static_shared: u32,
    pub local_bytes: u32,
    /// Numbers of 32-bit and 64-bit registers, and of predicates.
    pub registers: [usize; 3],
    pub constants32: Vec<(u16, u32)>,
    pub constants64: Vec<(u16, u64)>,
    /// Predicates that are always true.
    pub true_predicates: Vec<u16>,
    pub specials: Vec<(u16, Special)>,
    /// Bytes of the smallest access to shared memory, which is the granularity of the books.
    pub granule: u32,
    pub watches: Watches,
    pub product_uses: ProductUses,
    pub text: Arc<str>,
}

impl Kernel {
    /// Returns a line of the text.
    pub fn line(&self, number: u32) -> &str {
        self.text.lines().nth(number.saturating_sub(1) as usize).unwrap_or_default().trim()
    }
}

/// The effect of an instruction on watched registers, which are counted from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watch {
    pub at: usize,
    pub guard: Option<u16>,
    pub reads: Vec<u16>,
    /// Results that are added to, if the instruction does so.
    pub sums: Vec<u16>,
    pub writes: Vec<u16>,
}

/// The registers that a kernel may read before writing them: their number, and the instructions that use
/// them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Watches {
    pub registers: usize,
    pub all: Vec<Watch>,
}

/// The kernels of a module.
#[derive(Debug)]
pub struct Module {
    pub kernels: Vec<Arc<Kernel>>,
}

impl Module {
    pub fn kernel(&self, name: &str) -> Option<&Arc<Kernel>> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }
}
