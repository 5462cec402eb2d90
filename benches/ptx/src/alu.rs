//! Executes what computes, for all lanes of a warp at once. The lanes that take no part compute as well, and
//! their results are not kept.

use crate::float;
use crate::lanes::{LANES, Lanes, Registers, lanes, lanes_of};
use crate::program::{Compare, Float1, Float2, Int1, Int2, Kind, Logic, Mode, Op, Round, Type};

const HALF: u32 = 0xffff;

/// Executes `op` with the registers `o`, if it is of this kind.
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

#[inline(always)]
fn map1(r: &mut Registers, o: &[u16], mask: u32, f: impl Fn(u32) -> u32) {
    let a = *r.narrow(o[1]);
    r.set_narrow(o[0], &lanes(|i| f(a[i])), mask);
}

#[inline(always)]
fn map2(r: &mut Registers, o: &[u16], mask: u32, f: impl Fn(u32, u32) -> u32) {
    let (a, b) = (*r.narrow(o[1]), *r.narrow(o[2]));
    r.set_narrow(o[0], &lanes(|i| f(a[i], b[i])), mask);
}

#[inline(always)]
fn map3(r: &mut Registers, o: &[u16], mask: u32, f: impl Fn(u32, u32, u32) -> u32) {
    let (a, b, c) = (*r.narrow(o[1]), *r.narrow(o[2]), *r.narrow(o[3]));
    r.set_narrow(o[0], &lanes(|i| f(a[i], b[i], c[i])), mask);
}

#[inline(always)]
fn map2_wide(r: &mut Registers, o: &[u16], mask: u32, f: impl Fn(u64, u64) -> u64) {
    let (a, b) = (*r.wide(o[1]), *r.wide(o[2]));
    r.set_wide(o[0], &lanes(|i| f(a[i], b[i])), mask);
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

/// The value of `bits` bits as a signed one.
#[inline(always)]
fn signed(value: u64, bits: u32) -> i64 {
    (value << (64 - bits)) as i64 >> (64 - bits)
}

fn int1(r: &mut Registers, op: Int1, ty: Type, o: &[u16], mask: u32) {
    let bits = ty.bits;
    let keep = u64::MAX >> (64 - bits);
    let f = |value: u64| match op {
        Int1::Not => !value & keep,
        Int1::Neg => value.wrapping_neg() & keep,
        Int1::Abs => signed(value, bits).unsigned_abs() & keep,
        Int1::CountOnes => u64::from(value.count_ones()),
        Int1::LeadingZeros => u64::from(value.leading_zeros() + bits - 64),
        Int1::Reverse => value.reverse_bits() >> (64 - bits),
    };
    let count = matches!(op, Int1::CountOnes | Int1::LeadingZeros);
    if bits < 64 {
        map1(r, o, mask, |a| f(u64::from(a)) as u32);
    } else if count {
        let a = *r.wide(o[1]);
        r.set_narrow(o[0], &lanes_of(&a, |a| f(a) as u32), mask);
    } else {
        let a = *r.wide(o[1]);
        r.set_wide(o[0], &lanes_of(&a, f), mask);
    }
}

/// What is divided by zero is not defined; here it is all bits, and what is left the dividend.
macro_rules! divided {
    ($unsigned:ty, $signed:ty, $sign:expr, $remainder:expr, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        match ($remainder, $sign) {
            (false, _) if b == 0 => <$unsigned>::MAX,
            (true, _) if b == 0 => a,
            (false, false) => a / b,
            (true, false) => a % b,
            (false, true) => (a as $signed).wrapping_div(b as $signed) as $unsigned,
            (true, true) => (a as $signed).wrapping_rem(b as $signed) as $unsigned,
        }
    }};
}

