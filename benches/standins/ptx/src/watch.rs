//! Registers that a kernel may read before it has written them. Few kernels have any, and only these kernels
//! are checked.

use crate::access::Lane;
use crate::builder::Virtual;
use crate::error::Fault;
use crate::lanes::each;
use crate::layout;
use crate::program::{Watch, Watches};

/// Finds such registers of `kernel`, and marks the instructions that use them.
pub fn find(kernel: &mut Virtual) -> Watches {
    let watched = layout::unwritten(kernel);
    let mut watches = Watches { registers: watched.len(), all: Vec::new() };
    if watched.is_empty() {
        return watches;
    }
    let number = |register: &u32| watched.binary_search(register).ok().map(|number| number as u16);
    for (at, instr) in kernel.code.iter_mut().enumerate() {
        let all = &kernel.operands[instr.first as usize..][..usize::from(instr.operands)];
        let (results, operands) = all.split_at(usize::from(instr.results));
        let reads: Vec<u16> = operands.iter().filter_map(number).collect();
        let guard = kernel.guards[at].as_ref().and_then(number);
        let writes: Vec<u16> = results.iter().filter_map(number).collect();
        let sums = if instr.op.adds_to_results() { writes.clone() } else { Vec::new() };
        instr.watched = guard.is_some() || !(reads.is_empty() && writes.is_empty());
        if instr.watched {
            watches.all.push(Watch { at, guard, reads, sums, writes });
        }
    }
    watches
}

/// Fails if a lane in `here` reads a guard that it has not written, if a lane in `mask` reads such an
/// operand, or if a lane in `adding` adds to such a result. Records in `written`, which has lanes by
/// register, the registers that are written.
pub fn check(watches: &Watches, at: usize, [here, mask, adding]: [u32; 3], written: &mut [u32]) -> Lane<()> {
    let Ok(found) = watches.all.binary_search_by_key(&at, |watch| watch.at) else { return Ok(()) };
    let Watch { guard, reads, sums, writes, .. } = &watches.all[found];
    let guards = guard.iter().map(|guard| (guard, here));
    let operands = reads.iter().map(|read| (read, mask)).chain(sums.iter().map(|sum| (sum, adding)));
    for (&register, lanes) in guards.chain(operands) {
        if let Some(lane) = each(lanes & !written[usize::from(register)]).next() {
            return Err((lane, Box::new(Fault::Unset)));
        }
    }
    writes.iter().for_each(|&register| written[usize::from(register)] |= mask);
    Ok(())
}
