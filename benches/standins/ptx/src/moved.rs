//! Values that a kernel only copies within device memory or selects from may be unwritten. As with
//! `cuMemcpy`, the copy is then unwritten too, and a value that is not selected does no harm. Selecting an
//! unwritten value is an error.
//!
//! burn copies unwritten outputs to measure kernels on the copies. CubeCL's matrix products read the padding
//! between rows and select a zero instead.

use crate::access::{self, Lane, Local, Memory, address};
use crate::builder::Virtual;
use crate::error::{Fault, Space};
use crate::lanes::{LANES, Registers, each, lanes};
use crate::program::{Access, Op};

/// The values loaded to a register: for each lane, the unwritten bytes, and the address of the value.
#[derive(Debug)]
struct Loaded {
    register: u16,
    missing: [u8; LANES],
    addresses: [u64; LANES],
}

/// Registers loaded since the first load of unwritten memory.
#[derive(Debug, Default)]
pub struct Undefined(Vec<Loaded>);

impl Undefined {
    fn of(&self, register: u16, lane: usize) -> u8 {
        let found = self.0.iter().find(|loaded| loaded.register == register);
        found.map_or(0, |loaded| loaded.missing[lane])
    }

    /// Returns the address of a lane's value if the value is unwritten.
    fn address(&self, register: u16, lane: usize) -> Option<u64> {
        let loaded = self.0.iter().find(|loaded| loaded.register == register)?;
        (loaded.missing[lane] != 0).then(|| loaded.addresses[lane])
    }

    fn set(&mut self, register: u16, mask: u32, missing: &[u8; LANES], addresses: impl Fn(usize) -> u64) {
        let place = self.0.iter().position(|loaded| loaded.register == register).unwrap_or_else(|| {
            self.0.push(Loaded { register, missing: [0; LANES], addresses: [0; LANES] });
            self.0.len() - 1
        });
        let loaded = &mut self.0[place];
        each(mask).for_each(|lane| {
            (loaded.missing[lane], loaded.addresses[lane]) = (missing[lane], addresses(lane));
        });
    }
}

/// Finds the loads of device memory whose values are only used in stores to it and selections, and these
/// stores and selections.
pub fn mark(kernel: &mut Virtual) {
    let len = kernel.registers.len();
    let mut writers: Vec<Vec<usize>> = vec![Vec::new(); len];
    let mut readers: Vec<Vec<(usize, bool)>> = vec![Vec::new(); len];
    for (at, instr) in kernel.code.iter().enumerate() {
        let all = &kernel.operands[instr.first as usize..][..usize::from(instr.operands)];
        let (results, operands) = all.split_at(usize::from(instr.results));
        results.iter().for_each(|&register| writers[register as usize].push(at));
        for (position, &register) in operands.iter().enumerate() {
            // The first operand of a store is the address, the last operand of a selection is the predicate.
            let is_value = match instr.op {
                Op::Store(_) => position > 0,
                Op::Select32 => position < 2,
                _ => false,
            };
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
            Op::Select32 => kernel.guards[at].is_none(),
            _ => false,
        })
        .collect();
    let is_load = |at: usize| matches!(kernel.code[at].op, Op::Load(_));
    loop {
        let stays = |at: usize| {
            let instr = &kernel.code[at];
            let all = &kernel.operands[instr.first as usize..][..usize::from(instr.operands)];
            let (results, operands) = all.split_at(usize::from(instr.results));
            let comes_from_load = |&register: &u32| matches!(writers[register as usize][..], [from] if moves[from] && is_load(from));
            match kernel.code[at].op {
                Op::Store(_) => return operands.iter().skip(1).all(comes_from_load),
                Op::Select32 => return operands.iter().take(2).any(comes_from_load),
                _ => {}
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
    let loaded =
        |register: u32| matches!(writers[register as usize][..], [from] if moves[from] && is_load(from));
    let ops: Vec<Op> = (0..moves.len())
        .map(|at| {
            let instr = &kernel.code[at];
            let sources = &kernel.operands[instr.first as usize + usize::from(instr.results)..];
            match instr.op {
                Op::Load(access) if moves[at] => Op::LoadMoved(access),
                Op::Store(access) if moves[at] => Op::StoreMoved(access),
                Op::Select32 if moves[at] => Op::SelectMoved([loaded(sources[0]), loaded(sources[1])]),
                op => op,
            }
        })
        .collect();
    kernel.code.iter_mut().zip(ops).for_each(|(instr, op)| instr.op = op);
}

/// Like [`access::load`], but permits unwritten memory and records it.
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
        let addresses = lanes(|lane| match mask >> lane & 1 {
            0 => 0,
            _ => address(r, base[0], access.offset, access.wide, lane),
        });
        for (n, (&result, missing)) in results.iter().zip(&missing).enumerate() {
            undefined.set(result, mask, missing, |lane| addresses[lane] + u64::from(part) * n as u64);
        }
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

/// Like [`access::store`]; bytes whose originals were unwritten become unwritten.
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

/// Fails if a lane selects an unwritten value from operands that were `loaded`.
pub fn select(undefined: &Undefined, r: &Registers, loaded: [bool; 2], o: &[u16], mask: u32) -> Lane<()> {
    if undefined.0.is_empty() {
        return Ok(());
    }
    let first = r.predicate(o[3]);
    for lane in each(mask) {
        let chosen = usize::from(first >> lane & 1 == 0);
        if loaded[chosen]
            && let Some(address) = undefined.address(o[1 + chosen], lane)
        {
            return Err((lane, Box::new(Fault::Uninitialised { space: Space::Global, address })));
        }
    }
    Ok(())
}
