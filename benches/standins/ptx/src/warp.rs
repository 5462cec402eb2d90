//! A warp: 32 lanes that execute one instruction at a time.
//!
//! If lanes branch differently, their paths are executed in turn. The path whose next instruction comes first
//! in the text is executed first, and paths that reach the same label merge.

use crate::access::{self, Lane, Local, Memory};
use crate::alu;
use crate::copies::{self, Copied, Copy};
use crate::error::{Fault, Space};
use crate::fragments;
use crate::lanes::{ALL, LANES, Registers, each, lanes};
use crate::matrix;
use crate::memory::{LOCAL_WINDOW, SHARED_WINDOW};
use crate::moved::{self, Undefined};
use crate::position::Position;
use crate::program::{Fragment, Instr, Kernel, Matrix, Op, Shuffle, Type, Vote};
use crate::warpgroup::pipeline::Pipeline;
use crate::warpgroup::product::{self, Issue};
use crate::watch;

/// The reason why a warp has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// It waits at the barrier with this number.
    Barrier(u32),
    End,
}

pub struct Warp {
    number: usize,
    registers: Registers,
    local: Vec<u8>,
    /// The next instruction.
    pub at: usize,
    /// Lanes that execute it.
    active: u32,
    /// Lanes that have not ended.
    pub live: u32,
    /// Lanes that are threads of the block.
    pub all: u32,
    /// Paths that wait for their turn: instruction and lanes.
    waiting: Vec<(usize, u32)>,
    copies: Vec<Copy>,
    /// Loaded values that are only moved.
    undefined: Undefined,
    /// Lanes that have written each watched register.
    written: Vec<u32>,
    /// Groups of copies that each lane has committed.
    groups: [u32; LANES],
    /// The warpgroup's products in progress, and the number of its threads in the block.
    products: Pipeline,
    warpgroup: u32,
    /// Number of instructions that lanes have executed, in all blocks.
    pub executed: u64,
}

impl Warp {
    /// Creates the warp with this number for blocks of `threads` threads.
    pub fn new(kernel: &Kernel, number: usize, threads: u32) -> Warp {
        let lanes = (threads - (number * LANES) as u32).min(LANES as u32);
        let mut registers = Registers::new(kernel.registers);
        kernel
            .constants32
            .iter()
            .for_each(|&(register, value)| registers.set_narrow(register, &[value; LANES], ALL));
        kernel
            .constants64
            .iter()
            .for_each(|&(register, value)| registers.set_wide(register, &[value; LANES], ALL));
        kernel.true_predicates.iter().for_each(|&register| registers.set_predicate(register, ALL, ALL));
        Warp {
            number,
            registers,
            local: vec![0; kernel.local_bytes as usize * LANES],
            at: 0,
            active: 0,
            live: 0,
            all: ALL >> (LANES as u32 - lanes),
            waiting: Vec::new(),
            copies: Vec::new(),
            undefined: Undefined::default(),
            written: vec![0; kernel.watches.registers],
            groups: [0; LANES],
            products: Pipeline::new(&kernel.product_uses),
            warpgroup: product::threads_of_group(number, threads),
            executed: 0,
        }
    }

    /// Begins a block.
    pub fn begin(&mut self, kernel: &Kernel, place: &Position) {
        (self.at, self.active, self.live) = (0, self.all, self.all);
        self.waiting.clear();
        self.copies.clear();
        self.groups = [0; LANES];
        self.written.fill(0);
        self.products.begin();
        for &(register, special) in &kernel.specials {
            let first = (self.number * LANES) as u32;
            let value = |lane| place.special(special, first, lane as u32);
            self.registers.set_narrow(register, &lanes(value), ALL);
        }
    }

    /// Returns the lowest lane that executes the next instruction.
    pub fn first_lane(&self) -> usize {
        self.active.trailing_zeros() as usize
    }

    /// Continues after a barrier.
    pub fn release(&mut self) {
        self.at += 1;
    }

