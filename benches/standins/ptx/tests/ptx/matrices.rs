//! Fragments of matrices: the elements of each lane, and products compared with plain ones.

use kiln_ptx::DeviceMemory;

use crate::support::{Buffer, kernel, launch, random, text};

/// Small whole numbers, whose products and sums are exact in every format.
fn whole(len: usize, seed: u64) -> Vec<i32> {
    random(len, seed).into_iter().map(|bits| (bits % 17) as i32 - 8).collect()
}

fn bf16(value: i32) -> u32 {
    (value as f32).to_bits() >> 16
}

/// The f16 of a whole number up to 2048.
fn f16(value: i32) -> u32 {
    if value == 0 {
        return 0;
    }
    let exponent = value.unsigned_abs().ilog2();
    let fraction = (value.unsigned_abs() << 10 >> exponent) & 0x3ff;
    u32::from(value < 0) << 15 | (exponent + 15) << 10 | fraction
}

/// The plain product of row-major matrices, m × k and k × n, plus c.
fn product(a: &[i32], b: &[i32], c: &[i32], [m, n, k]: [usize; 3]) -> Vec<i32> {
    let one = |row: usize, column: usize| {
        (0..k).map(|i| a[row * k + i] * b[i * n + column]).sum::<i32>() + c[row * n + column]
    };
    (0..m * n).map(|i| one(i / n, i % n)).collect()
}

/// Runs one warp: loads registers of A, B and C from the buffers lane by lane, and stores those of D.
fn mma(name: &str, [a, b]: [usize; 2], fragments: [Vec<u32>; 3]) -> Vec<u32> {
    let memory = DeviceMemory::default();
    let inputs = fragments.map(|values| Buffer::new(&memory, &values));
    let result = Buffer::raw(&memory, 32 * 4);
    let list = |letter: &str, count: usize| {
        (0..count).map(|i| format!("%{letter}{i}")).collect::<Vec<_>>().join(", ")
    };
    let mut code =
        String::from(".reg .b32 %a<4>, %b<4>, %c<4>, %d<4>, %t;\n.reg .b64 %x, %y;\nmov.u32 %t, %tid.x;\n");
    for (number, (letter, count)) in [("a", a), ("b", b), ("c", 4)].into_iter().enumerate() {
        code += &format!(
            "ld.param.u64 %x, [p{}];\nmul.wide.u32 %y, %t, {};\nadd.s64 %x, %x, %y;\n",
            number + 1,
            4 * count
        );
        for i in 0..count {
            code += &format!("ld.global.u32 %{letter}{i}, [%x+{}];\n", 4 * i);
        }
    }
    code += &format!(
        "{name} {{{}}}, {{{}}}, {{{}}}, {{{}}};\n",
        list("d", 4),
        list("a", a),
        list("b", b),
        list("c", 4)
    );
    code += "ld.param.u64 %x, [p0];\nmul.wide.u32 %y, %t, 16;\nadd.s64 %x, %x, %y;\nst.global.v4.b32 [%x], {%d0, %d1, %d2, %d3};";
    let buffers = [&result, &inputs[0], &inputs[1], &inputs[2]];
    launch(&kernel(&text(4, "", &code)), &memory, [1, 32], &buffers).unwrap();
    result.values()
}

/// The fragments of `m16n8k8` and `m16n8k16` as listed in the manual: `groupID = lane >> 2`, `threadID = lane
/// % 4`; row and column for each element `ai` of a lane.
#[test]
fn products_of_halves_have_the_manuals_fragments() {
    for (kind, half) in [("bf16", bf16 as fn(i32) -> u32), ("f16", f16)] {
        for k in [8, 16] {
            let (a, b, c) = (whole(16 * k, 1), whole(k * 8, 2), whole(16 * 8, 3));
            let (mut fa, mut fb, mut fc) = (Vec::new(), Vec::new(), Vec::new());
            for lane in 0..32 {
                let (group, thread) = (lane >> 2, lane % 4);
                let elements_a: Vec<u32> = (0..k / 2)
                    .map(|i| {
                        let row = if k == 16 {
                            // i < 2 and 4 <= i < 6: the upper half.
                            if i < 2 || (4..6).contains(&i) { group } else { group + 8 }
                        } else if i < 2 {
                            group
                        } else {
                            group + 8
                        };
                        let column = thread * 2 + (i & 1) + if i >= 4 { 8 } else { 0 };
                        half(a[row * k + column])
                    })
                    .collect();
                fa.extend(elements_a.chunks(2).map(|pair| pair[0] | pair[1] << 16));
                let elements_b: Vec<u32> = (0..k / 4)
                    .map(|i| {
                        let row = thread * 2 + (i & 1) + if i >= 2 { 8 } else { 0 };
                        half(b[row * 8 + group])
                    })
                    .collect();
                fb.extend(elements_b.chunks(2).map(|pair| pair[0] | pair[1] << 16));
                fc.extend((0..4).map(|i| {
                    let row = if i < 2 { group } else { group + 8 };
                    (c[row * 8 + thread * 2 + (i & 1)] as f32).to_bits()
                }));
            }
            let name = format!("mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32");
            let d = mma(&name, [k / 4, k / 8], [fa, fb, fc]);
            let expected = product(&a, &b, &c, [16, 8, k]);
            for lane in 0..32 {
                for i in 0..4 {
                    let (row, column) = (lane / 4 + if i < 2 { 0 } else { 8 }, lane % 4 * 2 + i % 2);
                    let result = f32::from_bits(d[4 * lane + i]);
                    assert_eq!(
                        result,
                        expected[row * 8 + column] as f32,
                        "{name}: row {row}, column {column}"
                    );
                }
            }
        }
    }
}

