//! Values that a kernel only moves from one place of device memory to another: they may be some that nothing has
//! written, as with `cuMemcpy`, and then nothing has written the copy either.
//!
//! burn copies outputs before anything has written them, to measure kernels on the copies.

use crate::access::{self, Lane, Local, Memory, address};
use crate::builder::Virtual;
use crate::error::{Fault, Space};
use crate::lanes::{LANES, Registers, each};
use crate::program::{Access, Op};

/// For registers that were loaded, which bytes of each lane nothing has written.
#[derive(Debug, Default)]
pub struct Undefined(Vec<(u16, [u8; LANES])>);

impl Undefined {
    fn of(&self, register: u16, lane: usize) -> u8 {
        let found = self.0.iter().find(|(other, _)| *other == register);
        found.map_or(0, |(_, lanes)| lanes[lane])
    }

    fn set(&mut self, register: u16, mask: u32, bytes: &[u8; LANES]) {
        let place = self.0.iter().position(|(other, _)| *other == register).unwrap_or_else(|| {
            self.0.push((register, [0; LANES]));
            self.0.len() - 1
        });
        each(mask).for_each(|lane| self.0[place].1[lane] = bytes[lane]);
    }
}

/// Finds loads whose values do nothing but get into stores, and these stores; both of device memory.
pub fn mark(kernel: &mut Virtual) {
    let len = kernel.registers.len();
    let mut writers: Vec<Vec<usize>> = vec![Vec::new(); len];
    let mut readers: Vec<Vec<(usize, bool)>> = vec![Vec::new(); len];
    for (at, instr) in kernel.code.iter().enumerate() {
        let all = &kernel.operands[instr.first as usize..][..usize::from(instr.operands)];
        let (results, operands) = all.split_at(usize::from(instr.results));
        results.iter().for_each(|&register| writers[register as usize].push(at));
        for (position, &register) in operands.iter().enumerate() {
            // The address is the first one.
            let is_value = matches!(instr.op, Op::Store(_)) && position > 0;
            readers[register as usize].push((at, is_value));
        }
        if let Some(guard) = kernel.guards[at] {
            readers[guard as usize].push((at, false));
        }
    }
    let mut moves: Vec<bool> = (0..kernel.code.len())
        .map(|at| match kernel.code[at].op {
            Op::Load(access) | Op::Store(access) => {
                access.space == Space::Global && kernel.guards[at].is_none()
            }
            _ => false,
        })
        .collect();
    loop {
        let stays = |at: usize| {
            let instr = &kernel.code[at];
            let all = &kernel.operands[instr.first as usize..][..usize::from(instr.operands)];
            let (results, operands) = all.split_at(usize::from(instr.results));
            if results.is_empty() {
                let comes_from_load = |&register: &u32| matches!(writers[register as usize][..], [from] if moves[from] && from != at);
                return operands.iter().skip(1).all(comes_from_load);
            }
            results.iter().all(|&register| {
                let register = register as usize;
                let gets_into_store = |&(to, is_value): &(usize, bool)| is_value && moves[to];
                writers[register].len() == 1
                    && !readers[register].is_empty()
                    && readers[register].iter().all(gets_into_store)
            })
        };
        let Some(at) = (0..moves.len()).find(|&at| moves[at] && !stays(at)) else { break };
        moves[at] = false;
    }
    for (instr, moves) in kernel.code.iter_mut().zip(moves) {
        instr.op = match instr.op {
            Op::Load(access) if moves => Op::LoadMoved(access),
            Op::Store(access) if moves => Op::StoreMoved(access),
            _ => continue,
        };
    }
}

/// As [`access::load`], also of what nothing has written, which is noted.
pub fn load(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &mut Registers,
    undefined: &mut Undefined,
    access: &Access,
    o: &[u16],
    mask: u32,
) -> Lane<()> {
    let (results, base) = o.split_at(usize::from(access.count));
    let part = access.ty.bits / 8;
    let bytes = part * u32::from(access.count);
    let mut missing = [[0; LANES]; 4];
    let mut defined = mask;
    for lane in each(mask) {
        let at = address(r, base[0], access.offset, access.wide, lane);
        let place =
            memory.view.reach(at, bytes, &mut memory.hint).map_err(|fault| (lane, Box::new(fault)))?;
        let unwritten = if memory.books.is_some() { place.unwritten() } else { 0 };
        if unwritten != 0 {
            defined &= !(1 << lane);
            for (n, missing) in missing.iter_mut().take(results.len()).enumerate() {
                missing[lane] = (unwritten >> (part * n as u32)) as u8 & (u8::MAX >> (8 - part));
            }
        }
    }
    if defined != mask || !undefined.0.is_empty() {
        results.iter().zip(&missing).for_each(|(&result, missing)| undefined.set(result, mask, missing));
    }
    if defined == mask {
        return access::load(memory, local, r, access, o, mask);
    }
    let mut values = [[0; LANES]; 4];
    for lane in each(mask) {
        let at = address(r, base[0], access.offset, access.wide, lane);
        let value = match memory.read(local, lane, access::Span::of(access, at)) {
            Err(Fault::Uninitialised { .. }) => {
                memory.view.reach(at, bytes, &mut memory.hint).map(|place| place.read(part))
            }
            other => other,
        };
        let value = value.map_err(|fault| (lane, Box::new(fault)))?;
        access::split(value, access.ty.bits, lane, &mut values[..results.len()]);
    }
    access::set(r, access, results, &values, mask);
    Ok(())
}

/// As [`access::store`]; nothing has written the bytes of which nothing had written the originals.
pub fn store(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &Registers,
    undefined: &Undefined,
    access: &Access,
    o: &[u16],
    mask: u32,
) -> Lane<()> {
    access::store(memory, local, r, access, o, mask)?;
    if undefined.0.is_empty() {
        return Ok(());
    }
    let part = access.ty.bits / 8;
    for lane in each(mask) {
        let missing = o[1..].iter().zip(0..).fold(0, |all: u16, (&value, n)| {
            let bytes = undefined.of(value, lane) & (u8::MAX >> (8 - part));
            all | u16::from(bytes) << (part * n)
        });
        if missing != 0 {
            let at = address(r, o[0], access.offset, access.wide, lane);
            let bytes = part * u32::from(access.count);
            let place = memory.view.reach(at, bytes, &mut memory.hint);
            place.map_err(|fault| (lane, Box::new(fault)))?.unmark(missing);
        }
    }
    Ok(())
}
