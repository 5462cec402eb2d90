//! Executes arithmetic instructions for all lanes of a warp at once. Inactive lanes compute too, but their
//! results are discarded.

use crate::conversion::{convert, pack, unpack};
use crate::float;
use crate::integers::{int1, int2, int2_half, int2_wide, mul_wide};
use crate::lanes::{LANES, Registers, lanes, map1, map2, map3};
use crate::program::{Compare, Float1, Float2, Kind, Logic, Mode, Op, Round, Type};

const HALF: u32 = 0xffff;

/// Executes `op` with the registers `o` if it is an arithmetic instruction.
#[inline(always)]
pub fn execute(r: &mut Registers, op: Op, o: &[u16], mask: u32) -> bool {
    match op {
        Op::Move32 => r.set_narrow(o[0], &{ *r.narrow(o[1]) }, mask),
        Op::Move64 => r.set_wide(o[0], &{ *r.wide(o[1]) }, mask),
        Op::MovePredicate => r.set_predicate(o[0], r.predicate(o[1]), mask),
        Op::NotPredicate => r.set_predicate(o[0], !r.predicate(o[1]), mask),
        Op::Logic(logic) => {
            let value = combined(logic, r.predicate(o[1]), r.predicate(o[2]));
            r.set_predicate(o[0], value, mask);
        }
        Op::Int1(op, ty) => int1(r, op, ty, o, mask),
        Op::Int2(op, ty) if ty.bits == 64 => int2_wide(r, op, ty.kind == Kind::Signed, o, mask),
        Op::Int2(op, ty) if ty.bits == 32 => int2(r, op, ty.kind == Kind::Signed, o, mask),
        Op::Int2(op, ty) => int2_half(r, op, ty.kind == Kind::Signed, o, mask),
        Op::MulWide { signed, bits, add } => mul_wide(r, signed, bits, add, o, mask),
        Op::MulAdd(ty) if ty.bits == 64 => {
            let (a, b, c) = (*r.wide(o[1]), *r.wide(o[2]), *r.wide(o[3]));
            let value = lanes(|i| a[i].wrapping_mul(b[i]).wrapping_add(c[i]));
            r.set_wide(o[0], &value, mask);
        }
        Op::MulAdd(ty) => {
            let keep = if ty.bits == 16 { HALF } else { u32::MAX };
            map3(r, o, mask, |a, b, c| a.wrapping_mul(b).wrapping_add(c) & keep);
        }
        Op::Insert32 => {
            let (place, length) = (*r.narrow(o[3]), *r.narrow(o[4]));
            let (a, b) = (*r.narrow(o[1]), *r.narrow(o[2]));
            r.set_narrow(o[0], &lanes(|i| inserted(a[i], b[i], place[i], length[i])), mask);
        }
        Op::Float1(op, mode) => float1(r, op, mode, o, mask),
        Op::Float2(op, mode) => float2(r, op, mode, o, mask),
        Op::MulAddFloat(mode) => {
            if mode == Mode::PLAIN {
                map3(r, o, mask, |a, b, c| {
                    float::canonical(f32::from_bits(a).mul_add(f32::from_bits(b), f32::from_bits(c)))
                        .to_bits()
                });
            } else {
                map3(r, o, mask, |a, b, c| {
                    let values = [a, b, c].map(f32::from_bits);
                    float::with_mode(values, mode, |[a, b, c]| float::multiply_add(a, b, c, mode.round))
                        .to_bits()
                });
            }
        }
        Op::Half2(op, kind) => map2(r, o, mask, |a, b| half2(op, kind, a, b)),
        Op::HalfMulAdd(kind) => map3(r, o, mask, |a, b, c| float::half_multiply_add(a, b, c, kind)),
        Op::Compare { compare, ty, flush, with, opposite } => {
            let mut bits = compared(r, compare, ty, flush, o[1 + usize::from(opposite)..].split_at(2).0);
            let other = with.map(|_| r.predicate(o[3 + usize::from(opposite)]));
            let mut opposite_bits = !bits;
            if let (Some(logic), Some(other)) = (with, other) {
                opposite_bits = combined(logic, opposite_bits, other);
                bits = combined(logic, bits, other);
            }
            r.set_predicate(o[0], bits, mask);
            if opposite {
                r.set_predicate(o[1], opposite_bits, mask);
            }
        }
        Op::Set { compare, ty, flush, yes } => {
            let bits = compared(r, compare, ty, flush, &o[1..]);
            r.set_narrow(o[0], &lanes(|i| if bits >> i & 1 == 1 { yes } else { 0 }), mask);
        }
        Op::Select32 => {
            let (a, b, p) = (*r.narrow(o[1]), *r.narrow(o[2]), r.predicate(o[3]));
            r.set_narrow(o[0], &lanes(|i| if p >> i & 1 == 1 { a[i] } else { b[i] }), mask);
        }
        Op::Select64 => {
            let (a, b, p) = (*r.wide(o[1]), *r.wide(o[2]), r.predicate(o[3]));
            r.set_wide(o[0], &lanes(|i| if p >> i & 1 == 1 { a[i] } else { b[i] }), mask);
        }
        Op::Convert { to, from, mode, integral } => convert(r, to, from, mode, integral, o, mask),
        Op::ConvertPair { kind, .. } => map2(r, o, mask, |high, low| {
            let half = |bits| float::to_half(f64::from(f32::from_bits(bits)), kind);
            half(high) << 16 | half(low)
        }),
        Op::Pack { bits } => pack(r, bits, o, mask),
        Op::Unpack { bits } => unpack(r, bits, o, mask),
        _ => return false,
    }
    true
}

