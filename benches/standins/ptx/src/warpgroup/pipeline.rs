//! The products that a warp has issued and not waited for, and the registers that they use meanwhile.
//!
//! From PTX's manual (`wgmma.fence`, `wgmma.wait_group`): a product reads its registers of A and changes
//! those of D until a wait for its group has ended. A fence is required between other uses of these registers
//! and the product, unless the other use is a product on the same D with as many columns. A fence is also
//! required before the first product.
//!
//! Uses are those of the registers named in the text. A `mov` between two of them does not count: compilers
//! insert such copies anywhere, and the assembler removes them. The copy then has the state of its original:
//! unfenced, or in use by a product. A `mov` of a constant counts as a write of D if the product adds to it.

use crate::builder::{Origin, Virtual};
use crate::error::Fault;
use crate::program::Op;
use crate::wgmma::form::{ProductUse, ProductUses, WarpgroupOp, WarpgroupProduct};

/// Finds the registers of products in `kernel` and their copies, and marks the instructions that use them.
pub fn find(kernel: &mut Virtual) -> ProductUses {
    let mut tracked = vec![false; kernel.registers.len()];
    let all = |at: usize| {
        let instr = &kernel.code[at];
        let all = &kernel.operands[instr.first as usize..][..usize::from(instr.operands)];
        all.split_at(usize::from(instr.results))
    };
    for at in 0..kernel.code.len() {
        if let Op::Warpgroup(WarpgroupOp::Product(form)) = kernel.code[at].op {
            let (d, sources) = all(at);
            let a = if form.a_in_registers { &sources[..4] } else { &[] };
            d.iter().chain(a).for_each(|&register| tracked[register as usize] = true);
        }
    }
    if !tracked.contains(&true) {
        return ProductUses::default();
    }
    let moves: Vec<(u32, u32)> = (0..kernel.code.len())
        .filter(|&at| kernel.code[at].op == Op::Move32)
        .map(|at| (all(at).0[0], all(at).1[0]))
        .filter(|&(_, from)| kernel.registers[from as usize].1 == Origin::Instructions)
        .collect();
    loop {
        let mut found = false;
        for [to, from] in moves.iter().map(|&(to, from)| [to, from].map(|register| register as usize)) {
            found |= tracked[to] != tracked[from];
            (tracked[to], tracked[from]) = (tracked[to] || tracked[from], tracked[to] || tracked[from]);
        }
        if !found {
            break;
        }
    }
    let mut registers = 0;
    let mut number = || {
        registers += 1;
        registers - 1
    };
    let numbers: Vec<Option<u16>> = tracked.iter().map(|&is| is.then(&mut number)).collect();
    let numbered = |all: &[u32]| all.iter().filter_map(|&register| numbers[register as usize]).collect();
    let mut uses =
        ProductUses { registers: usize::from(registers), at: vec![0; kernel.code.len()], all: Vec::new() };
    for at in 0..kernel.code.len() {
        let (results, operands) = all(at);
        let (reads, writes): (Vec<u16>, Vec<u16>) = (numbered(operands), numbered(results));
        if !(reads.is_empty() && writes.is_empty()) {
            uses.all.push(ProductUse { reads, writes, is_move: kernel.code[at].op == Op::Move32 });
            uses.at[at] = uses.all.len() as u32;
        }
    }
    for (instr, &found) in kernel.code.iter_mut().zip(&uses.at) {
        instr.watched |= found > 0;
    }
    uses
}

/// A use of a register: the number of fences before it, and its line.
#[derive(Debug, Clone, Copy, Default)]
struct Touch {
    /// Number of fences so far plus 1; 0 if there was no use.
    fences: u32,
    line: u32,
}

/// A product that uses a register.
#[derive(Debug, Clone, Copy)]
struct Owner {
    group: u32,
    line: u32,
    /// Columns of D; 0 for A.
    columns: u16,
}

#[derive(Debug, Clone, Copy, Default)]
struct Register {
    owner: Option<Owner>,
    read: Touch,
    written: Touch,
    /// Written by a `mov` of a constant.
    constant: bool,
}

/// The products that a warp has issued.
#[derive(Debug)]
pub struct Pipeline {
    registers: Vec<Register>,
    fences: u32,
    /// Number of committed groups, and number of those that are done.
    committed: u32,
    done: u32,
    /// Group and line of each product in progress.
    issued: Vec<(u32, u32)>,
}

