//! Executes instructions that read and write matrices in memory: `ldmatrix` and `wmma`.

use crate::access::{Lane, Local, Memory, Span, address};
use crate::error::Fault;
use crate::lanes::{LANES, Registers, lanes};
use crate::matrix;
use crate::program::{Access, Fragment, Kind};

/// `ldmatrix`: eight lanes provide the addresses of the rows of a matrix.
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
        let mut rows = [[0u32; 8]; 8];
        for (row, value) in rows.iter_mut().enumerate() {
            let lane = 8 * matrix + row;
            let at = address(r, base[0], access.offset, access.wide, lane);
            let bytes = memory
                .read(local, lane, Span { space: access.space, address: at, bytes: 16, part: 8 })
                .map_err(|fault| (lane, Box::new(fault)))?
                .to_le_bytes();
            for (value, pair) in value.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = u32::from(pair[0]) | u32::from(pair[1]) << 8;
            }
        }
        let element = |row: usize, column: usize| rows[row][column];
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

/// Offset in elements of the `half` of a `register` of a fragment that a lane holds.
fn offset(fragment: &Fragment, stride: u32, lane: usize, register: usize, half: usize) -> u64 {
    let halves = if fragment.ty.bits == 16 { 2 } else { 1 };
    let (row, column) = matrix::element(fragment.matrix, halves, lane, register, half);
    let (line, place) = if fragment.row_major { (row, column) } else { (column, row) };
    line as u64 * u64::from(stride) + place as u64
}

/// Checks PTX's requirements for the start and the stride of a matrix in memory.
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
                // Fragments of f16 have eight registers, of which four determine all.
                let register = if access.ty.kind == Kind::F16 { register % 4 } else { register };
                let at = start + offset(fragment, stride, lane, register, half) * u64::from(bytes);
                let read =
                    memory.read(local, lane, Span { space: access.space, address: at, bytes, part: bytes });
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
                .write(local, lane, Span { space: access.space, address: at, bytes: 4, part: 4 }, value)
                .map_err(|fault| (lane, Box::new(fault)))?;
        }
    }
    Ok(())
}