#[test]
fn products_of_tf32_have_the_manuals_fragments() {
    for k in [4, 8] {
        let (a, b, c) = (whole(16 * k, 4), whole(k * 8, 5), whole(16 * 8, 6));
        let (mut fa, mut fb, mut fc) = (Vec::new(), Vec::new(), Vec::new());
        let bits = |value: i32| (value as f32).to_bits();
        for lane in 0..32 {
            let (group, thread) = (lane >> 2, lane % 4);
            fa.extend((0..k / 2).map(|i| {
                let row = if i % 2 == 0 { group } else { group + 8 };
                // The lowest 13 bits are not part of a TF32.
                bits(a[row * k + thread + if i >= 2 { 4 } else { 0 }]) | 0x1fff
            }));
            fb.extend((0..k / 4).map(|i| bits(b[(thread + 4 * i) * 8 + group])));
            fc.extend(
                (0..4).map(|i| bits(c[(group + if i < 2 { 0 } else { 8 }) * 8 + thread * 2 + (i & 1)])),
            );
        }
        // If the lowest bits were added, these sums would show it.
        let name = format!("mma.sync.aligned.m16n8k{k}.row.col.f32.tf32.tf32.f32");
        let d = mma(&name, [k / 2, k / 4], [fa, fb, fc]);
        let expected = product(&a, &b, &c, [16, 8, k]);
        for lane in 0..32 {
            for i in 0..4 {
                let (row, column) = (lane / 4 + if i < 2 { 0 } else { 8 }, lane % 4 * 2 + i % 2);
                assert_eq!(
                    f32::from_bits(d[4 * lane + i]),
                    expected[row * 8 + column] as f32,
                    "{row}, {column}"
                );
            }
        }
    }
}

/// Sums start with the accumulator and follow the order of k, each rounded to f32.
#[test]
fn sums_of_products_are_rounded_in_the_order_of_k() {
    let one = bf16(1);
    // Row 0 of A is 1 at each k; column 0 of B has the numbers to add.
    let added: Vec<f32> = (0..16).map(|k| if k == 0 { 16_777_216.0 } else { 1.0 }).collect();
    let b = |k: usize| added[k].to_bits() >> 16;
    let fa = (0..32)
        .flat_map(|lane| if lane < 4 { [one | one << 16, 0, one | one << 16, 0] } else { [0; 4] })
        .collect();
    let fb = (0..32usize)
        .flat_map(|lane| {
            let k = 2 * (lane % 4);
            if lane < 4 { [b(k) | b(k + 1) << 16, b(k + 8) | b(k + 9) << 16] } else { [0; 2] }
        })
        .collect();
    let mut fc = vec![0; 128];
    fc[0] = 1f32.to_bits();
    let d = mma("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", [4, 2], [fa, fb, fc]);
    // 2²⁴ + 1 is rounded to 2²⁴, fifteen times.
    assert_eq!(f32::from_bits(d[0]), added.iter().fold(1.0, |sum, v| sum + v));
    assert_eq!(f32::from_bits(d[0]), 16_777_216.0);
}

