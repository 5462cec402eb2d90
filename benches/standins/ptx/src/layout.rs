//! Assigns the many registers of the text to few places: two registers share a place if their values are not
//! needed at the same time.

use crate::builder::{Origin, Virtual};
use crate::parse::Width;
use crate::program::{Instr, Op, Special};

/// A kernel with its registers assigned to places.
pub struct Placed {
    pub code: Vec<Instr>,
    pub operands: Vec<u16>,
    /// Numbers of places with 32 bits, with 64 bits, and for predicates.
    pub registers: [usize; 3],
    pub constants32: Vec<(u16, u32)>,
    pub constants64: Vec<(u16, u64)>,
    pub true_predicates: Vec<u16>,
    pub specials: Vec<(u16, Special)>,
}

/// A set of registers.
#[derive(Clone, PartialEq)]
struct Set(Vec<u64>);

impl Set {
    fn new(len: usize) -> Set {
        Set(vec![0; len.div_ceil(64)])
    }

    fn insert(&mut self, register: u32) {
        self.0[register as usize / 64] |= 1 << (register % 64);
    }

    fn remove(&mut self, register: u32) {
        self.0[register as usize / 64] &= !(1 << (register % 64));
    }

    fn add(&mut self, other: &Set) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }

    fn each(&self, mut action: impl FnMut(usize)) {
        for (word, &bits) in self.0.iter().enumerate() {
            let mut bits = bits;
            while bits != 0 {
                action(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }
}

/// A sequence of instructions that are executed together, and its successors.
struct Block {
    start: usize,
    end: usize,
    next: Vec<usize>,
}

fn blocks(code: &[Instr]) -> Vec<Block> {
    let mut starts = vec![0];
    for (at, instr) in code.iter().enumerate() {
        match instr.op {
            Op::Label => starts.push(at),
            Op::Branch(_) | Op::Return | Op::Trap => starts.push(at + 1),
            _ => {}
        }
    }
    starts.sort_unstable();
    starts.dedup();
    starts.retain(|&start| start < code.len());
    let ends = starts.iter().skip(1).copied().chain([code.len()]);
    let block_at = |at: usize| starts.partition_point(|&start| start <= at) - 1;
    starts
        .iter()
        .zip(ends)
        .map(|(&start, end)| {
            let last = &code[end - 1];
            let falls = last.guard.is_some() || !matches!(last.op, Op::Branch(_) | Op::Return | Op::Trap);
            let mut next = Vec::new();
            if falls && end < code.len() {
                next.push(block_at(end));
            }
            if let Op::Branch(target) = last.op {
                next.push(block_at(target as usize));
            }
            Block { start, end, next }
        })
        .collect()
}

/// Visits the registers that an instruction reads: its operands, its guard, and results that it may keep or
/// adds to.
fn reads(kernel: &Virtual, at: usize, mut action: impl FnMut(u32)) {
    let instr = &kernel.code[at];
    let all = &kernel.operands[instr.first as usize..][..usize::from(instr.operands)];
    let keeps = kernel.guards[at].is_some() || instr.op.adds_to_results();
    let from = if keeps { 0 } else { usize::from(instr.results) };
    all[from..].iter().copied().chain(kernel.guards[at]).for_each(&mut action);
}

fn writes(kernel: &Virtual, at: usize) -> &[u32] {
    let instr = &kernel.code[at];
    &kernel.operands[instr.first as usize..][..usize::from(instr.results)]
}

/// Returns the registers that are live at the start of each block.
fn needed(kernel: &Virtual, blocks: &[Block]) -> Vec<Set> {
    let len = kernel.registers.len();
    let mut live_in = vec![Set::new(len); blocks.len()];
    loop {
        let mut changed = false;
        for (number, block) in blocks.iter().enumerate().rev() {
            let mut set = needed_behind(kernel, &live_in, block);
            for at in (block.start..block.end).rev() {
                writes(kernel, at).iter().for_each(|&register| set.remove(register));
                reads(kernel, at, |register| set.insert(register));
            }
            changed |= set != live_in[number];
            live_in[number] = set;
        }
        if !changed {
            return live_in;
        }
    }
}

/// Returns the registers that are live at the end of a block.
fn needed_behind(kernel: &Virtual, live_in: &[Set], block: &Block) -> Set {
    let mut set = Set::new(kernel.registers.len());
    block.next.iter().for_each(|&next| set.add(&live_in[next]));
    set
}

/// Returns the registers that may be read before an instruction writes them.
pub fn unwritten(kernel: &Virtual) -> Vec<u32> {
    let blocks = blocks(&kernel.code);
    let mut found = Vec::new();
    needed(kernel, &blocks)[0].each(|register| {
        if kernel.registers[register].1 == Origin::Instructions {
            found.push(register as u32);
        }
    });
    found
}

/// Returns the first and the last instruction at which each register is live.
fn intervals(kernel: &Virtual) -> Vec<Option<(usize, usize)>> {
    let blocks = blocks(&kernel.code);
    let len = kernel.registers.len();
    let live_in = needed(kernel, &blocks);
    let mut intervals: Vec<Option<(usize, usize)>> = vec![None; len];
    let mut extend = |register: usize, at: usize| {
        let (first, last) = intervals[register].unwrap_or((at, at));
        intervals[register] = Some((first.min(at), last.max(at)));
    };
    for (number, block) in blocks.iter().enumerate() {
        live_in[number].each(|register| extend(register, block.start));
        needed_behind(kernel, &live_in, block).each(|register| extend(register, block.end));
        for at in block.start..block.end {
            reads(kernel, at, |register| extend(register as usize, at));
            writes(kernel, at).iter().for_each(|&register| extend(register as usize, at));
        }
    }
    intervals
}

/// The free places of one width, and the total number.
#[derive(Default)]
struct Places {
    free: Vec<u16>,
    count: usize,
}

impl Places {
    fn take(&mut self) -> u16 {
        self.free.pop().unwrap_or_else(|| {
            self.count += 1;
            (self.count - 1) as u16
        })
    }
}

/// Assigns every register to a place.
pub fn allocate(kernel: Virtual) -> Placed {
    let intervals = intervals(&kernel);
    let file = |register: usize| match kernel.registers[register].0 {
        Width::Bits16 | Width::Bits32 => 0,
        Width::Bits64 => 1,
        Width::Predicate => 2,
    };
    let mut places = [Places::default(), Places::default(), Places::default()];
    let mut place = vec![0; kernel.registers.len()];
    let (mut constants32, mut constants64) = (Vec::new(), Vec::new());
    let (mut true_predicates, mut specials) = (Vec::new(), Vec::new());
    let mut order = Vec::new();
    for (register, &(_, origin)) in kernel.registers.iter().enumerate() {
        let Some((first, last)) = intervals[register] else { continue };
        if origin == Origin::Instructions {
            order.push((first, last, register));
            continue;
        }
        // Initial values of a kernel keep their places.
        place[register] = places[file(register)].take();
        match origin {
            Origin::Constant(value) if file(register) == 0 => {
                constants32.push((place[register], value as u32))
            }
            Origin::Constant(value) if file(register) == 2 => {
                if value != 0 {
                    true_predicates.push(place[register]);
                }
            }
            Origin::Constant(value) => constants64.push((place[register], value)),
            Origin::Special(special) => specials.push((place[register], special)),
            Origin::Instructions => {}
        }
    }
    order.sort_unstable();
    let mut active: Vec<(usize, usize)> = Vec::new();
    for (first, last, register) in order {
        active.retain(|&(end, other)| {
            // Results and operands of the same instruction have different places.
            let over = end < first;
            if over {
                places[file(other)].free.push(place[other]);
            }
            !over
        });
        place[register] = places[file(register)].take();
        active.push((last, register));
    }
    let mut code = kernel.code;
    for (instr, guard) in code.iter_mut().zip(&kernel.guards) {
        instr.guard =
            instr.guard.zip(*guard).map(|((_, inverted), register)| (place[register as usize], inverted));
    }
    Placed {
        code,
        operands: kernel.operands.iter().map(|&register| place[register as usize]).collect(),
        registers: places.map(|places| places.count),
        constants32,
        constants64,
        true_predicates,
        specials,
    }
}
