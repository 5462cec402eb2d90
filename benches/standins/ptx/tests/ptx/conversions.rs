//! Conversions between floats, halves and integers.

use crate::support::{edges, floats, lanes, random, same};

/// The value of a half with this many fraction bits, by the definition of the format.
fn half_value(bits: u32, fraction_bits: u32) -> f64 {
    let exponent_bits = 15 - fraction_bits;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let (sign, exponent) = (bits >> 15, bits >> fraction_bits & ((1 << exponent_bits) - 1));
    let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1u32 << fraction_bits);
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        e if e == (1 << exponent_bits) - 1 && fraction == 0.0 => f64::INFINITY,
        e if e == (1 << exponent_bits) - 1 => f64::NAN,
        e => (1.0 + fraction) * 2f64.powi(e as i32 - bias),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

/// The nearest half, found by searching all halves.
fn nearest_half(value: f32, fraction_bits: u32) -> u32 {
    if value.is_nan() {
        return 0x7fff;
    }
    let infinity = ((1 << (15 - fraction_bits)) - 1) << fraction_bits;
    // Positive halves are ordered by their bits; infinity represents the next power of two.
    let magnitude = f64::from(value.abs());
    let place = |bits: u32| match bits == infinity {
        true => 2.0 * half_value(infinity - (1 << fraction_bits), fraction_bits),
        false => half_value(bits, fraction_bits),
    };
    let below =
        (0..infinity).collect::<Vec<_>>().partition_point(|&bits| place(bits) <= magnitude) as u32 - 1;
    let (down, up) = (magnitude - place(below), place(below + 1) - magnitude);
    let near = if down < up || (down == up && below & 1 == 0) { below } else { below + 1 };
    near | (value.to_bits() >> 16 & 0x8000)
}

fn values() -> Vec<f32> {
    let mut values = edges(7);
    // Midpoints between two halves, and their neighbours.
    for bits in [
        0x3f80_8000,
        0x3f81_8000,
        0x3f80_1000,
        0x3f80_3000,
        0x3300_0000,
        0x3380_0000,
        0x387f_e000,
        0x477f_f000,
    ] {
        values.extend([bits - 1, bits, bits + 1].map(f32::from_bits));
    }
    values.truncate(1024);
    values.extend(vec![0.0; 1024 - values.len()]);
    values
}

#[test]
fn f32_to_halves_is_the_nearest() {
    let values = values();
    for (kind, fraction_bits) in [("bf16", 7), ("f16", 10)] {
        let body = format!("cvt.rn.{kind}.f32 %h1, %r1;\ncvt.u32.u16 %r0, %h1;");
        for (&value, bits) in values.iter().zip(floats(&[&values], &body)) {
            let (bits, wanted) = (bits.to_bits(), nearest_half(value, fraction_bits));
            assert_eq!(bits, wanted, "{kind} of {value:e} ({:#x})", value.to_bits());
        }
    }
}

/// From f64 directly; via f32, the value would be rounded twice.
#[test]
fn f64_to_halves_is_rounded_once() {
    // Midpoints of two halves, and values that differ from them in the last bit of f64.
    for (kind, middle, low, high) in
        [("bf16", 1.0 + 1.0 / 256.0, 0x3f80, 0x3f81), ("f16", 1.0 + 1.0 / 2048.0, 0x3c00, 0x3c01)]
    {
        for (value, wanted) in
            [(f64::next_down(middle), low), (middle, low), (f64::next_up(middle), high), (1e300, 0)]
        {
            let body = format!(
                ".reg .f64 %fd;\nmov.f64 %fd, 0d{:016X};\ncvt.rn.{kind}.f64 %h1, %fd;\ncvt.u32.u16 %r0, %h1;",
                value.to_bits()
            );
            let wanted = if value == 1e300 { if kind == "f16" { 0x7c00 } else { 0x7f80 } } else { wanted };
            assert_eq!(lanes(&[&[0]], &body), [wanted], "{kind} of {value:e}");
        }
    }
    assert_eq!(lanes(&[&[3]], "cvt.rn.f64.u32 %rd1, %r1;\ncvt.rn.f32.f64 %r0, %rd1;"), [3f32.to_bits()]);
}

#[test]
fn two_floats_to_one_register_of_halves() {
    let values = values();
    let other: Vec<f32> = values.iter().rev().copied().collect();
    for (kind, fraction_bits) in [("bf16x2", 7), ("f16x2", 10)] {
        let results = floats(&[&values, &other], &format!("cvt.rn.{kind}.f32 %r0, %r1, %r2;"));
        for (i, bits) in results.into_iter().enumerate() {
            // The first operand is the upper half.
            let wanted = nearest_half(values[i], fraction_bits) << 16 | nearest_half(other[i], fraction_bits);
            assert_eq!(bits.to_bits(), wanted, "{kind} {i}");
        }
    }
}

/// All 65536 of both kinds.
#[test]
fn halves_to_f32_are_exact() {
    for (kind, fraction_bits) in [("bf16", 7), ("f16", 10)] {
        for block in 0..64 {
            let bits: Vec<u32> = (0..1024).map(|i| block * 1024 + i).collect();
            let body = format!("cvt.u16.u32 %h1, %r1;\ncvt.f32.{kind} %r0, %h1;");
            for (&bits, result) in bits.iter().zip(lanes(&[&bits], &body)) {
                let wanted = half_value(bits, fraction_bits) as f32;
                assert!(same(f32::from_bits(result), wanted), "{kind} {bits:#x}: {result:#x}");
            }
        }
    }
}

