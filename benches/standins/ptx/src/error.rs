//! Errors of modules and of running kernels.

use std::error::Error as StdError;
use std::fmt::{Display, Formatter, Result as FmtResult};

/// PTX that cannot be read: the line and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    pub line: u32,
    pub reason: String,
}

impl ParseError {
    pub(crate) fn new(line: u32, reason: impl Into<String>) -> ParseError {
        ParseError { line, reason: reason.into() }
    }
}

impl Display for ParseError {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl StdError for ParseError {}

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    Global,
    Shared,
    Local,
    Param,
    /// Any of the first three; the address determines which.
    Generic,
}

impl Display for Space {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        f.write_str(match self {
            Space::Global => "global",
            Space::Shared => "shared",
            Space::Local => "local",
            Space::Param => "parameter",
            Space::Generic => "generic",
        })
    }
}

/// A second thread of the block or grid, and the line of its access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Other {
    /// Index of the block, counted along x, then y, then z.
    pub block: u32,
    /// Index of the thread in its block, in the same order.
    pub thread: u32,
    /// Line of the access; 0 if unknown.
    pub line: u32,
}

/// An error of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// An access outside of every allocation.
    OutOfBounds {
        space: Space,
        address: u64,
        bytes: u32,
        limits: Option<(u64, u64)>,
    },
    /// An address that is not a multiple of the size of the access.
    Misaligned {
        space: Space,
        address: u64,
        bytes: u32,
    },
    /// A read of unwritten memory.
    Uninitialised {
        space: Space,
        address: u64,
    },
    /// A read of a register that the thread has not written.
    Unset,
    /// An access to memory that `cp.async` is still copying.
    Pending {
        address: u64,
        copy: Other,
    },
    /// A read of another thread's write, without a barrier between them.
    ReadAfterWrite {
        space: Space,
        address: u64,
        other: Other,
    },
    /// A write to memory that another thread has read or written, without a barrier between them.
    WriteAfterRead {
        space: Space,
        address: u64,
        other: Other,
    },
    WriteAfterWrite {
        space: Space,
        address: u64,
        other: Other,
    },
    /// `bar.sync` or another instruction of a whole warp, executed by only some of its threads.
    Divergent {
        active: u32,
        expected: u32,
    },
    /// A barrier that another thread does not reach because it has ended, or because it waits at a different
    /// one.
    Barrier {
        other: Other,
        ended: bool,
    },
    /// A lane that takes a value from an inactive lane.
    InactiveLane {
        lane: u32,
    },
    /// Rows of a matrix whose distance does not match the instruction.
    Stride {
        stride: u32,
    },
    /// A descriptor of a matrix that `wgmma` cannot read.
    Descriptor {
        descriptor: u64,
        reason: &'static str,
    },
    /// A warpgroup that is only partly inside the block.
    Warpgroup {
        threads: u32,
    },
    /// An operand that must be the same in all lanes of a warp or in all warps of a warpgroup, but is not.
    Unlike {
        what: &'static str,
        other: Option<Other>,
    },
    /// A product without a fence since the use of its registers in this line, or without any fence if the
    /// line is 0.
    Unfenced {
        line: u32,
    },
    /// A use of a register that the asynchronous product issued in this line may still be using.
    InFlight {
        line: u32,
    },
    /// A wait for all products while a product is not committed.
    Uncommitted {
        line: u32,
    },
    /// The end of a warp that has not waited for a product.
    Unwaited {
        line: u32,
    },
    /// A read by a product of data whose writer has not executed a proxy fence.
    Proxy {
        address: u64,
        other: Other,
    },
    /// A write to memory that an asynchronous product is still reading.
    AsyncRead {
        address: u64,
        other: Other,
    },
    /// `trap`, which kernels execute deliberately.
    Trap,
}