fn combined(logic: Logic, a: u32, b: u32) -> u32 {
    match logic {
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
    }
}

fn inserted(a: u32, b: u32, place: u32, length: u32) -> u32 {
    let (place, length) = (place & 0xff, length & 0xff);
    if place > 31 || length == 0 {
        return b;
    }
    let field = (u32::MAX >> (32 - length.min(32))) << place;
    (b & !field) | (a << place & field)
}

#[inline(always)]
fn map_float(r: &mut Registers, o: &[u16], mask: u32, mode: Mode, f: impl Fn(f32) -> f32) {
    map1(r, o, mask, |a| float::with_mode([f32::from_bits(a)], mode, |[a]| f(a)).to_bits());
}

#[inline(always)]
fn float1(r: &mut Registers, op: Float1, mode: Mode, o: &[u16], mask: u32) {
    let double = |f: fn(f64) -> f64| move |a: f32| f(f64::from(a)) as f32;
    match op {
        // These change the sign only: a NaN keeps its bits.
        Float1::Neg if !mode.flush => map1(r, o, mask, |a| a ^ 0x8000_0000),
        Float1::Abs if !mode.flush => map1(r, o, mask, |a| a & 0x7fff_ffff),
        Float1::Neg => map_float(r, o, mask, mode, |a| -a),
        Float1::Abs => map_float(r, o, mask, mode, f32::abs),
        Float1::Reciprocal => map_float(r, o, mask, mode, |a| 1.0 / a),
        Float1::Sqrt => map_float(r, o, mask, mode, f32::sqrt),
        Float1::ReciprocalSqrt => map_float(r, o, mask, mode, double(|a| 1.0 / a.sqrt())),
        // The most frequent instruction of kernels, written so that the compiler vectorises it.
        Float1::Exp2 if mode.flush && !mode.saturate => {
            map1(r, o, mask, |a| float::flushed(float::exp2(float::flushed(f32::from_bits(a)))).to_bits())
        }
        Float1::Exp2 => map_float(r, o, mask, mode, float::exp2),
        Float1::Log2 => map_float(r, o, mask, mode, double(f64::log2)),
        Float1::Sin => map_float(r, o, mask, mode, double(f64::sin)),
        Float1::Cos => map_float(r, o, mask, mode, double(f64::cos)),
        Float1::Tanh => map_float(r, o, mask, mode, double(f64::tanh)),
    }
}