/// A kernel that copies `words` words from its first argument to shared memory, and continues with `body`.
fn with_shared(words: usize, body: &str) -> String {
    let code = format!(
        ".reg .b32 %t, %s, %r<32>;\n.reg .b64 %x, %y;\n.reg .pred %p;\nmov.u32 %t, %tid.x;\nmov.u32 %s, tile;
        mov.u32 %r0, %t;
        COPY:
        setp.ge.u32 %p, %r0, {words};
        @%p bra COPIED;
        ld.param.u64 %x, [p1];\nmul.wide.u32 %y, %r0, 4;\nadd.s64 %x, %x, %y;\nld.global.u32 %r1, [%x];
        shl.b32 %r2, %r0, 2;\nadd.s32 %r2, %r2, %s;\nst.shared.u32 [%r2], %r1;
        add.s32 %r0, %r0, 32;
        bra COPY;
        COPIED:
        bar.sync 0;\n{body}"
    );
    text(2, &format!(".shared .align 128 .b8 tile[{}];", 4 * words), &code)
}

#[test]
fn ldmatrix_hands_out_rows_and_columns() {
    for (count, transposed) in [(1, false), (2, false), (4, false), (1, true), (2, true), (4, true)] {
        // Four consecutive 8 × 8 matrices; element (row, column) of matrix m is 64 m + 8 row + column.
        let words: Vec<u32> = (0..128).map(|i| (2 * i) | (2 * i + 1) << 16).collect();
        let registers = ["%r10", "%r11", "%r12", "%r13"][..count].join(", ");
        let trans = if transposed { ".trans" } else { "" };
        let mut body = format!(
            "shl.b32 %r3, %t, 4;\nadd.s32 %r3, %r3, %s;
            ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared::cta.b16 {{{registers}}}, [%r3];
            ld.param.u64 %x, [p0];\nmul.wide.u32 %y, %t, {};\nadd.s64 %x, %x, %y;\n",
            4 * count
        );
        for i in 0..count {
            body += &format!("st.global.u32 [%x+{}], %r{};\n", 4 * i, 10 + i);
        }
        let memory = DeviceMemory::default();
        let (result, input) = (Buffer::raw(&memory, 32 * count), Buffer::new(&memory, &words));
        launch(&kernel(&with_shared(128, &body)), &memory, [1, 32], &[&result, &input]).unwrap();
        let values = result.values();
        for lane in 0..32 {
            for matrix in 0..count {
                let element = |row: u32, column: u32| 64 * matrix as u32 + 8 * row + column;
                let (group, pair) = (lane as u32 / 4, lane as u32 % 4 * 2);
                let wanted = match transposed {
                    false => element(group, pair) | element(group, pair + 1) << 16,
                    true => element(pair, group) | element(pair + 1, group) << 16,
                };
                assert_eq!(
                    values[lane * count + matrix],
                    wanted,
                    "x{count}{trans}, lane {lane}, matrix {matrix}"
                );
            }
        }
    }
}