    /// Runs to a barrier or to the end. On an error, `at` is the instruction that caused it.
    pub fn run(&mut self, kernel: &Kernel, memory: &mut Memory<'_>) -> Lane<Stop> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: this processor supports the instructions.
            return unsafe { self.run_with_vectors(kernel, memory) };
        }
        self.go(kernel, memory)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx,avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn run_with_vectors(&mut self, kernel: &Kernel, memory: &mut Memory<'_>) -> Lane<Stop> {
        self.go(kernel, memory)
    }

    #[inline(always)]
    fn go(&mut self, kernel: &Kernel, memory: &mut Memory<'_>) -> Lane<Stop> {
        loop {
            let instr = &kernel.code[self.at];
            let mut mask = self.active;
            if let Some((predicate, inverted)) = instr.guard {
                let predicate = self.registers.predicate(predicate);
                mask &= if inverted { !predicate } else { predicate };
            }
            let o = &kernel.operands[instr.first as usize..][..usize::from(instr.operands)];
            if instr.watched {
                self.watch(kernel, instr, o, mask, memory.books.is_some())?;
            }
            if mask == 0 {
                self.at += 1;
                continue;
            }
            if instr.op == Op::Label {
                if !self.waiting.is_empty() {
                    self.meet();
                }
                self.at += 1;
                continue;
            }
            self.executed += u64::from(mask.count_ones());
            if alu::execute(&mut self.registers, instr.op, o, mask) {
                self.at += 1;
                continue;
            }
            match instr.op {
                Op::Branch(target) => self.branch(target as usize, mask),
                Op::Mma { k, kind } => {
                    self.whole(mask)?;
                    matrix::mma(&mut self.registers, k, kind, o);
                    self.at += 1;
                }
                Op::WmmaMma { k, kind } => {
                    self.whole(mask)?;
                    matrix::wmma(&mut self.registers, k, kind, o);
                    self.at += 1;
                }
                Op::Return => {
                    if memory.books.is_some() {
                        self.products.end().map_err(|fault| (self.first_lane(), Box::new(fault)))?;
                    }
                    self.live &= !mask;
                    self.active &= !mask;
                    if self.active != 0 {
                        self.at += 1;
                    } else if !self.next_path() {
                        return Ok(Stop::End);
                    }
                }
                Op::Barrier => {
                    let (active, expected) = (mask, self.live);
                    if active != expected {
                        return self.divergent(active, expected);
                    }
                    return Ok(Stop::Barrier(self.registers.narrow(o[0])[self.first_lane()]));
                }
                _ => {
                    self.other(kernel, instr, o, mask, memory)?;
                    self.at += 1;
                }
            }
        }
    }

    /// Checks the registers of a watched instruction.
    #[inline(never)]
    fn watch(&mut self, kernel: &Kernel, instr: &Instr, o: &[u16], mask: u32, checked: bool) -> Lane<()> {
        let adding = match o.last() {
            Some(&adds) if instr.op.adds_to_results() => mask & self.registers.predicate(adds),
            _ => 0,
        };
        watch::check(&kernel.watches, self.at, [self.active, mask, adding], &mut self.written)?;
        match kernel.product_uses.of(self.at) {
            Some(uses) if checked && mask != 0 && !instr.op.adds_to_results() => {
                let used = self.products.used(uses, instr.line);
                used.map_err(|fault| (mask.trailing_zeros() as usize, Box::new(fault)))
            }
            _ => Ok(()),
        }
    }

    fn divergent<T>(&self, active: u32, expected: u32) -> Lane<T> {
        Err((active.trailing_zeros() as usize % LANES, Box::new(Fault::Divergent { active, expected })))
    }

    /// Fails unless all lanes execute an instruction that requires this.
    fn whole(&self, mask: u32) -> Lane<()> {
        if mask == ALL { Ok(()) } else { self.divergent(mask, ALL) }
    }

