//! Registers that a kernel may read before it has written them: few have any, and only there it is looked whether
//! it does.

use crate::access::Lane;
use crate::builder::Virtual;
use crate::error::Fault;
use crate::lanes::each;
use crate::layout;

/// What an instruction does with watched registers, which are counted from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Watch {
    at: usize,
    guard: Option<u16>,
    reads: Vec<u16>,
    writes: Vec<u16>,
}

/// The instructions of a kernel that read or write watched registers, in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Watches {
    pub registers: usize,
    all: Vec<Watch>,
}

impl Watches {
    /// Finds the registers of `kernel`, and marks the instructions that use them.
    pub fn of(kernel: &mut Virtual) -> Watches {
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
            instr.watched = guard.is_some() || !(reads.is_empty() && writes.is_empty());
            if instr.watched {
                watches.all.push(Watch { at, guard, reads, writes });
            }
        }
        watches
    }

    /// Fails if one of the lanes that are here reads a guard that it has not written, or one of those that execute
    /// the instruction an operand; keeps in `written`, lanes by register, what they write.
    pub fn executed(&self, at: usize, [here, mask]: [u32; 2], written: &mut [u32]) -> Lane<()> {
        let Ok(found) = self.all.binary_search_by_key(&at, |watch| watch.at) else { return Ok(()) };
        let Watch { guard, reads, writes, .. } = &self.all[found];
        let all = guard.iter().map(|guard| (guard, here)).chain(reads.iter().map(|read| (read, mask)));
        for (&register, lanes) in all {
            if let Some(lane) = each(lanes & !written[usize::from(register)]).next() {
                return Err((lane, Box::new(Fault::Unset)));
            }
        }
        writes.iter().for_each(|&register| written[usize::from(register)] |= mask);
        Ok(())
    }
}
