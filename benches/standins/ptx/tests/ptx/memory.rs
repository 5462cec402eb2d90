//! Loads, stores, copies and atomic operations in all spaces.

use kiln_ptx::{DeviceMemory, Fault, Launch, Options, Space};

use crate::support::{Buffer, fault, kernel, lanes, launch, random, text};

/// The address of this thread's 16 bytes in `%x` (second argument) and `%z` (first argument).
const PLACES: &str = ".reg .b32 %t, %r<16>;\n.reg .b64 %x, %y, %z, %w<4>;\n.reg .b16 %h<8>;\n.reg .pred %p;
    mov.u32 %t, %tid.x;\nmul.wide.u32 %y, %t, 16;
    ld.param.u64 %z, [p0];\nadd.s64 %z, %z, %y;
    ld.param.u64 %x, [p1];\nadd.s64 %x, %x, %y;\n";

#[test]
fn vectors_of_all_widths_are_copied() {
    for copy in [
        "ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%x];\nst.global.v4.u32 [%z], {%r0, %r1, %r2, %r3};",
        "ld.global.nc.v2.u64 {%w0, %w1}, [%x];\nst.global.v2.u64 [%z], {%w0, %w1};",
        "ld.global.v4.u16 {%h0, %h1, %h2, %h3}, [%x+8];\nst.global.v4.u16 [%z+8], {%h0, %h1, %h2, %h3};
         ld.global.v2.f32 {%r0, %r1}, [%x];\nst.global.v2.f32 [%z], {%r0, %r1};",
        "ld.global.v4.u8 {%h0, %h1, %h2, %h3}, [%x];\nst.global.v4.u8 [%z], {%h0, %h1, %h2, %h3};
         ld.global.u8 %h4, [%x+4];\nst.global.u8 [%z+4], %h4;\nld.global.v2.u8 {%h5, %h6}, [%x+6];
         ld.global.u8 %h4, [%x+5];\nst.global.u8 [%z+5], %h4;\nst.global.v2.u8 [%z+6], {%h5, %h6};
         ld.global.u64 %w0, [%x+8];\nst.global.u64 [%z+8], %w0;",
    ] {
        let memory = DeviceMemory::default();
        let values = random(128, 1);
        let (to, from) = (Buffer::raw(&memory, 128), Buffer::new(&memory, &values));
        launch(&kernel(&text(2, "", &format!("{PLACES}{copy}"))), &memory, [1, 32], &[&to, &from]).unwrap();
        assert_eq!(to.values(), values, "{copy}");
    }
}

#[test]
fn small_numbers_fill_their_registers() {
    let memory = DeviceMemory::default();
    let (to, from) = (Buffer::raw(&memory, 4), Buffer::new(&memory, &[0xffee_8090; 4]));
    let code = "ld.global.u8 %h0, [%x];\nld.global.s8 %h1, [%x];\nld.global.u16 %h2, [%x];
        cvt.u32.u16 %r0, %h0;\ncvt.s32.s16 %r1, %h1;\ncvt.u32.u16 %r2, %h2;\ncvt.s32.s16 %r3, %h2;
        st.global.v4.u32 [%z], {%r0, %r1, %r2, %r3};";
    launch(&kernel(&text(2, "", &format!("{PLACES}{code}"))), &memory, [1, 1], &[&to, &from]).unwrap();
    assert_eq!(to.values(), [0x90, 0xffff_ff90, 0x8090, 0xffff_8090]);
}

/// Generic addresses of shared, local and global memory in one instruction.
#[test]
fn generic_addresses_say_their_space() {
    let memory = DeviceMemory::default();
    let (to, from) = (Buffer::raw(&memory, 128), Buffer::new(&memory, &random(128, 2)));
    let code = ".local .align 16 .b8 depot[16];
        mov.u64 %w0, tile;\ncvta.shared.u64 %w0, %w0;\nadd.s64 %w0, %w0, %y;
        mov.u64 %w1, depot;\ncvta.local.u64 %w1, %w1;
        rem.u32 %r4, %t, 3;\nsetp.eq.u32 %p, %r4, 0;\nselp.b64 %w2, %w0, %w1, %p;
        setp.eq.u32 %p, %r4, 1;\nselp.b64 %w2, %z, %w2, %p;
        ld.v4.u32 {%r0, %r1, %r2, %r3}, [%x];
        st.v4.u32 [%w2], {%r0, %r1, %r2, %r3};
        ld.v4.u32 {%r5, %r6, %r7, %r8}, [%w2];
        st.global.v4.u32 [%z], {%r5, %r6, %r7, %r8};";
    let code = text(2, ".shared .align 16 .b8 tile[512];", &format!("{PLACES}{code}"));
    launch(&kernel(&code), &memory, [1, 32], &[&to, &from]).unwrap();
    assert_eq!(to.values(), from.values());
}

