//! Arithmetic on f32 and on halves, with all rounding modes.

use crate::exact::Exact;
use crate::support::{edges, floats, lanes, same};

/// Runs `body` on edge values in blocks of up to 1024 threads, and compares the results with `expected`.
#[track_caller]
fn check(body: &str, expected: impl Fn(f32, f32, f32) -> f32) {
    let [a, b, c] = [edges(1), edges(2), edges(3)];
    let results = floats(&[&a, &b, &c], body);
    for (i, result) in results.into_iter().enumerate() {
        let wanted = expected(a[i], b[i], c[i]);
        assert!(
            same(result, wanted),
            "{body}\n{:e}, {:e}, {:e}: {result:e} and not {wanted:e}",
            a[i],
            b[i],
            c[i]
        );
    }
}

/// The sum of a product and a number, rounded by `round`. IEEE arithmetic gives the results that are not
/// finite sums.
fn rounded(a: f32, b: f32, c: f32, round: fn(Exact) -> f32, down: bool) -> f32 {
    let ieee = a.mul_add(b, c);
    if ![a, b, c].iter().all(|v| v.is_finite()) {
        return ieee;
    }
    let sum = Exact::product(a, b).plus(Exact::of(c));
    if sum.is_zero() {
        // Zeros of the same sign keep it; opposite numbers give +0, or -0 if results are rounded down.
        let product_negative = a.is_sign_negative() != b.is_sign_negative();
        let zeros = (a == 0.0 || b == 0.0) && c == 0.0;
        let negative =
            if zeros && product_negative == c.is_sign_negative() { product_negative } else { down };
        return if negative { -0.0 } else { 0.0 };
    }
    let value = round(sum);
    // A value rounded to zero keeps its sign.
    if value == 0.0 { 0.0f32.copysign(if sum.is_negative() { -1.0 } else { 1.0 }) } else { value }
}

fn toward_zero(sum: Exact) -> f32 {
    if sum.is_negative() { sum.ceiling() } else { sum.floor() }
}

type Rounding = (&'static str, fn(Exact) -> f32, bool);

const ROUNDINGS: [Rounding; 4] = [
    ("rn", Exact::nearest, false),
    ("rz", toward_zero, false),
    ("rm", Exact::floor, true),
    ("rp", Exact::ceiling, false),
];

#[test]
fn fma_is_rounded_once_in_each_direction() {
    for (name, round, down) in ROUNDINGS {
        check(&format!("fma.{name}.f32 %r0, %r1, %r2, %r3;"), |a, b, c| rounded(a, b, c, round, down));
    }
}

/// Sums that cancel all but the last bits of a product, and ties.
#[test]
fn fma_keeps_the_bits_of_its_product() {
    let near = |bits: u32| f32::from_bits(0x3f80_0000 + bits);
    let a: Vec<f32> = (0..512).map(|i| near(i * 16381 % 0x80_0000)).collect();
    let b: Vec<f32> = (0..512).map(|i| near(i * 7919 % 0x80_0000)).collect();
    let c: Vec<f32> = a.iter().zip(&b).map(|(a, b)| -(a * b)).collect();
    for (name, round, down) in ROUNDINGS {
        let results = floats(&[&a, &b, &c], &format!("fma.{name}.f32 %r0, %r1, %r2, %r3;"));
        for i in 0..results.len() {
            assert!(same(results[i], rounded(a[i], b[i], c[i], round, down)), "{name} {i}");
        }
        assert!(results.iter().any(|&v| v != 0.0));
    }
}

#[test]
fn sums_and_products_are_rounded_in_each_direction() {
    for (name, round, down) in ROUNDINGS {
        check(&format!("add.{name}.f32 %r0, %r1, %r2;"), |a, b, _| rounded(a, 1.0, b, round, down));
        check(&format!("sub.{name}.f32 %r0, %r1, %r2;"), |a, b, _| rounded(a, 1.0, -b, round, down));
        check(&format!("mul.{name}.f32 %r0, %r1, %r2;"), |a, b, _| {
            let zero = if a.is_sign_negative() == b.is_sign_negative() { 0.0 } else { -0.0 };
            rounded(a, b, zero, round, down)
        });
    }
    check("add.f32 %r0, %r1, %r2;", |a, b, _| rounded(a, 1.0, b, Exact::nearest, false));
}

#[test]
fn flushed_operations_know_no_subnormals() {
    let flush = |v: f32| if v.is_subnormal() { 0.0f32.copysign(v) } else { v };
    check("add.ftz.f32 %r0, %r1, %r2;", |a, b, _| flush(flush(a) + flush(b)));
    check("mul.ftz.f32 %r0, %r1, %r2;", |a, b, _| flush(flush(a) * flush(b)));
    let results = floats(&[&[1e-40, -1e-40, f32::MIN_POSITIVE, 3.0]], "mul.ftz.f32 %r0, %r1, 0f3F000000;");
    assert_eq!(results.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), [0, 0x8000_0000, 0, 0x3fc0_0000]);
}