#[inline(always)]
fn int2(r: &mut Registers, op: Int2, sign: bool, o: &[u16], mask: u32) {
    match (op, sign) {
        (Int2::Add, _) => map2(r, o, mask, u32::wrapping_add),
        (Int2::Sub, _) => map2(r, o, mask, u32::wrapping_sub),
        (Int2::Mul, _) => map2(r, o, mask, u32::wrapping_mul),
        (Int2::MulHigh, false) => map2(r, o, mask, |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        (Int2::MulHigh, true) => {
            map2(r, o, mask, |a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32);
        }
        (Int2::Div | Int2::Rem, _) => {
            map2(r, o, mask, |a, b| divided!(u32, i32, sign, op == Int2::Rem, a, b));
        }
        (Int2::Min, false) => map2(r, o, mask, u32::min),
        (Int2::Max, false) => map2(r, o, mask, u32::max),
        (Int2::Min, true) => map2(r, o, mask, |a, b| (a as i32).min(b as i32) as u32),
        (Int2::Max, true) => map2(r, o, mask, |a, b| (a as i32).max(b as i32) as u32),
        (Int2::And, _) => map2(r, o, mask, |a, b| a & b),
        (Int2::Or, _) => map2(r, o, mask, |a, b| a | b),
        (Int2::Xor, _) => map2(r, o, mask, |a, b| a ^ b),
        (Int2::ShiftLeft, _) => map2(r, o, mask, |a, b| if b > 31 { 0 } else { a << b }),
        (Int2::ShiftRight, false) => map2(r, o, mask, |a, b| if b > 31 { 0 } else { a >> b }),
        (Int2::ShiftRight, true) => map2(r, o, mask, |a, b| (a as i32 >> b.min(31)) as u32),
    }
}

fn int2_half(r: &mut Registers, op: Int2, sign: bool, o: &[u16], mask: u32) {
    // As numbers of 32 bits, of which the low half stays.
    let extend = |value: u32| if sign { value as u16 as i16 as u32 } else { value };
    let shift = matches!(op, Int2::ShiftLeft | Int2::ShiftRight);
    map2(r, o, mask, |a, b| {
        let (a, b) = (extend(a), if shift { b.min(31) } else { extend(b) });
        let value = match op {
            Int2::Add => a.wrapping_add(b),
            Int2::Sub => a.wrapping_sub(b),
            Int2::Mul => a.wrapping_mul(b),
            Int2::MulHigh => a.wrapping_mul(b) >> 16,
            Int2::Div | Int2::Rem => divided!(u32, i32, sign, op == Int2::Rem, a, b),
            Int2::Min if sign => (a as i32).min(b as i32) as u32,
            Int2::Max if sign => (a as i32).max(b as i32) as u32,
            Int2::Min => a.min(b),
            Int2::Max => a.max(b),
            Int2::And => a & b,
            Int2::Or => a | b,
            Int2::Xor => a ^ b,
            Int2::ShiftLeft => a << b,
            Int2::ShiftRight if sign => (a as i32 >> b) as u32,
            Int2::ShiftRight => a >> b,
        };
        value & HALF
    });
}

#[inline(always)]
fn int2_wide(r: &mut Registers, op: Int2, sign: bool, o: &[u16], mask: u32) {
    match op {
        Int2::Add => map2_wide(r, o, mask, u64::wrapping_add),
        Int2::ShiftLeft | Int2::ShiftRight => {
            let (a, b) = (*r.wide(o[1]), *r.narrow(o[2]));
            let value = lanes(|i| match (op, sign) {
                (Int2::ShiftRight, true) => (a[i] as i64 >> b[i].min(63)) as u64,
                _ if b[i] > 63 => 0,
                (Int2::ShiftLeft, _) => a[i] << b[i],
                _ => a[i] >> b[i],
            });
            r.set_wide(o[0], &value, mask);
        }
        _ => map2_wide(r, o, mask, |a, b| match (op, sign) {
            (Int2::Sub, _) => a.wrapping_sub(b),
            (Int2::Mul, _) => a.wrapping_mul(b),
            (Int2::MulHigh, false) => ((u128::from(a) * u128::from(b)) >> 64) as u64,
            (Int2::MulHigh, true) => ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64,
            (Int2::Div | Int2::Rem, _) => divided!(u64, i64, sign, op == Int2::Rem, a, b),
            (Int2::Min, false) => a.min(b),
            (Int2::Max, false) => a.max(b),
            (Int2::Min, true) => (a as i64).min(b as i64) as u64,
            (Int2::Max, true) => (a as i64).max(b as i64) as u64,
            (Int2::And, _) => a & b,
            (Int2::Or, _) => a | b,
            _ => a ^ b,
        }),
    }
}

#[inline(always)]
fn mul_wide(r: &mut Registers, sign: bool, bits: u32, add: bool, o: &[u16], mask: u32) {
    let (a, b) = (*r.narrow(o[1]), *r.narrow(o[2]));
    if bits == 16 {
        let extend = |value: u32| if sign { value as u16 as i16 as u32 } else { value };
        let c = if add { *r.narrow(o[3]) } else { [0; LANES] };
        let value = lanes(|i| extend(a[i]).wrapping_mul(extend(b[i])).wrapping_add(c[i]));
        return r.set_narrow(o[0], &value, mask);
    }
    let c: Lanes<u64> = if add { *r.wide(o[3]) } else { [0; LANES] };
    let value = match sign {
        false => lanes(|i| (u64::from(a[i]) * u64::from(b[i])).wrapping_add(c[i])),
        true => lanes(|i| ((i64::from(a[i] as i32) * i64::from(b[i] as i32)) as u64).wrapping_add(c[i])),
    };
    r.set_wide(o[0], &value, mask);
}

#[inline(always)]
fn map_float(r: &mut Registers, o: &[u16], mask: u32, mode: Mode, f: impl Fn(f32) -> f32) {
    map1(r, o, mask, |a| float::with_mode([f32::from_bits(a)], mode, |[a]| f(a)).to_bits());
}

#[inline(always)]
fn float1(r: &mut Registers, op: Float1, mode: Mode, o: &[u16], mask: u32) {
    let double = |f: fn(f64) -> f64| move |a: f32| f(f64::from(a)) as f32;
    match op {
        // Signs alone: what is no number keeps its bits.
        Float1::Neg if !mode.flush => map1(r, o, mask, |a| a ^ 0x8000_0000),
        Float1::Abs if !mode.flush => map1(r, o, mask, |a| a & 0x7fff_ffff),
        Float1::Neg => map_float(r, o, mask, mode, |a| -a),
        Float1::Abs => map_float(r, o, mask, mode, f32::abs),
        Float1::Reciprocal => map_float(r, o, mask, mode, |a| 1.0 / a),
        Float1::Sqrt => map_float(r, o, mask, mode, f32::sqrt),
        Float1::ReciprocalSqrt => map_float(r, o, mask, mode, double(|a| 1.0 / a.sqrt())),
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
    // Neither is no number, if they have an order.
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

#[inline(always)]
fn convert(r: &mut Registers, to: Type, from: Type, mode: Mode, integral: bool, o: &[u16], mask: u32) {
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

/// One value of another type.
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

fn pack(r: &mut Registers, bits: u32, o: &[u16], mask: u32) {
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

fn unpack(r: &mut Registers, bits: u32, o: &[u16], mask: u32) {
    let (parts, from) = o.split_at(o.len() - 1);
    let wide = bits as usize * parts.len() == 64;
    let value: Lanes<u64> = if wide { *r.wide(from[0]) } else { r.narrow(from[0]).map(u64::from) };
    for (n, &part) in parts.iter().enumerate() {
        let keep = u64::MAX >> (64 - bits);
        r.set_narrow(part, &value.map(|value| (value >> (bits * n as u32) & keep) as u32), mask);
    }
}
