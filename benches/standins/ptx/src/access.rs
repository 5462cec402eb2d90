//! Memory as seen by a warp: spaces, addresses, and the checks at each access.

use crate::check::{Books, Who};
use crate::error::{Fault, Other, Space};
use crate::float;
use crate::footprint::Footprint;
use crate::lanes::{LANES, Registers, each};
use crate::memory::{LOCAL_WINDOW, SHARED_WINDOW, View};
use crate::program::{Access, Atomic, Kind, Type};
use crate::races::Party;
use crate::wgmma::alike::Alike;
use crate::wgmma::descriptor::CHUNK;

/// The result of a lane's operation; errors have the number of the lane.
pub type Lane<T> = Result<T, (usize, Box<Fault>)>;

/// The bytes that a lane reads or writes, and the size of the parts that are accessed at once.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    pub space: Space,
    pub address: u64,
    pub bytes: u32,
    pub part: u32,
}

impl Span {
    pub fn of(access: &Access, address: u64) -> Span {
        let part = access.ty.bits / 8;
        Span { space: access.space, address, bytes: part * u32::from(access.count), part }
    }
}

/// The memory of one block while it runs.
pub struct Memory<'a> {
    pub view: &'a View,
    pub parameters: &'a [u8],
    pub shared: Vec<u8>,
    /// Books for the checks; `None` if checks are switched off.
    pub books: Option<Books>,
    /// Checks for instructions that the warps of a warpgroup execute together; `None` if unused or off.
    pub alike: Option<Alike>,
    /// Position in `view` of the last access.
    pub hint: usize,
    /// Launch, block and barriers, for accesses to device memory.
    pub party: Party,
    /// The device memory that the block uses, if that is recorded.
    pub footprint: Option<Box<Footprint>>,
}

/// The parts of a warp that memory needs: its number, its local memory, the line.
pub struct Local<'a> {
    pub warp: usize,
    pub line: u32,
    pub bytes: &'a mut [u8],
}

impl Local<'_> {
    pub fn who(&self, lane: usize) -> Who {
        Who { thread: (self.warp * LANES + lane) as u32, line: self.line }
    }

    fn of(&mut self, lane: usize) -> &mut [u8] {
        let size = self.bytes.len() / LANES;
        &mut self.bytes[lane * size..][..size]
    }
}

/// Resolves a generic address to its space and the address in that space.
fn resolved(space: Space, address: u64) -> (Space, u64) {
    match (space, address >> 48 << 48) {
        (Space::Generic, SHARED_WINDOW) => (Space::Shared, address - SHARED_WINDOW),
        (Space::Generic, LOCAL_WINDOW) => (Space::Local, address - LOCAL_WINDOW),
        (Space::Generic, _) => (Space::Global, address),
        _ => (space, address),
    }
}

/// Position of `bytes` bytes at `address` in a memory that starts at 0.
#[inline]
pub fn inside(space: Space, len: usize, address: u64, bytes: u32) -> Result<usize, Fault> {
    if address & u64::from(bytes - 1) != 0 {
        return Err(Fault::Misaligned { space, address, bytes });
    }
    if address.checked_add(u64::from(bytes)).is_none_or(|end| end > len as u64) {
        return Err(Fault::OutOfBounds { space, address, bytes, limits: Some((0, len as u64)) });
    }
    Ok(address as usize)
}

/// Returns the value of 1, 2, 4, 8 or 16 bytes, lowest first, read by a single access of the host.
#[inline(always)]
fn value_of(from: &[u8], bytes: u32) -> u128 {
    match (bytes, from) {
        (1, [a, ..]) => u128::from(*a),
        (2, [a, b, ..]) => u128::from(u16::from_le_bytes([*a, *b])),
        (4, _) => from.first_chunk().map_or(0, |four| u128::from(u32::from_le_bytes(*four))),
        (8, _) => from.first_chunk().map_or(0, |eight| u128::from(u64::from_le_bytes(*eight))),
        _ => from.first_chunk().map_or(0, |all| u128::from_le_bytes(*all)),
    }
}

#[inline(always)]
fn put(to: &mut [u8], bytes: u32, value: u128) {
    let all = value.to_le_bytes();
    match bytes {
        1 => to[..1].copy_from_slice(&all[..1]),
        2 => to[..2].copy_from_slice(&all[..2]),
        4 => to[..4].copy_from_slice(&all[..4]),
        8 => to[..8].copy_from_slice(&all[..8]),
        _ => to[..16].copy_from_slice(&all),
    }
}

