//! Integers, logic, and moving of bits.

use crate::support::{lanes, random};

#[track_caller]
fn check(body: &str, expected: impl Fn(u32, u32, u32) -> u32) {
    let edge = [
        0,
        1,
        2,
        31,
        32,
        33,
        0x7fff,
        0x8000,
        0xffff,
        0x1_0000,
        0x7fff_ffff,
        0x8000_0000,
        u32::MAX - 1,
        u32::MAX,
    ];
    let mut inputs = [1, 2, 3].map(|seed| random(800, seed));
    for (i, a) in edge.into_iter().enumerate() {
        for (j, b) in edge.into_iter().enumerate() {
            inputs[0].push(a);
            inputs[1].push(b);
            inputs[2].push(edge[(i + j) % edge.len()]);
        }
    }
    let [a, b, c] = &inputs;
    for (i, result) in lanes(&[a, b, c], body).into_iter().enumerate() {
        let wanted = expected(a[i], b[i], c[i]);
        assert_eq!(result, wanted, "{body} of {:#x}, {:#x}, {:#x}", a[i], b[i], c[i]);
    }
}

#[test]
fn sums_and_products_wrap() {
    check("add.s32 %r0, %r1, %r2;", |a, b, _| (u64::from(a) + u64::from(b)) as u32);
    check("sub.s32 %r0, %r1, %r2;", |a, b, _| (i64::from(a) - i64::from(b)) as u32);
    check("mul.lo.s32 %r0, %r1, %r2;", |a, b, _| (u64::from(a) * u64::from(b)) as u32);
    check("mul.hi.u32 %r0, %r1, %r2;", |a, b, _| ((u64::from(a) * u64::from(b)) >> 32) as u32);
    check("mul.hi.s32 %r0, %r1, %r2;", |a, b, _| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32);
    check("mad.lo.s32 %r0, %r1, %r2, %r3;", |a, b, c| a.wrapping_mul(b).wrapping_add(c));
    check("neg.s32 %r0, %r1;", |a, _, _| a.wrapping_neg());
    check("abs.s32 %r0, %r1;", |a, _, _| (a as i32).wrapping_abs() as u32);
}

#[test]
fn wide_products_have_all_bits() {
    let halves = "mul.wide.u32 %rd1, %r1, %r2;\nmov.b64 {%r10, %r11}, %rd1;\nxor.b32 %r0, %r10, %r11;";
    let folded = |v: u64| v as u32 ^ (v >> 32) as u32;
    check(halves, |a, b, _| folded(u64::from(a) * u64::from(b)));
    check(&halves.replace("u32", "s32"), |a, b, _| {
        folded((i64::from(a as i32) * i64::from(b as i32)) as u64)
    });
    let added = "mov.b64 %rd2, {%r3, %r1};\nmad.wide.u32 %rd1, %r1, %r2, %rd2;\nmov.b64 {%r10, %r11}, %rd1;\nxor.b32 %r0, %r10, %r11;";
    check(added, |a, b, c| {
        folded((u64::from(a) * u64::from(b)).wrapping_add(u64::from(a) << 32 | u64::from(c)))
    });
    check("cvt.u16.u32 %h1, %r1;\ncvt.u16.u32 %h2, %r2;\nmul.wide.u16 %r0, %h1, %h2;", |a, b, _| {
        (a & 0xffff) * (b & 0xffff)
    });
}

#[test]
fn quotients_of_numbers_with_and_without_signs() {
    check("or.b32 %r2, %r2, 1;\ndiv.u32 %r0, %r1, %r2;", |a, b, _| a / (b | 1));
    check("or.b32 %r2, %r2, 1;\nrem.u32 %r0, %r1, %r2;", |a, b, _| a % (b | 1));
    check("or.b32 %r2, %r2, 1;\ndiv.s32 %r0, %r1, %r2;", |a, b, _| {
        (i64::from(a as i32) / i64::from((b | 1) as i32)) as u32
    });
    check("or.b32 %r2, %r2, 1;\nrem.s32 %r0, %r1, %r2;", |a, b, _| {
        (i64::from(a as i32) % i64::from((b | 1) as i32)) as u32
    });
    check("min.u32 %r0, %r1, %r2;", |a, b, _| if a < b { a } else { b });
    check("max.s32 %r0, %r1, %r2;", |a, b, _| if (a as i32) > b as i32 { a } else { b });
}

