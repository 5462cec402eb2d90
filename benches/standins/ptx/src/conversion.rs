//! Executes conversions between types, and packing and unpacking of registers.

use crate::float;
use crate::integers::signed;
use crate::lanes::{Lanes, Registers, lanes, lanes_of, map1};
use crate::program::{Kind, Mode, Type};

const HALF: u32 = 0xffff;

#[inline(always)]
pub fn convert(r: &mut Registers, to: Type, from: Type, mode: Mode, integral: bool, o: &[u16], mask: u32) {
    let int = |ty: Type| !ty.is_float();
    match (to.bits, from.bits) {
        (64, 32) if int(to) && int(from) && !mode.saturate => {
            let a = *r.narrow(o[1]);
            let sign = from.kind == Kind::Signed;
            let value = lanes_of(&a, |a| if sign { a as i32 as i64 as u64 } else { u64::from(a) });
            return r.set_wide(o[0], &value, mask);
        }
        (32, 64) if int(to) && int(from) && !mode.saturate => {
            let a = *r.wide(o[1]);
            return r.set_narrow(o[0], &lanes_of(&a, |a| a as u32), mask);
        }
        _ => {}
    }
    if from == Type::F32 && to.kind == Kind::BF16 && mode == Mode::PLAIN {
        return map1(r, o, mask, |a| float::to_bf16(f32::from_bits(a)));
    }
    if from == Type::F32 && to.kind == Kind::F16 && mode == Mode::PLAIN {
        return map1(r, o, mask, |a| float::to_f16(f32::from_bits(a)));
    }
    let f = |value: u64| converted(value, to, from, mode, integral);
    match (to.bits, from.bits) {
        (64, 64) => {
            let a = *r.wide(o[1]);
            r.set_wide(o[0], &lanes_of(&a, f), mask);
        }
        (64, _) => {
            let a = *r.narrow(o[1]);
            r.set_wide(o[0], &lanes_of(&a, |a| f(u64::from(a))), mask);
        }
        (_, 64) => {
            let a = *r.wide(o[1]);
            r.set_narrow(o[0], &lanes_of(&a, |a| f(a) as u32), mask);
        }
        _ => map1(r, o, mask, |a| f(u64::from(a)) as u32),
    }
}

/// Converts a value to a type.
fn converted(value: u64, to: Type, from: Type, mode: Mode, integral: bool) -> u64 {
    let keep = u64::MAX >> (64 - to.bits);
    if !from.is_float() {
        let value = match from.kind {
            Kind::Signed => i128::from(signed(value, from.bits)),
            _ => i128::from(value & (u64::MAX >> (64 - from.bits))),
        };
        return match to.kind {
            Kind::F32 | Kind::TF32 => u64::from(float::from_int(value, mode.round).to_bits()),
            Kind::F64 => (value as f64).to_bits(),
            Kind::F16 | Kind::BF16 => u64::from(float::to_half(value as f64, to.kind)),
            Kind::Signed if mode.saturate => {
                let limit = i128::from(keep >> 1);
                value.clamp(-limit - 1, limit) as u64 & keep
            }
            _ if mode.saturate => value.clamp(0, i128::from(keep)) as u64,
            _ => value as u64 & keep,
        };
    }
    let mut float = match from.kind {
        Kind::F64 => f64::from_bits(value),
        Kind::F32 if mode.flush => f64::from(float::flushed(f32::from_bits(value as u32))),
        Kind::F32 => f64::from(f32::from_bits(value as u32)),
        kind => f64::from(float::from_half(value as u32, kind)),
    };
    if integral {
        float = float::integral(float, mode.round);
    }
    if mode.saturate && to.is_float() {
        float = float::saturated(float);
    }
    match to.kind {
        Kind::F64 => float.to_bits(),
        Kind::F32 => u64::from(float::canonical(float as f32).to_bits()),
        Kind::TF32 => u64::from(float::to_tf32(float as f32).to_bits()),
        Kind::F16 | Kind::BF16 => u64::from(float::to_half(float, to.kind)),
        kind => float::to_int(float, kind == Kind::Signed, to.bits) & keep,
    }
}

pub fn pack(r: &mut Registers, bits: u32, o: &[u16], mask: u32) {
    let parts = &o[1..];
    if bits * parts.len() as u32 == 64 {
        let value = lanes(|i| {
            let part = |(n, &part): (usize, &u16)| u64::from(r.narrow(part)[i]) << (bits * n as u32);
            parts.iter().enumerate().map(part).fold(0, |all, part| all | part)
        });
        r.set_wide(o[0], &value, mask);
    } else {
        let (low, high) = (*r.narrow(o[1]), *r.narrow(o[2]));
        r.set_narrow(o[0], &lanes(|i| low[i] & HALF | high[i] << 16), mask);
    }
}

pub fn unpack(r: &mut Registers, bits: u32, o: &[u16], mask: u32) {
    let (parts, from) = o.split_at(o.len() - 1);
    let wide = bits as usize * parts.len() == 64;
    let value: Lanes<u64> = if wide { *r.wide(from[0]) } else { r.narrow(from[0]).map(u64::from) };
    for (n, &part) in parts.iter().enumerate() {
        let keep = u64::MAX >> (64 - bits);
        r.set_narrow(part, &value.map(|value| (value >> (bits * n as u32) & keep) as u32), mask);
    }
}