impl Memory<'_> {
    /// Reads `bytes` in parts of `size` bytes.
    #[inline]
    pub fn read(&mut self, local: &mut Local<'_>, lane: usize, span: Span) -> Result<u128, Fault> {
        let Span { bytes, part, .. } = span;
        let (space, address) = resolved(span.space, span.address);
        let from = match space {
            Space::Global | Space::Generic => {
                let place = self.view.reach(address, bytes, &mut self.hint)?;
                if let Some(footprint) = &mut self.footprint {
                    footprint.note(address, bytes, false);
                }
                if self.books.is_some() {
                    place.check_read(Party { warp: local.warp as u32, ..self.party })?;
                }
                return Ok(place.read(part));
            }
            Space::Shared => {
                let at = inside(space, self.shared.len(), address, bytes)?;
                if let Some(books) = &mut self.books {
                    books.read(at as u32, bytes, local.who(lane))?;
                }
                &self.shared[at..]
            }
            Space::Local => {
                let all = local.of(lane);
                &all[inside(space, all.len(), address, bytes)?..]
            }
            Space::Param => &self.parameters[inside(space, self.parameters.len(), address, bytes)?..],
        };
        Ok(value_of(from, bytes))
    }

    /// Reads 16 bytes of shared memory for a product of a warpgroup.
    pub fn read_for_product(&mut self, address: u32) -> Result<u128, Fault> {
        let at = inside(Space::Shared, self.shared.len(), u64::from(address), CHUNK)?;
        if let Some(books) = &mut self.books {
            books.read_by_product(address)?;
        }
        Ok(value_of(&self.shared[at..], CHUNK))
    }

    #[inline]
    pub fn write(
        &mut self,
        local: &mut Local<'_>,
        lane: usize,
        span: Span,
        value: u128,
    ) -> Result<(), Fault> {
        let Span { bytes, part, .. } = span;
        let (space, address) = resolved(span.space, span.address);
        let to = match space {
            Space::Global | Space::Generic | Space::Param => {
                let place = self.view.reach(address, bytes, &mut self.hint)?;
                if let Some(footprint) = &mut self.footprint {
                    footprint.note(address, bytes, true);
                }
                if self.books.is_some() {
                    place.check_write(Party { warp: local.warp as u32, ..self.party }, false)?;
                }
                place.write(value, part);
                return Ok(());
            }
            Space::Shared => {
                let at = inside(space, self.shared.len(), address, bytes)?;
                if let Some(books) = &mut self.books {
                    books.write(at as u32, bytes, local.who(lane))?;
                }
                &mut self.shared[at..]
            }
            Space::Local => {
                let all = local.of(lane);
                let at = inside(space, all.len(), address, bytes)?;
                &mut all[at..]
            }
        };
        put(to, bytes, value);
        Ok(())
    }
}

/// Returns the address that a lane accesses.
#[inline(always)]
pub fn address(r: &Registers, base: u16, offset: i32, wide: bool, lane: usize) -> u64 {
    if wide {
        r.wide(base)[lane].wrapping_add_signed(i64::from(offset))
    } else {
        u64::from(r.narrow(base)[lane].wrapping_add_signed(offset))
    }
}

pub fn load(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &mut Registers,
    access: &Access,
    o: &[u16],
    mask: u32,
) -> Lane<()> {
    let (results, base) = o.split_at(usize::from(access.count));
    let bits = access.ty.bits;
    let mut values = [[0u64; LANES]; 4];
    for lane in each(mask) {
        let at = address(r, base[0], access.offset, access.wide, lane);
        let value =
            memory.read(local, lane, Span::of(access, at)).map_err(|fault| (lane, Box::new(fault)))?;
        split(value, bits, lane, &mut values[..results.len()]);
    }
    set(r, access, results, &values, mask);
    Ok(())
}

/// Splits a value that a lane has read into the parts of a vector.
#[inline(always)]
pub fn split(value: u128, bits: u32, lane: usize, values: &mut [[u64; LANES]]) {
    for (n, values) in values.iter_mut().enumerate() {
        values[lane] = (value >> (bits * n as u32)) as u64 & (u64::MAX >> (64 - bits));
    }
}

/// Stores loaded values in registers.
#[inline(always)]
pub fn set(r: &mut Registers, access: &Access, results: &[u16], values: &[[u64; LANES]; 4], mask: u32) {
    for (&result, values) in results.iter().zip(values) {
        match access.ty.bits {
            64 => r.set_wide(result, values, mask),
            8 if access.ty.kind == Kind::Signed => {
                r.set_narrow(result, &values.map(|value| u32::from(value as u8 as i8 as u16)), mask);
            }
            _ => r.set_narrow(result, &values.map(|value| value as u32), mask),
        }
    }
}