#[inline(always)]
fn float2(r: &mut Registers, op: Float2, mode: Mode, o: &[u16], mask: u32) {
    let mut map = |f: fn(f32, f32, Round) -> f32| {
        map2(r, o, mask, |a, b| {
            let values = [f32::from_bits(a), f32::from_bits(b)];
            float::with_mode(values, mode, |[a, b]| f(a, b, mode.round)).to_bits()
        });
    };
    match op {
        Float2::Add | Float2::Sub | Float2::Mul if mode == Mode::PLAIN => {
            let float = |f: fn(f32, f32) -> f32| {
                move |a, b| float::canonical(f(f32::from_bits(a), f32::from_bits(b))).to_bits()
            };
            match op {
                Float2::Add => map2(r, o, mask, float(|a, b| a + b)),
                Float2::Sub => map2(r, o, mask, float(|a, b| a - b)),
                _ => map2(r, o, mask, float(|a, b| a * b)),
            }
        }
        Float2::CopySign => map2(r, o, mask, |a, b| a & 0x8000_0000 | b & 0x7fff_ffff),
        Float2::Add => map(float::add),
        Float2::Sub => map(|a, b, round| float::add(a, -b, round)),
        Float2::Mul => map(float::multiply),
        Float2::Div => map(|a, b, _| a / b),
        Float2::Min => map(|a, b, _| float::minimum(a, b)),
        Float2::Max => map(|a, b, _| float::maximum(a, b)),
        Float2::MinNan => {
            map(|a, b, _| if a.is_nan() || b.is_nan() { f32::NAN } else { float::minimum(a, b) })
        }
        Float2::MaxNan => {
            map(|a, b, _| if a.is_nan() || b.is_nan() { f32::NAN } else { float::maximum(a, b) })
        }
    }
}

fn half2(op: Float2, kind: Kind, a: u32, b: u32) -> u32 {
    let (a, b) = (float::from_half(a, kind), float::from_half(b, kind));
    let (x, y) = (f64::from(a), f64::from(b));
    let nan = a.is_nan() || b.is_nan();
    let value = match op {
        Float2::Add => x + y,
        Float2::Sub => x - y,
        Float2::Mul => x * y,
        Float2::Div => x / y,
        Float2::CopySign => y.copysign(x),
        Float2::MinNan | Float2::MaxNan if nan => f64::NAN,
        Float2::Min | Float2::MinNan => f64::from(float::minimum(a, b)),
        Float2::Max | Float2::MaxNan => f64::from(float::maximum(a, b)),
    };
    float::to_half(value, kind)
}

#[inline(always)]
fn compared(r: &Registers, compare: Compare, ty: Type, flush: bool, o: &[u16]) -> u32 {
    let bits = |f: &dyn Fn(usize) -> bool| (0..LANES).fold(0, |bits, i| bits | u32::from(f(i)) << i);
    if ty.bits == 64 {
        let (a, b) = (r.wide(o[0]), r.wide(o[1]));
        return match ty.kind {
            Kind::Signed => bits(&|i| ordered(compare, &(a[i] as i64), &(b[i] as i64))),
            _ => bits(&|i| ordered(compare, &a[i], &b[i])),
        };
    }
    let (a, b) = (r.narrow(o[0]), r.narrow(o[1]));
    let float = |bits: u32| match ty.kind {
        Kind::F32 if flush => float::flushed(f32::from_bits(bits)),
        Kind::F32 => f32::from_bits(bits),
        kind => float::from_half(bits, kind),
    };
    match ty.kind {
        Kind::Signed if ty.bits == 16 => bits(&|i| ordered(compare, &(a[i] as i16), &(b[i] as i16))),
        Kind::Signed => bits(&|i| ordered(compare, &(a[i] as i32), &(b[i] as i32))),
        Kind::Unsigned | Kind::Bits => bits(&|i| ordered(compare, &a[i], &b[i])),
        _ => bits(&|i| ordered(compare, &float(a[i]), &float(b[i]))),
    }
}

#[inline(always)]
fn ordered<T: PartialOrd>(compare: Compare, a: &T, b: &T) -> bool {
    // Neither is NaN if they can be compared.
    let order = a.partial_cmp(b);
    match compare {
        Compare::Equal => a == b,
        Compare::NotEqual => order.is_some_and(|order| order.is_ne()),
        Compare::Less => a < b,
        Compare::LessEqual => a <= b,
        Compare::Greater => a > b,
        Compare::GreaterEqual => a >= b,
        Compare::EqualOrNan => order.is_none_or(|order| order.is_eq()),
        Compare::NotEqualOrNan => a != b,
        Compare::LessOrNan => order.is_none_or(|order| order.is_lt()),
        Compare::LessEqualOrNan => order.is_none_or(|order| order.is_le()),
        Compare::GreaterOrNan => order.is_none_or(|order| order.is_gt()),
        Compare::GreaterEqualOrNan => order.is_none_or(|order| order.is_ge()),
        Compare::Numbers => order.is_some(),
        Compare::Nan => order.is_none(),
    }
}
