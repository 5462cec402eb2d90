//! Products compared with sums in f64, and bit for bit with sums in the order of k.

use super::support::{Half, Tile, registers, run, with_shared};

/// A warpgroup product: 64 rows, `b.lines` columns, `b.k` elements along the sum.
#[derive(Debug, Clone, Copy)]
struct Case {
    half: Half,
    /// A in shared memory, or in registers if `None`.
    a: Option<Tile>,
    b: Tile,
    /// Set if D starts with values that are added to.
    adds: bool,
}

impl Case {
    fn text(&self, words: usize) -> String {
        let (columns, half) = (self.b.lines, self.half.name());
        let steps = self.b.k / 16;
        let b_start = self.a.map_or(0, |a| a.bytes());
        let mut body = String::new();
        for i in 0..columns / 2 {
            body += &format!("ld.global.f32 %d{i}, [%in+{}];\n", 4 * i);
        }
        if self.a.is_none() {
            // Registers of A are behind the words of the tile.
            body += &format!(
                "ld.param.u64 %x, [p1];\nmul.wide.u32 %y, %t, {};\nadd.s64 %x, %x, %y;\n",
                16 * steps
            );
            for i in 0..4 * steps {
                body += &format!("ld.global.u32 %a{i}, [%x+{}];\n", 4 * (words + i));
            }
        }
        body += "fence.proxy.async;\nbar.sync 0;\nwgmma.fence.sync.aligned;\n";
        for step in 0..steps {
            let descriptor = |tile: &Tile, start: usize| tile.descriptor(start) + tile.advance(step);
            let b = descriptor(&self.b, b_start);
            let (a, trans_a) = match &self.a {
                Some(tile) => {
                    body += &format!("mov.u64 %da, {};\n", descriptor(tile, 0));
                    ("%da".to_owned(), format!("{}, ", u32::from(tile.transposed)))
                }
                None => {
                    let four: Vec<_> = (0..4).map(|i| format!("%a{}", 4 * step + i)).collect();
                    (format!("{{{}}}", four.join(", ")), String::new())
                }
            };
            body += &format!(
                "mov.u64 %db, {b};\nmov.u32 %r3, {};\n{{\n.reg .pred p;\nsetp.ne.b32 p, %r3, 0;
                wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half} {{{}}}, {a}, %db, p, 1, 1, {trans_a}{};\n}}\n",
                u32::from(self.adds || step > 0),
                registers("d", columns / 2),
                u32::from(self.b.transposed)
            );
        }
        body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n";
        for i in 0..columns / 2 {
            body += &format!("st.global.f32 [%out+{}], %d{i};\n", 4 * i);
        }
        with_shared(words, &body)
    }

    #[track_caller]
    fn check(&self) {
        let (columns, k, half) = (self.b.lines, self.b.k, self.half);
        let (a, b) = (half.random(64 * k, 1), half.random(columns * k, 2));
        let c: Vec<f32> = half.random(128 * 128, 3).iter().map(|&bits| half.number(bits) as f32).collect();
        let mut shared = self.a.map_or(Vec::new(), |tile| tile.image(&a));
        shared.extend(self.b.image(&b));
        let words = shared.len();
        if self.a.is_none() {
            // Fragments of A as drawn in the manual: two elements of a row in each register.
            for thread in 0..128 {
                for register in 0..k / 4 {
                    let row = 16 * (thread / 32) + thread % 32 / 4 + 8 * (register % 2);
                    let first = 16 * (register / 4) + 2 * (thread % 4) + 8 * (register % 4 / 2);
                    let of = |k_of: usize| u32::from(a[row * k + k_of]);
                    shared.push(of(first) | of(first + 1) << 16);
                }
            }
        }
        let bits: Vec<u32> = c.iter().map(|value| value.to_bits()).collect();
        let results =
            run(&self.text(words), 128, &shared, &bits).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        for thread in 0..128 {
            for register in 0..columns / 2 {
                let row = 16 * (thread / 32) + thread % 32 / 4 + 8 * (register / 2 % 2);
                let column = 8 * (register / 4) + 2 * (thread % 4) + register % 2;
                let begin = if self.adds { c[128 * thread + register] } else { 0.0 };
                let (mut exact, mut size, mut rounded) = (f64::from(begin), 1.0, begin);
                for i in 0..k {
                    let (a, b) = (half.number(a[row * k + i]), half.number(b[column * k + i]));
                    exact += a * b;
                    size += (a * b).abs();
                    rounded = (a as f32).mul_add(b as f32, rounded);
                }
                let result = f32::from_bits(results[128 * thread + register]);
                let at = format!("{self:?}: row {row}, column {column}");
                assert!((f64::from(result) - exact).abs() <= size * 1e-6, "{at}: {result} and {exact}");
                assert_eq!(result.to_bits(), rounded.to_bits(), "{at}: {result} and {rounded}");
            }
        }
    }
}

fn tile(lines: usize, k: usize, transposed: bool) -> Tile {
    Tile { lines, k, transposed, chunks: 8 }
}

#[test]
fn products_of_two_matrices_in_shared_memory() {
    for half in [Half::Bf16, Half::F16] {
        for columns in [32, 64, 128] {
            for (trans_a, trans_b) in [(false, false), (false, true), (true, false), (true, true)] {
                for (k, adds) in [(16, false), (64, true)] {
                    Case { half, a: Some(tile(64, k, trans_a)), b: tile(columns, k, trans_b), adds }.check();
                }
            }
        }
    }
}

#[test]
fn products_of_registers_and_a_matrix_in_shared_memory() {
    for half in [Half::Bf16, Half::F16] {
        for columns in [32, 64, 128] {
            for (k, transposed, adds) in
                [(64, false, true), (64, true, false), (16, true, true), (128, false, false)]
            {
                Case { half, a: None, b: tile(columns, k, transposed), adds }.check();
            }
        }
    }
}

/// Every possible number of columns, and sums along two panels of 64.
#[test]
fn products_of_other_sizes() {
    for columns in (8..=128).step_by(8).chain([192, 256]) {
        for transposed in [false, true] {
            let (a, b) = (Some(tile(64, 64, false)), tile(columns, 64, transposed));
            Case { half: Half::Bf16, a, b, adds: false }.check();
        }
    }
    let (a, b) = (Some(tile(64, 128, false)), tile(64, 128, false));
    Case { half: Half::F16, a, b, adds: true }.check();
    let (a, b) = (Some(tile(64, 128, true)), tile(128, 128, true));
    Case { half: Half::F16, a, b, adds: false }.check();
}

#[test]
fn products_with_other_swizzling() {
    for chunks in [1, 2, 4] {
        for (trans_a, trans_b) in [(false, false), (false, true), (true, false), (true, true)] {
            let tile = |lines, transposed| Tile { chunks, ..tile(lines, 64, transposed) };
            let (a, b) = (Some(tile(64, trans_a)), tile(128, trans_b));
            Case { half: Half::Bf16, a, b, adds: true }.check();
        }
    }
}