/// Per-thread values with an index known only at run time, in a loop.
#[test]
fn local_memory_is_one_threads() {
    let values: Vec<u32> = (0..64).collect();
    let body = ".local .align 4 .b8 depot[64];
        mov.u64 %rd1, depot;
        mov.u32 %r2, 0;
        FILL:
        mul.wide.u32 %rd2, %r2, 4;\nadd.s64 %rd2, %rd1, %rd2;\nmad.lo.s32 %r3, %r2, 100, %r1;\nst.local.u32 [%rd2], %r3;
        add.s32 %r2, %r2, 1;\nsetp.lt.u32 %p1, %r2, 16;\n@%p1 bra FILL;
        and.b32 %r4, %r1, 15;\nmul.wide.u32 %rd3, %r4, 4;\nadd.s64 %rd3, %rd1, %rd3;\nld.local.u32 %r0, [%rd3];";
    assert_eq!(lanes(&[&values], body), values.iter().map(|v| v % 16 * 100 + v).collect::<Vec<_>>());
}

#[test]
fn parameters_are_read_at_any_place() {
    let code = ".version 9.0\n.target sm_90\n.address_size 64\n
        .visible .entry test(.param .u64 out, .param .u8 small, .param .align 8 .b8 all[24]) {
        .reg .b32 %r<8>;\n.reg .b16 %h;\n.reg .b64 %x, %y;
        ld.param.u64 %x, [out];
        mov.b64 %y, all;
        ld.param.u32 %r1, [%y+4];\nld.param.u32 %r2, [all+16];\nld.param.v2.u32 {%r3, %r4}, [all+8];
        ld.param.u8 %h, [small];\ncvt.u32.u16 %r5, %h;
        st.global.v4.u32 [%x], {%r1, %r2, %r3, %r4};\nst.global.u32 [%x+16], %r5;\nret;\n}";
    let memory = DeviceMemory::default();
    let to = Buffer::raw(&memory, 5);
    let words: Vec<u8> = (10u32..16).flat_map(u32::to_le_bytes).collect();
    let launch =
        Launch::new(&kernel(code), [1; 3], [1; 3], &[&to.address().to_le_bytes(), &[200], &words]).unwrap();
    launch.run(&memory, Options::default()).unwrap();
    assert_eq!(to.values(), [11, 14, 12, 13, 200]);
}

/// Copies in two groups: the first is waited for while the second may continue; the rest of a short source is
/// zero.
#[test]
fn cp_async_copies_in_groups() {
    let memory = DeviceMemory::default();
    let values = random(128, 3);
    let (to, from) = (Buffer::raw(&memory, 128), Buffer::new(&memory, &values));
    let code = "
        mov.u32 %r0, tile;\nshl.b32 %r1, %t, 4;\nadd.s32 %r0, %r0, %r1;
        cp.async.cg.shared::cta.global [%r0], [%x], 16;
        cp.async.commit_group;
        cp.async.ca.shared.global [%r0+512], [%x], 8;
        cp.async.ca.shared.global [%r0+520], [%x], 8, 4;
        cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.v2.u32 {%r2, %r3}, [%r0];
        cp.async.wait_all;
        bar.sync 0;
        xor.b32 %r4, %r1, 16;\nmov.u32 %r5, tile;\nadd.s32 %r5, %r5, %r4;
        ld.shared.v2.u32 {%r6, %r7}, [%r5+520];
        st.global.v4.u32 [%z], {%r2, %r3, %r6, %r7};";
    let code = text(2, ".shared .align 16 .b8 tile[1024];", &format!("{PLACES}{code}"));
    launch(&kernel(&code), &memory, [1, 32], &[&to, &from]).unwrap();
    let wanted: Vec<u32> =
        (0..32).flat_map(|t| [values[4 * t], values[4 * t + 1], values[4 * (t ^ 1)], 0]).collect();
    assert_eq!(to.values(), wanted);
}