impl Display for Fault {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        match self {
            Fault::OutOfBounds { space, address, bytes, limits } => {
                write!(f, "out of bounds: {bytes} bytes of {space} memory at {address:#x}")?;
                match limits {
                    Some((start, end)) => write!(f, ", nearest allocation {start:#x}..{end:#x}"),
                    None => write!(f, ", no allocation exists"),
                }
            }
            Fault::Misaligned { space, address, bytes } => {
                write!(f, "misaligned: {bytes} bytes of {space} memory at {address:#x}")
            }
            Fault::Uninitialised { space, address } => {
                write!(f, "uninitialised: nothing has written {space} memory at {address:#x}")
            }
            Fault::Unset => {
                f.write_str("uninitialised: the thread has not written a register that it reads here")
            }
            Fault::Pending { address, copy } => write!(
                f,
                "not waited for: cp.async in line {} (thread {}) still copies to shared memory at {address:#x}",
                copy.line, copy.thread
            ),
            Fault::ReadAfterWrite { space, address, other } => {
                write!(
                    f,
                    "race: {space} memory at {address:#x} was written by {other}, with no barrier in between"
                )
            }
            Fault::WriteAfterRead { space, address, other } => {
                write!(
                    f,
                    "race: {space} memory at {address:#x} was read by {other}, with no barrier in between"
                )
            }
            Fault::WriteAfterWrite { space, address, other } => write!(
                f,
                "race: {space} memory at {address:#x} was also written by {other}, with no barrier in between"
            ),
            Fault::Divergent { active, expected } => {
                write!(f, "divergent: lanes {active:#010x} execute this, but {expected:#010x} must")
            }
            Fault::Barrier { other, ended: true } => {
                write!(f, "barrier: thread {} has ended without reaching it", other.thread)
            }
            Fault::Barrier { other, ended: false } => {
                write!(f, "barrier: thread {} waits at another barrier, in line {}", other.thread, other.line)
            }
            Fault::InactiveLane { lane } => write!(f, "inactive: lane {lane} does not execute this"),
            Fault::Stride { stride } => {
                write!(f, "a stride of {stride} elements, which is not a multiple of 16 bytes")
            }
            Fault::Descriptor { descriptor, reason } => {
                write!(f, "the matrix descriptor {descriptor:#018x}: {reason}")
            }
            Fault::Warpgroup { threads } => {
                write!(f, "a warpgroup has 128 threads, but the block has only {threads} of this one")
            }
            Fault::Unlike { what, other: None } => {
                write!(f, "not the same: the {what} of wgmma must be equal in all lanes of a warp")
            }
            Fault::Unlike { what, other: Some(other) } => {
                write!(f, "not the same: the {what} of wgmma differs from that of {other}")
            }
            Fault::Unfenced { line: 0 } => {
                f.write_str("not fenced: no wgmma.fence comes before the first wgmma.mma_async")
            }
            Fault::Unfenced { line } => {
                write!(
                    f,
                    "not fenced: line {line} used a register of this product, with no wgmma.fence in between"
                )
            }
            Fault::InFlight { line } => {
                write!(
                    f,
                    "not waited for: wgmma.mma_async in line {line} may still use a register of this line"
                )
            }
            Fault::Uncommitted { line } => {
                write!(f, "not waited for: wgmma.mma_async in line {line} was not committed to a group")
            }
            Fault::Unwaited { line } => {
                write!(f, "not waited for: wgmma.mma_async in line {line}, at the end of the warp")
            }
            Fault::Proxy { address, other } => write!(
                f,
                "read by the async proxy without a fence.proxy.async: shared memory at {address:#x} was written by \
                 {other}, which executed none between its write and a barrier"
            ),
            Fault::AsyncRead { address, other } => write!(
                f,
                "race: shared memory at {address:#x} is read by wgmma.mma_async of {other}, which is not waited for"
            ),
            Fault::Trap => f.write_str("trap"),
        }
    }
}

impl Display for Other {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        write!(f, "thread {} of block {}", self.thread, self.block)?;
        if self.line > 0 {
            write!(f, " in line {}", self.line)?;
        }
        Ok(())
    }
}

/// A fault with its location: kernel, line and text, block and thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    pub kernel: String,
    pub line: u32,
    pub text: String,
    pub block: [u32; 3],
    pub thread: [u32; 3],
    pub fault: Fault,
}

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        let Error { kernel, line, text, block, thread, fault } = self;
        write!(f, "{fault}\n  kernel {kernel}, line {line}: {text}\n  block {block:?}, thread {thread:?}")
    }
}

impl StdError for Error {}

/// A launch that did not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaunchError {
    /// The module has no kernel of this name.
    NoKernel(String),
    /// A size that the device does not support, or arguments that do not fit the kernel.
    Refused(String),
    /// A thread caused a fault.
    Failed(Box<Error>),
}

impl Display for LaunchError {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        match self {
            LaunchError::NoKernel(name) => write!(f, "no kernel {name}"),
            LaunchError::Refused(reason) => write!(f, "refused: {reason}"),
            LaunchError::Failed(error) => write!(f, "{error}"),
        }
    }
}

impl StdError for LaunchError {}