/// `wmma` from and to memory: all layouts of A and B, compared with plain products.
#[test]
fn wmma_multiplies_matrices_in_all_layouts() {
    for (kind, k, registers) in [("bf16", 16, 4), ("f16", 16, 8), ("tf32", 8, 4)] {
        for (layout_a, layout_b) in [("row", "row"), ("row", "col"), ("col", "row"), ("col", "col")] {
            let (a, b, c) = (whole(16 * k, 7), whole(k * 16, 8), whole(256, 9));
            // Rows with padding behind them.
            let stored = |values: &[i32], rows: usize, columns: usize, layout: &str| {
                let (lines, length) = if layout == "row" { (rows, columns) } else { (columns, rows) };
                let mut elements = Vec::new();
                for line in 0..lines {
                    elements.extend((0..length).map(|i| match layout {
                        "row" => values[line * columns + i],
                        _ => values[i * columns + line],
                    }));
                    elements.extend([99; 8]);
                }
                match kind {
                    "tf32" => elements.iter().map(|&v| (v as f32).to_bits()).collect::<Vec<_>>(),
                    _ => {
                        let half = |v| if kind == "f16" { f16(v) } else { bf16(v) };
                        elements.chunks(2).map(|pair| half(pair[0]) | half(pair[1]) << 16).collect()
                    }
                }
            };
            let stride = |rows: usize, columns: usize, layout: &str| {
                if layout == "row" { columns + 8 } else { rows + 8 }
            };
            let memory = DeviceMemory::default();
            let result = Buffer::raw(&memory, 256);
            let buffers = [
                Buffer::new(&memory, &stored(&a, 16, k, layout_a)),
                Buffer::new(&memory, &stored(&b, k, 16, layout_b)),
                Buffer::new(&memory, &c.iter().map(|&v| (v as f32).to_bits()).collect::<Vec<_>>()),
            ];
            let list = |letter: &str, count: usize| {
                (0..count).map(|i| format!("%{letter}{i}")).collect::<Vec<_>>().join(", ")
            };
            let (la, lb, lc, ld) = (list("a", registers), list("b", registers), list("c", 8), list("d", 8));
            let types = if kind == "f16" { "f32.f32".to_owned() } else { format!("f32.{kind}.{kind}.f32") };
            let shape = format!("m16n16k{k}");
            let code = format!(
                ".reg .b32 %a<8>, %b<8>, %c<8>, %d<8>, %s;\n.reg .b64 %x;
                ld.param.u64 %x, [p1];\nmov.u32 %s, {};
                wmma.load.a.sync.aligned.{layout_a}.{shape}.{kind} {{{la}}}, [%x], %s;
                ld.param.u64 %x, [p2];\nmov.u32 %s, {};
                wmma.load.b.sync.aligned.{layout_b}.{shape}.global.{kind} {{{lb}}}, [%x], %s;
                ld.param.u64 %x, [p3];\nmov.u32 %s, 16;
                wmma.load.c.sync.aligned.row.{shape}.f32 {{{lc}}}, [%x], %s;
                wmma.mma.sync.aligned.{layout_a}.{layout_b}.{shape}.{types} {{{ld}}}, {{{la}}}, {{{lb}}}, {{{lc}}};
                ld.param.u64 %x, [p0];
                wmma.store.d.sync.aligned.row.{shape}.f32 [%x], {{{ld}}}, %s;",
                stride(16, k, layout_a),
                stride(k, 16, layout_b)
            );
            let all = [&result, &buffers[0], &buffers[1], &buffers[2]];
            launch(&kernel(&text(4, "", &code)), &memory, [1, 32], &all)
                .unwrap_or_else(|error| panic!("{error}"));
            let values: Vec<i32> =
                result.values().into_iter().map(|bits| f32::from_bits(bits) as i32).collect();
            assert_eq!(values, product(&a, &b, &c, [16, 16, k]), "{kind} {layout_a} {layout_b}");
        }
    }
}

/// The method of attention: two tiles in shared memory, `ldmatrix` for A, with `.trans` for B, and a product.
#[test]
fn a_product_of_two_tiles_in_shared_memory() {
    let (a, b) = (whole(256, 10), whole(256, 11));
    let half =
        |values: &[i32]| values.chunks(2).map(|pair| bf16(pair[0]) | bf16(pair[1]) << 16).collect::<Vec<_>>();
    let words = [half(&a), half(&b)].concat();
    // Lane l addresses row l % 16 of a tile, in its left or right half.
    let body = "
        and.b32 %r3, %t, 15;\nshl.b32 %r3, %r3, 5;\nshr.u32 %r4, %t, 4;\nshl.b32 %r4, %r4, 4;
        add.s32 %r3, %r3, %r4;\nadd.s32 %r3, %r3, %s;
        ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%r10, %r11, %r12, %r13}, [%r3];
        ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%r14, %r15, %r16, %r17}, [%r3+512];
        mov.b32 %r20, 0;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r21, %r22, %r23, %r24},
            {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r20, %r20, %r20, %r20};
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r25, %r26, %r27, %r28},
            {%r10, %r11, %r12, %r13}, {%r16, %r17}, {%r20, %r20, %r20, %r20};
        ld.param.u64 %x, [p0];\nmul.wide.u32 %y, %t, 32;\nadd.s64 %x, %x, %y;
        st.global.v4.b32 [%x], {%r21, %r22, %r23, %r24};
        st.global.v4.b32 [%x+16], {%r25, %r26, %r27, %r28};";
    let memory = DeviceMemory::default();
    let (result, input) = (Buffer::raw(&memory, 256), Buffer::new(&memory, &words));
    launch(&kernel(&with_shared(256, body)), &memory, [1, 32], &[&result, &input]).unwrap();
    let (values, expected) = (result.values(), product(&a, &b, &[0; 256], [16, 16, 16]));
    for lane in 0..32 {
        for i in 0..8 {
            let row = lane / 4 + if i % 4 < 2 { 0 } else { 8 };
            let column = lane % 4 * 2 + i % 2 + if i < 4 { 0 } else { 8 };
            assert_eq!(
                f32::from_bits(values[8 * lane + i]),
                expected[16 * row + column] as f32,
                "{row}, {column}"
            );
        }
    }
}