    fn branch(&mut self, target: usize, taken: u32) {
        let stays = self.active & !taken;
        if stays == 0 {
            self.at = target;
        } else if self.at + 1 < target {
            self.waiting.push((target, taken));
            self.active = stays;
            self.at += 1;
        } else {
            self.waiting.push((self.at + 1, stays));
            self.active = taken;
            self.at = target;
        }
    }

    /// At a label, merges paths that wait there, and switches to a path with an earlier next instruction.
    fn meet(&mut self) {
        let lowest = self.waiting.iter().map(|(at, _)| *at).min().unwrap_or(usize::MAX);
        if lowest < self.at {
            self.waiting.push((self.at, self.active));
            self.active = 0;
            self.at = lowest;
        }
        let at = self.at;
        let active = &mut self.active;
        self.waiting.retain(|&(waits, lanes)| {
            if waits == at {
                *active |= lanes;
            }
            waits != at
        });
    }

    /// Switches to the path with the earliest next instruction. Returns `false` if there is none.
    fn next_path(&mut self) -> bool {
        self.at = usize::MAX;
        self.meet();
        self.active != 0
    }

    /// Executes accesses to memory and instructions across lanes.
    #[inline(never)]
    fn other(
        &mut self,
        kernel: &Kernel,
        instr: &Instr,
        o: &[u16],
        mask: u32,
        memory: &mut Memory<'_>,
    ) -> Lane<()> {
        let mut local = Local { warp: self.number, line: instr.line, bytes: &mut self.local };
        let r = &mut self.registers;
        match instr.op {
            Op::Load(access) => access::load(memory, &mut local, r, &access, o, mask),
            Op::Store(access) => access::store(memory, &mut local, r, &access, o, mask),
            Op::LoadMoved(access) => {
                moved::load(memory, &mut local, r, &mut self.undefined, &access, o, mask)
            }
            Op::SelectMoved(loaded) => {
                moved::select(&self.undefined, r, loaded, o, mask)?;
                alu::execute(r, Op::Select32, o, mask);
                Ok(())
            }
            Op::StoreMoved(access) => moved::store(memory, &mut local, r, &self.undefined, &access, o, mask),
            Op::Atomic { op, access } => access::atomic(memory, &mut local, r, op, &access, o, mask),
            Op::ToGeneric(space) | Op::FromGeneric(space) => {
                let window = match space {
                    Space::Shared => SHARED_WINDOW,
                    Space::Local => LOCAL_WINDOW,
                    _ => 0,
                };
                let from = *r.wide(o[1]);
                let back = matches!(instr.op, Op::FromGeneric(_));
                let to = from.map(|a| if back { a.wrapping_sub(window) } else { a.wrapping_add(window) });
                r.set_wide(o[0], &to, mask);
                Ok(())
            }
            Op::CopyAsync { bytes, target, source, wide_target } => {
                let copied = Copied { bytes, target, source, wide_target };
                for lane in each(mask) {
                    let group = self.groups[lane];
                    self.copies.push(copies::begin_copy(memory, &mut local, r, &copied, o, lane, group)?);
                }
                Ok(())
            }
            Op::CopyCommit => {
                each(mask).for_each(|lane| self.groups[lane] += 1);
                Ok(())
            }
            Op::CopyWait { left, uncommitted } => {
                let groups = &self.groups;
                self.copies.retain(|copy| {
                    let lane = usize::from(copy.lane);
                    let over = uncommitted || copy.group + left < groups[lane];
                    let ends = mask >> lane & 1 == 1 && over;
                    if ends {
                        copies::end_copy(memory, copy);
                    }
                    !ends
                });
                Ok(())
            }
            Op::LoadMatrix { transposed, access } => {
                self.whole(mask)?;
                let mut local = Local { warp: self.number, line: instr.line, bytes: &mut self.local };
                fragments::load_matrix(memory, &mut local, &mut self.registers, transposed, &access, o)
            }
            Op::WmmaLoad(fragment, access) => {
                self.whole(mask)?;
                let mut local = Local { warp: self.number, line: instr.line, bytes: &mut self.local };
                fragments::wmma_load(memory, &mut local, &mut self.registers, &fragment, &access, o)
            }
            Op::WmmaStore(access, row_major) => {
                self.whole(mask)?;
                let mut local = Local { warp: self.number, line: instr.line, bytes: &mut self.local };
                let fragment = Fragment { matrix: Matrix::Accumulator, k: 0, ty: Type::F32, row_major };
                fragments::wmma_store(memory, &mut local, &self.registers, &fragment, &access, o)
            }
            Op::Warpgroup(op) => {
                self.whole(mask)?;
                let (warp, line, bytes) = (self.number, instr.line, &mut self.local);
                let local = &mut Local { warp, line, bytes };
                let issue =
                    Issue { at: self.at, uses: kernel.product_uses.of(self.at), threads: self.warpgroup };
                product::execute(memory, local, &mut self.registers, &mut self.products, (op, issue), o)
            }
            Op::ProxyFence => {
                if let Some(books) = &mut memory.books {
                    books.fence_products(each(mask).map(|lane| local.who(lane).thread));
                }
                Ok(())
            }
            Op::WarpBarrier => {
                self.together(o[0], mask)?;
                if let Some(books) = &mut memory.books {
                    books.warp_barrier(self.number);
                }
                Ok(())
            }
            Op::ActiveMask => {
                r.set_narrow(o[0], &[mask; LANES], mask);
                Ok(())
            }
            Op::Vote(vote) => {
                let members = self.together(o[2], mask)?;
                let yes = self.registers.predicate(o[1]) & members;
                let r = &mut self.registers;
                let says = match vote {
                    Vote::All => yes == members,
                    Vote::Any => yes != 0,
                    Vote::Uniform => yes == members || yes == 0,
                    Vote::Ballot => {
                        r.set_narrow(o[0], &[yes; LANES], mask);
                        return Ok(());
                    }
                };
                r.set_predicate(o[0], if says { ALL } else { 0 }, mask);
                Ok(())
            }
            Op::Shuffle(shuffle) => {
                let members = self.together(o[5], mask)?;
                self.shuffle(shuffle, o, members, mask)
            }
            _ => Err((self.first_lane() % LANES, Box::new(Fault::Trap))),
        }
    }