#[test]
fn atomic_operations_count_every_thread() {
    let memory = DeviceMemory::default();
    let (sums, ones) =
        (Buffer::new(&memory, &[0, u32::MAX, 0, 0, 0x3c00_3c00, 5]), Buffer::new(&memory, &[0; 512 * 4]));
    let code =
        "ld.param.u64 %z, [p0];\nmov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %ntid.x;\nmad.lo.s32 %r3, %r1, %r2, %t;
        atom.global.add.u32 %r0, [%z], 1;
        atom.relaxed.min.s32 %r4, [%z+4], %r3;
        red.global.max.u32 [%z+8], %r3;
        atom.relaxed.add.f32 %r5, [%z+12], 0f3F800000;
        mov.b16 %h0, 0x3C00;
        setp.lt.u32 %p, %r3, 8;
        @%p atom.global.add.noftz.f16 %h1, [%z+16], %h0;
        atom.global.cas.b32 %r6, [%z+20], 5, 9;
        ld.param.u64 %x, [p1];\nmul.wide.u32 %y, %r0, 4;\nadd.s64 %x, %x, %y;\nst.global.u32 [%x], 1;";
    let kernel = kernel(&text(2, "", &format!("{PLACES}{code}")));
    launch(&kernel, &memory, [8, 64], &[&sums, &ones]).unwrap();
    // -1 is the minimum; 1 + 8 in f16 is 0x4880, next to another half.
    assert_eq!(sums.values(), [512, u32::MAX, 511, 512f32.to_bits(), 0x3c00_4880, 9]);
    // Each thread got a different previous value.
    assert_eq!(ones.values()[..512], [1; 512]);
}

#[test]
fn atomic_operations_in_shared_memory() {
    let memory = DeviceMemory::default();
    let result = Buffer::raw(&memory, 1);
    let code = ".reg .b32 %t, %r<4>;\n.reg .b64 %x;\n.reg .pred %p;
        mov.u32 %t, %tid.x;\nmov.u32 %r1, tile;
        setp.ne.u32 %p, %t, 0;\n@%p bra WAIT;\nst.shared.u32 [%r1], 0;
        WAIT:\nbar.sync 0;
        atom.shared.add.u32 %r2, [%r1], %t;
        bar.sync 0;
        @%p bra END;\nld.shared.u32 %r3, [%r1];\nld.param.u64 %x, [p0];\nst.global.u32 [%x], %r3;\nEND:";
    launch(&kernel(&text(1, ".shared .align 4 .b8 tile[4];", code)), &memory, [1, 256], &[&result]).unwrap();
    assert_eq!(result.values(), [255 * 128]);
}

/// Shared memory whose size the launch sets begins after the memory in the text.
#[test]
fn dynamic_shared_memory_is_behind_the_rest() {
    let memory = DeviceMemory::default();
    let result = Buffer::raw(&memory, 4);
    let code = ".reg .b32 %r<8>;\n.reg .b64 %x;\n.shared .align 4 .b8 own[20];
        mov.u32 %r1, dyn;\nst.shared.u32 [%r1+60], 8;\nld.shared.u32 %r2, [dyn+60];\nmov.u32 %r3, own;
        mov.u32 %r4, %dynamic_smem_size;
        ld.param.u64 %x, [p0];\nst.global.v4.u32 [%x], {%r1, %r2, %r3, %r4};";
    let kernel = kernel(&text(1, ".extern .shared .align 128 .b8 dyn[];", code));
    let mut launch = Launch::new(&kernel, [1; 3], [1; 3], &[&result.address().to_le_bytes()]).unwrap();
    launch.dynamic_shared = 64;
    launch.run(&memory, Options::default()).unwrap();
    assert_eq!(result.values(), [128, 8, 0, 64]);
}