/// Ten fraction bits; ties away from zero.
#[test]
fn tf32_is_the_nearest_and_further_from_zero() {
    let values = values();
    let results = floats(&[&values], "cvt.rna.tf32.f32 %r0, %r1;");
    for (&value, result) in values.iter().zip(results) {
        if value.is_nan() {
            assert!(result.is_nan());
        } else if value.is_finite() {
            // The place of the tenth bit, at least that of the smallest normal number.
            let exponent = value.abs().max(f32::MIN_POSITIVE).to_bits() >> 23;
            let unit = 2f64.powi(exponent as i32 - 127 - 10);
            let wanted = (f64::from(value) / unit).round() * unit;
            let wanted = if wanted.abs() >= 2f64.powi(128) { f64::INFINITY.copysign(wanted) } else { wanted };
            assert!(f64::from(result) == wanted, "{value:e}: {result:e} and not {wanted:e}");
        } else {
            assert_eq!(result, value);
        }
    }
}

#[test]
fn integers_to_floats_are_rounded_as_asked() {
    let mut values = random(1000, 9);
    values.extend([0, 1, u32::MAX, 0x7fff_ffff, 0x8000_0000, 0x0100_0001, 0x0100_0003, 0xff00_0001]);
    let run = |body: &str| lanes(&[&values], body).into_iter().map(f32::from_bits).collect::<Vec<_>>();
    let directions = [("rn", 0), ("rz", 1), ("rm", 2), ("rp", 3)];
    for (name, direction) in directions {
        for (kind, signed) in [("s32", true), ("u32", false)] {
            for (&value, result) in values.iter().zip(run(&format!("cvt.{name}.f32.{kind} %r0, %r1;"))) {
                let exact = if signed { i64::from(value as i32) } else { i64::from(value) };
                // The floats around it as integers, which they are.
                let near = exact as f32;
                let (low, high) = match (near as i64).cmp(&exact) {
                    std::cmp::Ordering::Less => (near, near.next_up()),
                    std::cmp::Ordering::Equal => (near, near),
                    std::cmp::Ordering::Greater => (near.next_down(), near),
                };
                let wanted = match direction {
                    0 => near,
                    1 if exact < 0 => high,
                    1 | 2 => low,
                    _ => high,
                };
                assert_eq!(result, wanted, "{name} {kind} {exact}");
            }
        }
    }
    let halves = lanes(&[&values], "cvt.rn.bf16.s32 %h1, %r1;\ncvt.u32.u16 %r0, %h1;");
    for (&value, bits) in values.iter().zip(halves) {
        // The nearest bf16: no other has a smaller distance.
        let (exact, at) = (f64::from(value as i32), |bits: u32| half_value(bits, 7));
        let distance = (at(bits) - exact).abs();
        assert!(distance <= (at(bits + 1) - exact).abs(), "{value}");
        assert!(bits & 0x7fff == 0 || distance <= (at(bits - 1) - exact).abs(), "{value}");
    }
}

#[test]
fn floats_to_integers_stay_within_their_limits() {
    let values = edges(11);
    for (name, round) in [
        ("rzi", f64::trunc as fn(f64) -> f64),
        ("rni", f64::round_ties_even),
        ("rmi", f64::floor),
        ("rpi", f64::ceil),
    ] {
        let signed = floats(&[&values], &format!("cvt.{name}.s32.f32 %r0, %r1;"));
        let unsigned = floats(&[&values], &format!("cvt.{name}.u32.f32 %r0, %r1;"));
        let whole = floats(&[&values], &format!("cvt.{name}.f32.f32 %r0, %r1;"));
        for (i, &value) in values.iter().enumerate() {
            let rounded = round(f64::from(value));
            // Rust's casts saturate to the limits of their type and turn NaN into 0, as in PTX.
            assert_eq!(signed[i].to_bits(), rounded as i32 as u32, "{name} s32 {value:e}");
            assert_eq!(unsigned[i].to_bits(), rounded as u32, "{name} u32 {value:e}");
            assert!(same(whole[i], rounded as f32), "{name} f32 {value:e}");
        }
    }
}

#[test]
fn integers_of_other_widths() {
    let values = random(256, 3);
    let check = |body: &str, expected: fn(u32) -> u32| {
        for (&value, result) in values.iter().zip(lanes(&[&values], body)) {
            assert_eq!(result, expected(value), "{body} of {value:#x}");
        }
    };
    check("cvt.s64.s32 %rd1, %r1;\nshr.u64 %rd1, %rd1, 32;\ncvt.u32.u64 %r0, %rd1;", |v| {
        (v as i32 >> 31) as u32
    });
    check("cvt.u64.u32 %rd1, %r1;\nshr.u64 %rd1, %rd1, 32;\ncvt.u32.u64 %r0, %rd1;", |_| 0);
    check("cvt.u16.u32 %h1, %r1;\ncvt.s32.s16 %r0, %h1;", |v| v as i16 as u32);
    check("cvt.u16.u32 %h1, %r1;\ncvt.u32.u8 %r0, %h1;", |v| v & 0xff);
    check("cvt.sat.u16.u32 %h1, %r1;\ncvt.u32.u16 %r0, %h1;", |v| v.min(0xffff));
    check("cvt.u16.u32 %h1, %r1;\ncvt.rn.f32.u16 %r0, %h1;", |v| ((v & 0xffff) as f32).to_bits());
}