#[test]
fn saturated_results_are_between_zero_and_one() {
    let bound = |v: f32| if v.is_nan() { 0.0 } else { v.clamp(0.0, 1.0) + 0.0 };
    check("add.sat.f32 %r0, %r1, %r2;", |a, b, _| bound(a + b));
    check("fma.rn.sat.f32 %r0, %r1, %r2, %r3;", |a, b, c| bound(a.mul_add(b, c)));
    check("cvt.sat.f32.f32 %r0, %r1;", |a, _, _| bound(a));
}

/// A quotient or a root is the nearest if, after multiplying out, no neighbour is closer.
#[test]
fn quotients_and_roots_are_the_nearest() {
    let moderate = |v: f32| v.is_normal() && (1e-15..1e15).contains(&v.abs());
    let distance = |x: f32, y: f32, wanted: f32| Exact::product(x, y).minus(Exact::of(wanted)).magnitude();
    let (a, b) = (edges(4), edges(5));
    let mut checked = 0;
    for body in ["div.rn.f32 %r0, %r1, %r2;", "rcp.rn.f32 %r0, %r2;"] {
        let results = floats(&[&a, &b], body);
        for i in 0..results.len() {
            let dividend = if body.starts_with("rcp") { 1.0 } else { a[i] };
            if moderate(dividend) && moderate(b[i]) {
                let best = distance(results[i], b[i], dividend);
                for other in [results[i].next_up(), results[i].next_down()] {
                    assert!(
                        best.compare(distance(other, b[i], dividend)).is_le(),
                        "{body} {dividend} / {}",
                        b[i]
                    );
                }
                checked += 1;
            } else if !dividend.is_finite() || !b[i].is_finite() || b[i] == 0.0 {
                assert!(same(results[i], dividend / b[i]), "{body} {dividend} / {}", b[i]);
            }
        }
    }
    assert!(checked > 300, "{checked}");
    let roots = floats(&[&a], "sqrt.rn.f32 %r0, %r1;");
    for (&a, &root) in a.iter().zip(&roots) {
        if moderate(a) && a > 0.0 {
            // The root lies between the midpoints to both neighbours: (r ± u/2)² = r² ± r·u + u²/4.
            let half = (root.next_up() - root) / 2.0;
            let square = |sign: f32| {
                let twice = Exact::product(2.0 * sign * root, half);
                Exact::product(root, root).plus(twice).plus(Exact::product(half, half))
            };
            assert!(
                square(1.0).compare(Exact::of(a)).is_ge() && square(-1.0).compare(Exact::of(a)).is_le(),
                "{a}"
            );
        } else if a < 0.0 {
            assert!(root.is_nan());
        }
    }
}

/// The manual's bounds: 2 ulp for `ex2`, 2⁻²² for `lg2` near 1, and so on. Ours are exact.
#[test]
fn approximate_functions_are_within_their_bounds() {
    let x: Vec<f32> = (0..1024).map(|i| (i as f32 - 512.0) * 0.311).collect();
    type Function = (&'static str, fn(f64) -> f64);
    let functions: [Function; 6] = [
        ("ex2.approx.ftz.f32 %r0, %r1;", |x| {
            if x.exp2() < f64::from(f32::MIN_POSITIVE) { 0.0 } else { x.exp2() }
        }),
        ("ex2.approx.f32 %r0, %r1;", f64::exp2),
        ("tanh.approx.f32 %r0, %r1;", f64::tanh),
        ("sin.approx.f32 %r0, %r1;", f64::sin),
        ("rsqrt.approx.f32 %r0, %r1;", |x| 1.0 / x.sqrt()),
        ("lg2.approx.f32 %r0, %r1;", f64::log2),
    ];
    for (body, function) in functions {
        for (&x, result) in x.iter().zip(floats(&[&x], body)) {
            let exact = function(f64::from(x)) as f32;
            assert!(same(result, exact), "{body} {x}: {result:e} and not {exact:e}");
        }
    }
    let special =
        floats(&[&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-40]], "ex2.approx.ftz.f32 %r0, %r1;");
    assert!(special[0].is_nan());
    assert_eq!(special[1..], [f32::INFINITY, 0.0, 1.0, 1.0]);
}

#[test]
fn minima_prefer_numbers_unless_they_are_told_otherwise() {
    let (a, b) = ([1.0, f32::NAN, f32::NAN, 0.0, -0.0, 3.0], [2.0, 5.0, f32::NAN, -0.0, 0.0, f32::NAN]);
    let bits = |body: &str| floats(&[&a, &b], body).iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let nan = 0x7fff_ffff;
    assert_eq!(
        bits("min.f32 %r0, %r1, %r2;"),
        [0x3f80_0000, 0x40a0_0000, nan, 0x8000_0000, 0x8000_0000, 0x4040_0000]
    );
    assert_eq!(bits("max.f32 %r0, %r1, %r2;"), [0x4000_0000, 0x40a0_0000, nan, 0, 0, 0x4040_0000]);
    assert_eq!(bits("max.NaN.f32 %r0, %r1, %r2;"), [0x4000_0000, nan, nan, 0, 0, nan]);
    assert_eq!(bits("min.NaN.f32 %r0, %r1, %r2;"), [0x3f80_0000, nan, nan, 0x8000_0000, 0x8000_0000, nan]);
}

