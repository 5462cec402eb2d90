//! Memory as a warp sees it: spaces, addresses, and what is checked at each access.

use crate::check::{Books, Who};
use crate::error::{Fault, Other, Space};
use crate::float;
use crate::lanes::{LANES, Registers, each, lanes};
use crate::matrix;
use crate::memory::{LOCAL_WINDOW, SHARED_WINDOW, View};
use crate::program::{Access, Atomic, Fragment, Kind, Type};
use crate::races::Party;

/// What a lane did wrong.
pub type Lane<T> = Result<T, (usize, Box<Fault>)>;

/// The memory of one block while it runs.
pub struct Memory<'a> {
    pub view: &'a View,
    pub parameters: &'a [u8],
    pub shared: Vec<u8>,
    /// Checks, unless they are switched off.
    pub books: Option<Books>,
    /// Where in `view` the last access was.
    pub hint: usize,
    /// Launch, block and barriers, for accesses to device memory.
    pub party: Party,
}

/// The part of a warp that memory needs to know: its number, its local memory, the line.
pub struct Local<'a> {
    pub warp: usize,
    pub line: u32,
    pub bytes: &'a mut [u8],
}

impl Local<'_> {
    fn who(&self, lane: usize) -> Who {
        Who { thread: (self.warp * LANES + lane) as u32, line: self.line }
    }

    fn of(&mut self, lane: usize) -> &mut [u8] {
        let size = self.bytes.len() / LANES;
        &mut self.bytes[lane * size..][..size]
    }
}

/// The space of a generic address, and the address in it.
fn resolved(space: Space, address: u64) -> (Space, u64) {
    match (space, address >> 48 << 48) {
        (Space::Generic, SHARED_WINDOW) => (Space::Shared, address - SHARED_WINDOW),
        (Space::Generic, LOCAL_WINDOW) => (Space::Local, address - LOCAL_WINDOW),
        (Space::Generic, _) => (Space::Global, address),
        _ => (space, address),
    }
}

/// `bytes` at `address` of a memory that begins at 0.
#[inline]
fn inside(space: Space, len: usize, address: u64, bytes: u32) -> Result<usize, Fault> {
    if address & u64::from(bytes - 1) != 0 {
        return Err(Fault::Misaligned { space, address, bytes });
    }
    if address.checked_add(u64::from(bytes)).is_none_or(|end| end > len as u64) {
        return Err(Fault::OutOfBounds { space, address, bytes, limits: Some((0, len as u64)) });
    }
    Ok(address as usize)
}

