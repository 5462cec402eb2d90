//! Executes operations on integers of 16, 32 or 64 bits.

use crate::lanes::{LANES, Lanes, Registers, lanes, lanes_of, map1, map2, map2_wide};
use crate::program::{Int1, Int2, Type};

const HALF: u32 = 0xffff;

/// Interprets a value of `bits` bits as signed.
#[inline(always)]
pub fn signed(value: u64, bits: u32) -> i64 {
    (value << (64 - bits)) as i64 >> (64 - bits)
}

pub fn int1(r: &mut Registers, op: Int1, ty: Type, o: &[u16], mask: u32) {
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

/// Division by zero is undefined; here the quotient has all bits set, and the remainder is the dividend.
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
pub fn int2(r: &mut Registers, op: Int2, sign: bool, o: &[u16], mask: u32) {
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

pub fn int2_half(r: &mut Registers, op: Int2, sign: bool, o: &[u16], mask: u32) {
    // Computes with 32 bits and keeps the low half.
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
pub fn int2_wide(r: &mut Registers, op: Int2, sign: bool, o: &[u16], mask: u32) {
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
pub fn mul_wide(r: &mut Registers, sign: bool, bits: u32, add: bool, o: &[u16], mask: u32) {
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