/// Shifts by more than the width leave nothing, or the sign.
#[test]
fn shifts_end_at_the_width() {
    check("shl.b32 %r0, %r1, %r2;", |a, b, _| a.checked_shl(b).unwrap_or(0));
    check("shr.u32 %r0, %r1, %r2;", |a, b, _| a.checked_shr(b).unwrap_or(0));
    check("shr.s32 %r0, %r1, %r2;", |a, b, _| (i64::from(a as i32) >> b.min(32)) as u32);
    let wide = "mov.b64 %rd1, {%r1, %r2};\nshr.u64 %rd1, %rd1, %r3;\ncvt.u32.u64 %r0, %rd1;";
    check(wide, |a, b, c| (u64::from(b) << 32 | u64::from(a)).checked_shr(c).unwrap_or(0) as u32);
    check("cvt.u64.u32 %rd1, %r1;\nshl.b64 %rd1, %rd1, 4;\ncvt.u32.u64 %r0, %rd1;", |a, _, _| a << 4);
}

#[test]
fn bits_are_combined_inserted_and_counted() {
    check("and.b32 %r0, %r1, %r2;", |a, b, _| a & b);
    check("xor.b32 %r0, %r1, -1;", |a, _, _| !a);
    check("not.b32 %r0, %r1;", |a, _, _| a ^ u32::MAX);
    check("popc.b32 %r0, %r1;", |a, _, _| (0..32).map(|i| a >> i & 1).sum());
    check("clz.b32 %r0, %r1;", |a, _, _| (0..32).rev().take_while(|i| a >> i & 1 == 0).count() as u32);
    check("brev.b32 %r0, %r1;", |a, _, _| (0..32).map(|i| (a >> i & 1) << (31 - i)).sum());
    // The manual's loop: bit by bit, within the width.
    check("bfi.b32 %r0, %r1, %r2, %r3, 5;", |a, b, c| {
        let (mut result, place) = (b, c & 0xff);
        for i in 0..5 {
            if place + i < 32 {
                result = result & !(1 << (place + i)) | (a >> i & 1) << (place + i);
            }
        }
        result
    });
}

#[test]
fn halves_are_packed_and_taken_apart() {
    check("mov.b32 {%h1, %h2}, %r1;\nmov.b32 %r0, {%h2, %h1};", |a, _, _| a.rotate_left(16));
    check("mov.b32 {%h1, %h2}, %r1;\nmov.b32 %r0, {0, %h2};", |a, _, _| a & 0xffff_0000);
    check("mov.b64 %rd1, {%r1, %r2};\nmov.b64 {%r10, %r0}, %rd1;", |_, b, _| b);
}

#[test]
fn comparisons_and_choices() {
    check("setp.lt.u32 %p1, %r1, %r2;\nselp.b32 %r0, %r3, %r1, %p1;", |a, b, c| if a < b { c } else { a });
    check("setp.lt.s32 %p1, %r1, %r2;\nselp.u32 %r0, 1, 0, %p1;", |a, b, _| u32::from((a as i32) < b as i32));
    check(
        "setp.ne.u32 %p0, 0, 0;\nsetp.ge.and.u32 %p2, %r1, %r2, !%p0;\nselp.b32 %r0, 1, 0, %p2;",
        |a, b, _| u32::from(a >= b),
    );
    check("setp.eq.s32 %p1|%p2, %r1, %r2;\nselp.b32 %r0, 7, 9, %p2;", |a, b, _| if a != b { 7 } else { 9 });
    let logic = "setp.lt.u32 %p1, %r1, %r2;\nsetp.gt.u32 %p2, %r2, %r3;\nxor.pred %p3, %p1, %p2;\nnot.pred %p4, %p3;\n@%p4 mov.u32 %r0, 1;\n@!%p4 mov.u32 %r0, 2;";
    check(logic, |a, b, c| if (a < b) == (b > c) { 1 } else { 2 });
    check(
        "cvt.u16.u32 %h1, %r1;\ncvt.u16.u32 %h2, %r2;\nsetp.lt.s16 %p1, %h1, %h2;\nselp.b32 %r0, 1, 0, %p1;",
        |a, b, _| u32::from((a as i16) < b as i16),
    );
}

#[test]
fn numbers_of_16_bits_wrap_at_theirs() {
    let body = |op: &str| {
        format!("cvt.u16.u32 %h1, %r1;\ncvt.u16.u32 %h2, %r2;\n{op} %h3, %h1, %h2;\ncvt.u32.u16 %r0, %h3;")
    };
    check(&body("add.s16"), |a, b, _| u32::from((a as u16).wrapping_add(b as u16)));
    check(&body("mul.lo.u16"), |a, b, _| u32::from((a as u16).wrapping_mul(b as u16)));
    check(&body("max.u16"), |a, b, _| u32::from((a as u16).max(b as u16)));
    check(&body("min.s16"), |a, b, _| u32::from((a as i16).min(b as i16) as u16));
}