/// Words that a kernel only moves may be unwritten: the copy is then unwritten too.
#[test]
fn copies_of_what_nothing_has_written_are_not_written() {
    let addresses =
        ".reg .b32 %t, %r<5>;\n.reg .b64 %a, %b, %y;\nmov.u32 %t, %tid.x;\nmul.wide.u32 %y, %t, 16;
        ld.param.u64 %a, [p0];\nadd.s64 %a, %a, %y;\nld.param.u64 %b, [p1];\nadd.s64 %b, %b, %y;\n";
    let moves = format!(
        "{addresses}ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%a];\nst.global.v4.u32 [%b], {{%r1, %r2, %r3, %r4}};"
    );
    let computes =
        format!("{addresses}ld.global.u32 %r1, [%a];\nadd.u32 %r1, %r1, 1;\nst.global.u32 [%b], %r1;");
    let memory = DeviceMemory::default();
    let (from, to, other) = (Buffer::raw(&memory, 128), Buffer::raw(&memory, 128), Buffer::raw(&memory, 128));
    // All except the third word of the second thread.
    memory.wrote(from.address(), 24);
    memory.wrote(from.address() + 28, 512 - 28);
    launch(&kernel(&text(2, "", &moves)), &memory, [1, 32], &[&from, &to]).unwrap();
    assert_eq!(to.values(), from.values());
    // A word written before becomes unwritten, and every other word is written.
    let error = fault(&text(2, "", &computes.replace("[%a]", "[%a+8]")), [1, 32], &memory, &[&to, &other]);
    assert_eq!(error.fault, Fault::Uninitialised { space: Space::Global, address: to.address() + 24 });
    assert_eq!(error.thread, [1, 0, 0]);
    for offset in ["[%a]", "[%a+4]", "[%a+12]"] {
        let kernel = kernel(&text(2, "", &computes.replace("[%a]", offset)));
        launch(&kernel, &memory, [1, 32], &[&to, &other]).unwrap();
    }
    // Once the original is written, so is the copy.
    memory.wrote(from.address() + 24, 4);
    launch(&kernel(&text(2, "", &moves)), &memory, [1, 32], &[&from, &to]).unwrap();
    launch(&kernel(&text(2, "", &computes.replace("[%a]", "[%a+8]"))), &memory, [1, 32], &[&to, &other])
        .unwrap();
    // A value that is moved and also used in a computation counts as used.
    let both = format!(
        "{addresses}ld.global.u32 %r1, [%a];\nst.global.u32 [%b], %r1;\nadd.u32 %r2, %r1, 1;\nst.global.u32 [%b], %r2;"
    );
    let raw = Buffer::raw(&memory, 128);
    let error = fault(&text(2, "", &both), [1, 32], &memory, &[&raw, &other]);
    assert_eq!(error.fault, Fault::Uninitialised { space: Space::Global, address: raw.address() });
}

/// An unwritten value may be loaded if another one is selected, as in CubeCL's matrix products.
#[test]
fn a_value_that_nothing_has_written_must_not_be_chosen() {
    let code = |predicate: &str| {
        text(
            2,
            "",
            &format!(
                ".reg .b32 %t, %r<5>;\n.reg .b64 %a, %b, %y;\n.reg .pred %p;
                mov.u32 %t, %tid.x;\nmul.wide.u32 %y, %t, 8;
                ld.param.u64 %a, [p0];\nadd.s64 %a, %a, %y;\nld.param.u64 %b, [p1];\nadd.s64 %b, %b, %y;
                setp.{predicate}.u32 %p, %t, 20;
                ld.global.v2.u32 {{%r1, %r2}}, [%a];
                selp.b32 %r3, %r1, 0, %p;\nselp.b32 %r4, %r2, 0, %p;
                add.u32 %r3, %r3, %r4;\nst.global.u32 [%b], %r3;"
            ),
        )
    };
    let memory = DeviceMemory::default();
    let (from, to) = (Buffer::raw(&memory, 64), Buffer::raw(&memory, 64));
    // The second value of thread 20 is the first unwritten one.
    memory.wrote(from.address(), 8 * 20 + 4);
    launch(&kernel(&code("lt")), &memory, [1, 32], &[&from, &to]).unwrap();
    let error = fault(&code("le"), [1, 32], &memory, &[&from, &to]);
    let address = from.address() + 8 * 20 + 4;
    assert_eq!(error.fault, Fault::Uninitialised { space: Space::Global, address });
    assert!(error.thread == [20, 0, 0] && error.text.starts_with("selp.b32 %r4"), "{error}");
}
