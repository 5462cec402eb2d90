//! Executes `cp.async`: the bytes are stored when the thread waits for the copy. A GPU may store them at any
//! earlier time.

use crate::access::{Lane, Local, Memory, Span, address, inside};
use crate::error::{Fault, Space};
use crate::lanes::Registers;

/// A pending copy to shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    pub lane: u8,
    pub group: u32,
    target: u32,
    bytes: u8,
    value: u128,
}

/// Source and target of a `cp.async`, and the widths of the registers with their addresses.
pub struct Copied {
    pub bytes: u8,
    pub target: i32,
    pub source: i32,
    pub wide_target: bool,
}

pub fn begin_copy(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &Registers,
    copied: &Copied,
    o: &[u16],
    lane: usize,
    group: u32,
) -> Lane<Copy> {
    let bytes = u32::from(copied.bytes);
    let to = address(r, o[0], copied.target, copied.wide_target, lane);
    let from = address(r, o[1], copied.source, true, lane);
    let wanted = o.get(2).map_or(bytes, |&register| r.narrow(register)[lane]).min(bytes);
    let fail = |fault| (lane, Box::new(fault));
    let target = inside(Space::Shared, memory.shared.len(), to, bytes).map_err(fail)? as u32;
    let mut value = 0;
    if wanted > 0 && from & u64::from(bytes - 1) != 0 {
        return Err(fail(Fault::Misaligned { space: Space::Global, address: from, bytes }));
    }
    // A shorter source may have any length.
    let step = if wanted == bytes { bytes } else { 1 };
    for at in (0..wanted).step_by(step as usize) {
        let span =
            Span { space: Space::Global, address: from + u64::from(at), bytes: step, part: step.min(8) };
        value |= memory.read(local, lane, span).map_err(fail)? << (8 * at);
    }
    if let Some(books) = &mut memory.books {
        books.begin_copy(target, bytes, local.who(lane)).map_err(fail)?;
    }
    Ok(Copy { lane: lane as u8, group, target, bytes: copied.bytes, value })
}

/// Stores the bytes of a copy.
pub fn end_copy(memory: &mut Memory<'_>, copy: &Copy) {
    let bytes = usize::from(copy.bytes);
    memory.shared[copy.target as usize..][..bytes].copy_from_slice(&copy.value.to_le_bytes()[..bytes]);
    if let Some(books) = &mut memory.books {
        books.end_copy(copy.target, u32::from(copy.bytes));
    }
}