#[test]
fn signs_are_changed_and_copied() {
    check("neg.f32 %r0, %r1;", |a, _, _| -a);
    check("abs.f32 %r0, %r1;", |a, _, _| a.abs());
    // The sign of the first operand with the value of the second.
    check("copysign.f32 %r0, %r1, %r2;", |a, b, _| b.copysign(a));
}

#[test]
fn comparisons_of_what_is_no_number() {
    let (a, b) =
        ([1.0, 2.0, 2.0, f32::NAN, 1.0, f32::NAN, 0.0], [2.0, 1.0, 2.0, 1.0, f32::NAN, f32::NAN, -0.0]);
    let truths = |compare: &str| {
        let body = format!("setp.{compare}.f32 %p1, %r1, %r2;\nselp.b32 %r0, 1, 0, %p1;");
        floats(&[&a, &b], &body).iter().map(|v| v.to_bits()).collect::<Vec<_>>()
    };
    assert_eq!(truths("lt"), [1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(truths("leu"), [1, 0, 1, 1, 1, 1, 1]);
    assert_eq!(truths("gtu"), [0, 1, 0, 1, 1, 1, 0]);
    assert_eq!(truths("geu"), [0, 1, 1, 1, 1, 1, 1]);
    assert_eq!(truths("eq"), [0, 0, 1, 0, 0, 0, 1]);
    assert_eq!(truths("ne"), [1, 1, 0, 0, 0, 0, 0]);
    assert_eq!(truths("neu"), [1, 1, 0, 1, 1, 1, 0]);
    assert_eq!(truths("num"), [1, 1, 1, 0, 0, 0, 1]);
    assert_eq!(truths("nan"), [0, 0, 0, 1, 1, 1, 0]);
}

#[test]
fn comparisons_that_give_numbers() {
    let (a, b) = ([1.0, 2.0, f32::NAN], [2.0, 1.0, 1.0]);
    let bits = |body: &str| floats(&[&a, &b], body).iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits("set.lt.f32.f32 %r0, %r1, %r2;"), [0x3f80_0000, 0, 0]);
    assert_eq!(bits("set.geu.u32.f32 %r0, %r1, %r2;"), [0, u32::MAX, u32::MAX]);
    let halves = "cvt.rn.f16.f32 %h1, %r1;\nset.nan.f16.f16 %h2, %h1, %h1;\ncvt.u32.u16 %r0, %h2;";
    assert_eq!(bits(halves), [0, 0, 0x3c00]);
}

/// Halves: the exact result, rounded once to 8 or 11 bits, even where f32 and f64 would round first.
#[test]
fn arithmetic_on_halves_is_rounded_once() {
    // 1 + 2⁻⁸ is the midpoint of two bf16; the added value is far below the last bit of f64.
    let body = "
        .reg .b16 a, b, c, d;
        mov.b32 {a, b}, %r1;
        mov.b32 {c, d}, %r2;
        fma.rn.bf16 d, a, b, c;
        cvt.u32.u16 %r0, d;";
    // 1.0078125 · 1.9921875 + tiny, with both signs, and an exact sum.
    let product = |a: u32, b: u32| b << 16 | a;
    let inputs =
        [product(0x3f81, 0x3f81), product(0x3f81, 0x3f81), product(0x3f80, 0x4000), product(0x3f88, 0x3f88)];
    let third = [0x0080, 0x8080, 0x3f80, 0x0000];
    // (1 + 2⁻⁷)² = 1 + 2⁻⁶ + 2⁻¹⁴, nearest 1 + 2⁻⁶; 2 + 1; (1 + 2⁻⁴)² = 1 + 2⁻³ + 2⁻⁸, a tie.
    assert_eq!(lanes(&[&inputs, &third], body), [0x3f82, 0x3f82, 0x4040, 0x3f90]);
    // The tie again, with tiny numbers added on both sides.
    assert_eq!(lanes(&[&[inputs[3]; 3], &[0x0080, 0x8080, 0x8000]], body), [0x3f91, 0x3f90, 0x3f90]);
    let sums = "
        .reg .b16 a, b, d;
        cvt.u16.u32 a, %r1;
        cvt.u16.u32 b, %r2;
        add.bf16 d, a, b;
        cvt.u32.u16 %r0, d;";
    assert_eq!(lanes(&[&[0x3f80, 0x3f80], &[0x3b80, 0xbf80]], sums), [0x3f80, 0]);
}