    /// Returns the lanes in a mask, all of which must be active.
    fn together(&self, register: u16, mask: u32) -> Lane<u32> {
        let masks = self.registers.narrow(register);
        let members = masks[mask.trailing_zeros() as usize % LANES];
        let same = each(mask).all(|lane| masks[lane] == members);
        // Lanes that have ended or do not exist in the block are not expected.
        let expected = members & self.live;
        if same && mask & !members == 0 && expected == mask {
            Ok(expected)
        } else {
            self.divergent(mask, expected)
        }
    }

    fn shuffle(&mut self, shuffle: Shuffle, o: &[u16], members: u32, mask: u32) -> Lane<()> {
        let r = &mut self.registers;
        let (from, by, limits) = (*r.narrow(o[2]), *r.narrow(o[3]), *r.narrow(o[4]));
        let (mut values, mut there) = (from, 0);
        for lane in each(mask) {
            let number = lane as i32;
            let (by, limit, segment) =
                ((by[lane] & 31) as i32, (limits[lane] & 31) as i32, (limits[lane] >> 8 & 31) as i32);
            let (lowest, highest) = (number & segment, number & segment | limit & !segment);
            let (source, inside) = match shuffle {
                Shuffle::Up => (number - by, number - by >= highest),
                Shuffle::Down => (number + by, number + by <= highest),
                Shuffle::Butterfly => (number ^ by, (number ^ by) <= highest),
                Shuffle::Index => (lowest | by & !segment, (lowest | by & !segment) <= highest),
            };
            if inside {
                if members >> source & 1 == 0 {
                    return Err((lane, Box::new(Fault::InactiveLane { lane: source as u32 })));
                }
                values[lane] = from[source as usize];
                there |= 1 << lane;
            }
        }
        r.set_narrow(o[0], &values, mask);
        r.set_predicate(o[1], there, mask);
        Ok(())
    }
}