/// The bytes of a number, the lowest first: 1, 2, 4, 8 or 16 of them, each as one access of the host.
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
    fn read(
        &mut self,
        local: &mut Local<'_>,
        lane: usize,
        space: Space,
        address: u64,
        bytes: u32,
        size: u32,
    ) -> Result<u128, Fault> {
        let (space, address) = resolved(space, address);
        let from = match space {
            Space::Global | Space::Generic => {
                let place = self.view.reach(address, bytes, &mut self.hint)?;
                if self.books.is_some() {
                    place.check_read(Party { warp: local.warp as u32, ..self.party })?;
                }
                return Ok(place.read(size));
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

    #[inline]
    fn write(
        &mut self,
        local: &mut Local<'_>,
        lane: usize,
        space: Space,
        address: u64,
        value: u128,
        bytes: u32,
        size: u32,
    ) -> Result<(), Fault> {
        let (space, address) = resolved(space, address);
        let to = match space {
            Space::Global | Space::Generic | Space::Param => {
                let place = self.view.reach(address, bytes, &mut self.hint)?;
                if self.books.is_some() {
                    place.check_write(Party { warp: local.warp as u32, ..self.party }, false)?;
                }
                place.write(value, size);
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

/// The address of a lane.
#[inline(always)]
fn address(r: &Registers, base: u16, offset: i32, wide: bool, lane: usize) -> u64 {
    if wide {
        r.wide(base)[lane].wrapping_add_signed(i64::from(offset))
    } else {
        u64::from(r.narrow(base)[lane].wrapping_add_signed(offset))
    }
}

fn sized(access: &Access) -> (u32, u32) {
    (access.ty.bits / 8 * u32::from(access.count), access.ty.bits / 8)
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
    let (bytes, size) = sized(access);
    let bits = access.ty.bits;
    let mut values = [[0u64; LANES]; 4];
    for lane in each(mask) {
        let at = address(r, base[0], access.offset, access.wide, lane);
        let value = memory
            .read(local, lane, access.space, at, bytes, size)
            .map_err(|fault| (lane, Box::new(fault)))?;
        for (n, values) in values.iter_mut().take(results.len()).enumerate() {
            values[lane] = (value >> (bits * n as u32)) as u64 & (u64::MAX >> (64 - bits));
        }
    }
    for (&result, values) in results.iter().zip(&values) {
        match bits {
            64 => r.set_wide(result, values, mask),
            8 if access.ty.kind == Kind::Signed => {
                r.set_narrow(result, &values.map(|value| u32::from(value as u8 as i8 as u16)), mask);
            }
            _ => r.set_narrow(result, &values.map(|value| value as u32), mask),
        }
    }
    Ok(())
}

pub fn store(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &Registers,
    access: &Access,
    o: &[u16],
    mask: u32,
) -> Lane<()> {
    let (bytes, size) = sized(access);
    let bits = access.ty.bits;
    for lane in each(mask) {
        let at = address(r, o[0], access.offset, access.wide, lane);
        let mut value = 0;
        for (n, &part) in o[1..].iter().enumerate() {
            let part = if bits == 64 { r.wide(part)[lane] } else { u64::from(r.narrow(part)[lane]) };
            value |= u128::from(part & (u64::MAX >> (64 - bits))) << (bits * n as u32);
        }
        memory
            .write(local, lane, access.space, at, value, bytes, size)
            .map_err(|fault| (lane, Box::new(fault)))?;
    }
    Ok(())
}

pub fn atomic(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &mut Registers,
    op: Atomic,
    access: &Access,
    returns: bool,
    o: &[u16],
    mask: u32,
) -> Lane<()> {
    let (results, operands) = o.split_at(usize::from(returns));
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

/// A copy to shared memory that has begun and not ended.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    pub lane: u8,
    pub group: u32,
    target: u32,
    bytes: u8,
    value: u128,
}

/// Where a `cp.async` copies to and from, and what registers have its addresses.
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
    if wanted > 0 && !wanted.is_power_of_two() || from & u64::from(bytes - 1) != 0 && wanted > 0 {
        return Err(fail(Fault::Misaligned { space: Space::Global, address: from, bytes }));
    }
    if wanted > 0 {
        value = memory.read(local, lane, Space::Global, from, wanted, wanted.min(8)).map_err(fail)?;
    }
    if let Some(books) = &mut memory.books {
        books.begin_copy(target, bytes, local.who(lane)).map_err(fail)?;
    }
    Ok(Copy { lane: lane as u8, group, target, bytes: copied.bytes, value })
}

/// Puts the bytes of a copy in their place.
pub fn end_copy(memory: &mut Memory<'_>, copy: &Copy) {
    let bytes = usize::from(copy.bytes);
    memory.shared[copy.target as usize..][..bytes].copy_from_slice(&copy.value.to_le_bytes()[..bytes]);
    if let Some(books) = &mut memory.books {
        books.end_copy(copy.target, u32::from(copy.bytes));
    }
}

/// `ldmatrix`: eight lanes have the addresses of the rows of a matrix.
pub fn load_matrix(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &mut Registers,
    transposed: bool,
    access: &Access,
    o: &[u16],
) -> Lane<()> {
    let (results, base) = o.split_at(usize::from(access.count));
    for (matrix, &result) in results.iter().enumerate() {
        let mut rows = [0u128; 8];
        for (row, value) in rows.iter_mut().enumerate() {
            let lane = 8 * matrix + row;
            let at = address(r, base[0], access.offset, access.wide, lane);
            *value =
                memory.read(local, lane, access.space, at, 16, 8).map_err(|fault| (lane, Box::new(fault)))?;
        }
        let element = |row: usize, column: usize| (rows[row] >> (16 * column)) as u32 & 0xffff;
        let values = lanes(|lane| {
            let (group, pair) = (lane / 4, 2 * (lane % 4));
            match transposed {
                false => element(group, pair) | element(group, pair + 1) << 16,
                true => element(pair, group) | element(pair + 1, group) << 16,
            }
        });
        r.set_narrow(result, &values, u32::MAX);
    }
    Ok(())
}

/// Registers of a fragment, halves in each, and the offset in elements of the one that a lane holds.
fn offset(fragment: &Fragment, stride: u32, lane: usize, register: usize, half: usize) -> u64 {
    let halves = if fragment.ty.bits == 16 { 2 } else { 1 };
    let (row, column) = matrix::element(fragment.matrix, halves, lane, register, half);
    let (line, place) = if fragment.row_major { (row, column) } else { (column, row) };
    line as u64 * u64::from(stride) + place as u64
}

/// Checks what PTX asks of the start and the stride of a matrix in memory.
fn matrix_at(r: &Registers, access: &Access, base: u16, stride: u16, lane: usize) -> Lane<(u64, u32)> {
    let stride = r.narrow(stride)[lane];
    let bytes = access.ty.bits / 8;
    if !(stride * bytes).is_multiple_of(16) {
        return Err((lane, Box::new(Fault::Stride { stride })));
    }
    let at = address(r, base, access.offset, access.wide, lane);
    if at & 31 != 0 {
        return Err((lane, Box::new(Fault::Misaligned { space: access.space, address: at, bytes: 32 })));
    }
    Ok((at, stride))
}

pub fn wmma_load(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &mut Registers,
    fragment: &Fragment,
    access: &Access,
    o: &[u16],
) -> Lane<()> {
    let (results, operands) = o.split_at(o.len() - 2);
    let bytes = access.ty.bits / 8;
    for (register, &result) in results.iter().enumerate() {
        let mut values = [0; LANES];
        for (lane, value) in values.iter_mut().enumerate() {
            let (start, stride) = matrix_at(r, access, operands[0], operands[1], lane)?;
            for half in 0..(4 / bytes) as usize {
                // Fragments of f16 have eight registers, of which four say all.
                let register = if access.ty.kind == Kind::F16 { register % 4 } else { register };
                let at = start + offset(fragment, stride, lane, register, half) * u64::from(bytes);
                let read = memory.read(local, lane, access.space, at, bytes, bytes);
                *value |= (read.map_err(|fault| (lane, Box::new(fault)))? as u32) << (16 * half);
            }
        }
        r.set_narrow(result, &values, u32::MAX);
    }
    Ok(())
}

pub fn wmma_store(
    memory: &mut Memory<'_>,
    local: &mut Local<'_>,
    r: &Registers,
    fragment: &Fragment,
    access: &Access,
    o: &[u16],
) -> Lane<()> {
    for (register, &values) in o[2..].iter().enumerate() {
        for lane in 0..LANES {
            let (start, stride) = matrix_at(r, access, o[0], o[1], lane)?;
            let at = start + offset(fragment, stride, lane, register, 0) * 4;
            let value = u128::from(r.narrow(values)[lane]);
            memory
                .write(local, lane, access.space, at, value, 4, 4)
                .map_err(|fault| (lane, Box::new(fault)))?;
        }
    }
    Ok(())
}

/// The thread of a lane, for a message.
pub fn other(block: u32, warp: usize, lane: usize, line: u32) -> Other {
    Other { block, thread: (warp * LANES + lane) as u32, line }
}