pub fn store(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &Registers,
    access: &Access,
    o: &[u16],
    mask: u32,
) -> Lane<()> {
    let bits = access.ty.bits;
    for lane in each(mask) {
        let at = address(r, o[0], access.offset, access.wide, lane);
        let mut value = 0;
        for (n, &part) in o[1..].iter().enumerate() {
            let part = if bits == 64 { r.wide(part)[lane] } else { u64::from(r.narrow(part)[lane]) };
            value |= u128::from(part & (u64::MAX >> (64 - bits))) << (bits * n as u32);
        }
        memory.write(local, lane, Span::of(access, at), value).map_err(|fault| (lane, Box::new(fault)))?;
    }
    Ok(())
}

pub fn atomic(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &mut Registers,
    op: Atomic,
    access: &Access,
    o: &[u16],
    mask: u32,
) -> Lane<()> {
    let sources = if op == Atomic::CompareAndSwap { 3 } else { 2 };
    let (results, operands) = o.split_at(o.len() - sources);
    let bits = access.ty.bits;
    let wide = bits == 64;
    let mut before = [0; LANES];
    for lane in each(mask) {
        let at = address(r, operands[0], access.offset, access.wide, lane);
        let given = |n: usize| match operands.get(n) {
            Some(&register) if wide => r.wide(register)[lane],
            Some(&register) => u64::from(r.narrow(register)[lane]),
            None => 0,
        };
        let (a, b) = (given(1), given(2));
        let changed = |value| changed(op, access.ty, value, a, b);
        let result = match resolved(access.space, at) {
            (Space::Shared, at) => inside(Space::Shared, memory.shared.len(), at, bits / 8).and_then(|at| {
                if let Some(books) = &mut memory.books {
                    books.atomic(at as u32, bits / 8)?;
                }
                let place = &mut memory.shared[at..][..bits as usize / 8];
                let value = value_of(place, bits / 8) as u64;
                place.copy_from_slice(&changed(value).to_le_bytes()[..bits as usize / 8]);
                Ok(value)
            }),
            (_, at) => memory.view.reach(at, bits / 8, &mut memory.hint).and_then(|place| {
                if let Some(footprint) = &mut memory.footprint {
                    footprint.note(at, bits / 8, true);
                }
                if memory.books.is_some() {
                    place.check_update(Party { warp: local.warp as u32, ..memory.party })?;
                }
                Ok(place.update(changed))
            }),
        };
        before[lane] = result.map_err(|fault| (lane, Box::new(fault)))?;
    }
    match results {
        [] => {}
        [result, ..] if wide => r.set_wide(*result, &before, mask),
        [result, ..] => r.set_narrow(*result, &before.map(|value| value as u32), mask),
    }
    Ok(())
}

fn changed(op: Atomic, ty: Type, value: u64, a: u64, b: u64) -> u64 {
    let signed = |value: u64| if ty.bits == 64 { value as i64 } else { i64::from(value as u32 as i32) };
    match op {
        Atomic::Add if ty.kind == Kind::F32 => {
            u64::from((f32::from_bits(value as u32) + f32::from_bits(a as u32)).to_bits())
        }
        Atomic::Add if ty.bits == 16 => {
            u64::from(float::half_multiply_add(value as u32, float::one(ty.kind), a as u32, ty.kind))
        }
        Atomic::Add => value.wrapping_add(a) & (u64::MAX >> (64 - ty.bits)),
        Atomic::Min if ty.kind == Kind::Signed && signed(value) <= signed(a) => value,
        Atomic::Max if ty.kind == Kind::Signed && signed(value) >= signed(a) => value,
        Atomic::Min if ty.kind != Kind::Signed => value.min(a),
        Atomic::Max if ty.kind != Kind::Signed => value.max(a),
        Atomic::Min | Atomic::Max | Atomic::Exchange => a,
        Atomic::And => value & a,
        Atomic::Or => value | a,
        Atomic::Xor => value ^ a,
        Atomic::CompareAndSwap if value == a => b,
        Atomic::CompareAndSwap => value,
    }
}

/// Returns the thread of a lane, for a message.
pub fn other(block: u32, warp: usize, lane: usize, line: u32) -> Other {
    Other { block, thread: (warp * LANES + lane) as u32, line }
}