impl Pipeline {
    pub fn new(uses: &ProductUses) -> Pipeline {
        let registers = vec![Register::default(); uses.registers];
        Pipeline { registers, fences: 0, committed: 0, done: 0, issued: Vec::new() }
    }

    /// Begins a block.
    pub fn begin(&mut self) {
        self.registers.fill(Register::default());
        self.issued.clear();
        (self.fences, self.committed, self.done) = (0, 0, 0);
    }

    /// Returns the group of products that is not committed yet.
    pub fn group(&self) -> u32 {
        self.committed
    }

    pub fn fence(&mut self) {
        self.fences += 1;
    }

    pub fn commit(&mut self) {
        self.committed += 1;
    }

    /// Waits for all groups except the latest `left`. Returns the number of groups that are done.
    pub fn wait(&mut self, left: u32) -> Result<u32, Fault> {
        if let (0, Some(&(_, line))) = (left, self.issued.iter().find(|(group, _)| *group == self.committed))
        {
            return Err(Fault::Uncommitted { line });
        }
        self.done = self.done.max(self.committed.saturating_sub(left));
        let done = self.done;
        self.issued.retain(|(group, _)| *group >= done);
        Ok(done)
    }

    /// Fails if a product is still in progress at the end of the warp.
    pub fn end(&self) -> Result<(), Fault> {
        match self.issued.first() {
            Some(&(_, line)) => Err(Fault::Unwaited { line }),
            None => Ok(()),
        }
    }

    /// Returns the product that uses a register.
    fn owner(&self, register: u16) -> Option<Owner> {
        self.registers[usize::from(register)].owner.filter(|owner| owner.group >= self.done)
    }

    fn touch(&self, line: u32) -> Touch {
        Touch { fences: self.fences + 1, line }
    }

    /// Records that an instruction other than a product uses registers.
    pub fn used(&mut self, uses: &ProductUse, line: u32) -> Result<(), Fault> {
        for &register in &uses.writes {
            if let Some(owner) = self.owner(register) {
                return Err(Fault::InFlight { line: owner.line });
            }
        }
        let touch = self.touch(line);
        if let (true, [to, ..]) = (uses.is_move, &uses.writes[..]) {
            let copy = match uses.reads[..] {
                [from, ..] => self.registers[usize::from(from)],
                [] => Register { written: touch, constant: true, ..Register::default() },
            };
            // The previous value was read nevertheless.
            let to = &mut self.registers[usize::from(*to)];
            let read = if to.read.fences > copy.read.fences { to.read } else { copy.read };
            *to = Register { read, ..copy };
            return Ok(());
        }
        for &register in &uses.reads {
            if let Some(owner) = self.owner(register).filter(|owner| owner.columns > 0) {
                return Err(Fault::InFlight { line: owner.line });
            }
            self.registers[usize::from(register)].read = touch;
        }
        for &register in &uses.writes {
            let there = &mut self.registers[usize::from(register)];
            *there = Register { written: touch, read: there.read, ..Register::default() };
        }
        Ok(())
    }

    /// Records that a product uses registers.
    pub fn product(
        &mut self,
        uses: &ProductUse,
        form: &WarpgroupProduct,
        adds: bool,
        line: u32,
    ) -> Result<(), Fault> {
        if self.fences == 0 {
            return Err(Fault::Unfenced { line: 0 });
        }
        let since = |touch: Touch| touch.fences == self.fences + 1;
        for &register in &uses.writes {
            if let Some(owner) = self.owner(register).filter(|owner| owner.columns != form.columns) {
                return Err(Fault::InFlight { line: owner.line });
            }
            let Register { read, written, constant, .. } = self.registers[usize::from(register)];
            if since(read) {
                return Err(Fault::Unfenced { line: read.line });
            }
            if since(written) && (adds || !constant) {
                return Err(Fault::Unfenced { line: written.line });
            }
        }
        for &register in &uses.reads {
            if let Some(owner) = self.owner(register).filter(|owner| owner.columns > 0) {
                return Err(Fault::InFlight { line: owner.line });
            }
            let written = self.registers[usize::from(register)].written;
            if since(written) {
                return Err(Fault::Unfenced { line: written.line });
            }
        }
        let owner = |columns| Some(Owner { group: self.committed, line, columns });
        let (of_d, of_a) = (owner(form.columns), owner(0));
        for &register in &uses.writes {
            self.registers[usize::from(register)] = Register { owner: of_d, ..Register::default() };
        }
        for &register in &uses.reads {
            self.registers[usize::from(register)].owner = of_a;
        }
        self.issued.push((self.committed, line));
        Ok(())
    }
}
