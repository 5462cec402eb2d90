//! Bugs planted into kernels: each is found at its place, and the same kernel without it runs.

use kiln_ptx::{DeviceMemory, Error, Fault, Space};

use crate::support::{Buffer, fault, kernel, launch, mended, text};

/// 64 threads: `%t` is the thread, `%s` the address of its word of shared memory, `%n` that of a neighbour in
/// the other warp, `%g` the address of its word in global memory.
const START: &str = ".reg .b32 %t, %s, %n, %r<16>;\n.reg .b64 %g, %y, %b;\n.reg .pred %p, %q;
    mov.u32 %t, %tid.x;
    mov.u32 %r0, tile;
    shl.b32 %s, %t, 2;\nadd.s32 %s, %s, %r0;
    xor.b32 %n, %t, 32;\nshl.b32 %n, %n, 2;\nadd.s32 %n, %n, %r0;
    ld.param.u64 %b, [p0];\nmul.wide.u32 %y, %t, 4;\nadd.s64 %g, %b, %y;\n";

fn planted(body: &str) -> String {
    text(1, ".shared .align 16 .b8 tile[1024];", &format!("{START}{body}"))
}

/// The fault of `body`, which must be in the line that ends in `// here`. The kernel has no fault without the
/// lines that end in `// bug`, or with the text after `// fixed:` instead.
#[track_caller]
fn found(body: &str) -> Error {
    let memory = DeviceMemory::default();
    let data = Buffer::new(&memory, &(0..64).collect::<Vec<_>>());
    let bugged = planted(body);
    let error = fault(&bugged, [1, 64], &memory, &[&data]);
    let line = bugged.lines().nth(error.line as usize - 1).unwrap();
    assert!(line.contains("// here"), "in another line: {error}");
    let message = error.to_string();
    assert!(message.contains("kernel test, line") && message.contains("block [0, 0, 0]"), "{message}");
    let mended = planted(&mended(body));
    launch(&kernel(&mended), &memory, [1, 64], &[&data]).unwrap_or_else(|error| panic!("fixed: {error}"));
    error
}

#[test]
fn a_missing_barrier_between_write_and_read() {
    let error = found(
        "st.shared.u32 [%s], %t;
        // fixed:bar.sync 0;
        ld.shared.u32 %r1, [%n]; // here",
    );
    // The first warp reads words that the second has not written yet; the first such read is reported.
    assert!(matches!(error.fault, Fault::Uninitialised { space: Space::Shared, .. }), "{error}");
    let error = found(
        "st.shared.u32 [%s], %t;
        bar.sync 0;
        st.shared.u32 [%s], 5;
        // fixed:bar.sync 0;
        setp.lt.u32 %p, %t, 32;
        @%p bra END;
        ld.shared.u32 %r1, [%n]; // here
        END:",
    );
    let Fault::ReadAfterWrite { space: Space::Shared, other, .. } = error.fault else { panic!("{error}") };
    assert_eq!((other.thread, error.thread), (0, [32, 0, 0]));
}

#[test]
fn a_place_that_is_written_while_others_read_it() {
    let error = found(
        "st.shared.u32 [%s], %t;
        bar.sync 0;
        setp.lt.u32 %p, %t, 32;
        @%p ld.shared.u32 %r1, [%n];
        // fixed:bar.sync 0;
        @!%p st.shared.u32 [%s], %t; // here",
    );
    let Fault::WriteAfterRead { other, .. } = error.fault else { panic!("{error}") };
    assert_eq!((other.thread, error.thread), (0, [32, 0, 0]));
}

#[test]
fn two_threads_that_write_one_place() {
    let error = found(
        "and.b32 %r1, %t, 31; // fixed:mov.u32 %r1, %t;
        shl.b32 %r1, %r1, 2;\nadd.s32 %r1, %r1, %r0;
        st.shared.u32 [%r1], %t; // here",
    );
    let Fault::WriteAfterWrite { other, .. } = error.fault else { panic!("{error}") };
    assert_eq!((other.thread, error.thread), (0, [32, 0, 0]));
}

/// Within a warp, lanes see each other's writes only after `bar.warp.sync`.
#[test]
fn a_missing_barrier_of_a_warp() {
    let error = found(
        "xor.b32 %r1, %t, 1;\nshl.b32 %r1, %r1, 2;\nadd.s32 %r1, %r1, %r0;
        st.shared.u32 [%s], %t;
        // fixed:bar.warp.sync -1;
        ld.shared.u32 %r2, [%r1]; // here",
    );
    let Fault::ReadAfterWrite { other, .. } = error.fault else { panic!("{error}") };
    assert_eq!((other.thread, error.thread), (1, [0, 0, 0]));
}

const COPIES: &str = "
    cp.async.ca.shared::cta.global [%s], [%g], 4;
    cp.async.commit_group;
    cp.async.ca.shared::cta.global [%s+256], [%g], 4;
    cp.async.commit_group;\n";

#[test]
fn a_wait_for_copies_that_is_one_group_short() {
    let error = found(&format!(
        "{COPIES}cp.async.wait_group 1; // fixed:cp.async.wait_group 0;
        bar.sync 0;
        ld.shared.u32 %r1, [%n+256]; // here"
    ));
    let Fault::Pending { copy, .. } = error.fault else { panic!("{error}") };
    let line = planted(COPIES).lines().nth(copy.line as usize - 1).unwrap().trim().to_owned();
    assert_eq!((copy.thread, &line[..]), (32, "cp.async.ca.shared::cta.global [%s+256], [%g], 4;"));
}

#[test]
fn a_copy_that_nobody_waits_for() {
    let error = found(&format!("{COPIES}// fixed:cp.async.wait_all;\nld.shared.u32 %r1, [%s]; // here"));
    assert!(matches!(error.fault, Fault::Pending { .. }), "{error}");
}

/// A wait applies to the own thread only: copies of others are visible after a barrier.
#[test]
fn a_missing_barrier_behind_a_wait() {
    let error = found(&format!(
        "{COPIES}cp.async.wait_all;
        setp.lt.u32 %p, %t, 32;\n@%p bra END;
        // fixed:
        bar.warp.sync -1; // bug
        ld.shared.u32 %r1, [%n]; // here // fixed:ld.shared.u32 %r1, [%s];
        END:"
    ));
    assert!(matches!(error.fault, Fault::ReadAfterWrite { .. }), "{error}");
}

#[test]
fn a_stage_that_is_copied_to_while_others_read_it() {
    let error = found(&format!(
        "{COPIES}cp.async.wait_all;
        bar.sync 0;
        setp.lt.u32 %p, %t, 32;
        @%p ld.shared.u32 %r1, [%n];
        // fixed:bar.sync 0;
        @!%p cp.async.ca.shared::cta.global [%s], [%g], 4; // here"
    ));
    assert!(matches!(error.fault, Fault::WriteAfterRead { .. }), "{error}");
}

#[test]
fn an_index_that_is_off_by_one() {
    let error = found("ld.global.u32 %r1, [%g+4]; // here // fixed:ld.global.u32 %r1, [%g];");
    let Fault::OutOfBounds { space: Space::Global, address, limits: Some((start, end)), .. } = error.fault
    else {
        panic!("{error}")
    };
    assert_eq!((address, end - start, error.thread), (end, 256, [63, 0, 0]));
    let error = found("st.global.u32 [%g+-4], %t; // here // fixed:st.global.u32 [%g], %t;");
    assert_eq!(error.thread, [0, 0, 0]);
    let error = found("st.shared.u32 [%s+772], %t; // here // fixed:st.shared.u32 [%s+768], %t;");
    let Fault::OutOfBounds { space: Space::Shared, address: 1024, .. } = error.fault else {
        panic!("{error}")
    };
    assert_eq!(error.thread, [63, 0, 0]);
}

#[test]
fn reads_of_what_nothing_has_written() {
    let error = found(
        "setp.lt.u32 %p, %t, 63; // bug
        @%p st.shared.u32 [%s], 0; // fixed:st.shared.u32 [%s], 0;
        bar.sync 0;
        ld.shared.u32 %r1, [%s]; // here",
    );
    assert!(matches!(error.fault, Fault::Uninitialised { space: Space::Shared, address: 252 }), "{error}");
    let memory = DeviceMemory::default();
    let data = Buffer::raw(&memory, 64);
    let text = planted("ld.global.u32 %r1, [%g];");
    let error = fault(&text, [1, 64], &memory, &[&data]);
    assert_eq!(error.fault, Fault::Uninitialised { space: Space::Global, address: data.address() });
    // Copies of unwritten bytes are unwritten.
    let written = Buffer::new(&memory, &[0; 64]);
    memory.copied(written.address() + 8, data.address(), 4);
    let error = fault(&text, [1, 64], &memory, &[&written]);
    assert_eq!(error.fault, Fault::Uninitialised { space: Space::Global, address: written.address() + 8 });
    memory.wrote(data.address(), 256);
    launch(&kernel(&text), &memory, [1, 64], &[&data]).unwrap();
}

/// The fault of a grid of two blocks with two warps each; `%r1` is the block.
#[track_caller]
fn between_blocks(body: &str) -> Fault {
    let memory = DeviceMemory::default();
    let data = Buffer::new(&memory, &[0; 64]);
    let run = |body: &str| {
        let text = planted(&format!("mov.u32 %r1, %ctaid.x;\nsetp.eq.u32 %p, %r1, 0;\n{body}"));
        launch(&kernel(&text), &memory, [2, 64], &[&data])
    };
    // Successive launches are ordered, and so are the accesses of each block to its own words.
    run("@%p st.global.u32 [%g], %t;").unwrap();
    run("@%p st.global.u32 [%g], %t;\n@%p ld.global.u32 %r2, [%g];").unwrap();
    match run(body) {
        Err(kiln_ptx::LaunchError::Failed(error)) => error.fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_that_write_and_read_the_same_place() {
    let global = Space::Global;
    let fault = between_blocks("st.global.u32 [%g], %t;");
    assert!(matches!(fault, Fault::WriteAfterWrite { space, .. } if space == global), "{fault}");
    let fault = between_blocks("@%p st.global.u32 [%g], %t;\n@!%p ld.global.u32 %r2, [%g];");
    // The order of the blocks depends on the threads of the host.
    let race = |fault: &Fault| matches!(fault, Fault::ReadAfterWrite { .. } | Fault::WriteAfterRead { .. });
    assert!(race(&fault), "{fault}");
    let fault = between_blocks("ld.global.u32 %r2, [%g];\n@!%p st.global.u32 [%g], %t;");
    assert!(race(&fault), "{fault}");
}

/// A block may read and write one half while another block does the same with the other half.
#[test]
fn blocks_that_change_the_halves_of_a_word() {
    let memory = DeviceMemory::default();
    let data = Buffer::new(&memory, &[0; 64]);
    let text = planted(
        "mov.u32 %r1, %ctaid.x;\nmul.wide.u32 %y, %r1, 2;\nadd.s64 %g, %g, %y;
        .reg .b16 h;\nld.global.u16 h, [%g];\nadd.s16 h, h, 3;\nst.global.u16 [%g], h;",
    );
    launch(&kernel(&text), &memory, [2, 64], &[&data]).unwrap();
    assert_eq!(data.values(), [3 << 16 | 3; 64]);
}

/// Halves of a word are independent.
#[test]
fn threads_that_write_the_halves_of_a_word() {
    let memory = DeviceMemory::default();
    let data = Buffer::new(&memory, &[0; 64]);
    let body = |second: u32| {
        planted(&format!(
            "mov.u32 %r1, %ctaid.x;\nmul.wide.u32 %y, %r1, {second};\nadd.s64 %g, %g, %y;\nst.global.u16 [%g], 5;"
        ))
    };
    launch(&kernel(&body(2)), &memory, [2, 64], &[&data]).unwrap();
    assert_eq!(data.values(), [5 << 16 | 5; 64]);
    let error = fault(&body(0), [2, 64], &memory, &[&data]);
    assert!(matches!(error.fault, Fault::WriteAfterWrite { .. }), "{error}");
}

#[test]
fn warps_that_write_and_read_device_memory_without_a_barrier() {
    let error = found(
        "xor.b32 %r1, %t, 32;\nmul.wide.u32 %y, %r1, 4;\nadd.s64 %b, %b, %y;
        st.global.u32 [%g], %t;
        // fixed:bar.sync 0;
        setp.ge.u32 %p, %t, 32;
        @%p ld.global.u32 %r2, [%b]; // here",
    );
    let Fault::ReadAfterWrite { space: Space::Global, other, .. } = error.fault else { panic!("{error}") };
    assert_eq!((other.thread, error.thread), (0, [32, 0, 0]));
}

#[test]
fn memory_that_was_given_back() {
    let memory = DeviceMemory::default();
    let data = Buffer::new(&memory, &[0; 64]);
    let text = planted("ld.global.u32 %r1, [%g];");
    launch(&kernel(&text), &memory, [1, 64], &[&data]).unwrap();
    memory.remove(data.address());
    let error = fault(&text, [1, 64], &memory, &[&data]);
    assert!(matches!(error.fault, Fault::OutOfBounds { limits: None, .. }), "{error}");
}

#[test]
fn a_vector_that_is_not_aligned() {
    let error = found(
        "shl.b32 %r1, %t, 2; // fixed:shl.b32 %r1, %t, 3;
        add.s32 %r1, %r1, %r0;
        st.shared.v2.u32 [%r1], {%t, %t}; // here",
    );
    assert!(matches!(error.fault, Fault::Misaligned { bytes: 8, .. }), "{error}");
    let error = found(
        "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%b+8]; // here // fixed:ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%b];",
    );
    assert!(matches!(error.fault, Fault::Misaligned { space: Space::Global, bytes: 16, .. }), "{error}");
}

#[test]
fn a_barrier_that_some_lanes_pass_by() {
    let error = found(
        "setp.lt.u32 %p, %t, 16;
        @%p bra END; // bug
        bar.sync 0; // here
        END:",
    );
    assert!(matches!(error.fault, Fault::Divergent { active: 0xffff_0000, .. }), "{error}");
}

#[test]
fn a_barrier_that_a_warp_passes_by() {
    let error = found(
        "setp.lt.u32 %p, %t, 32;
        @%p bra END; // bug
        bar.sync 0; // here
        END:",
    );
    let Fault::Barrier { other, ended: true } = error.fault else { panic!("{error}") };
    assert_eq!((other.thread, error.thread), (0, [32, 0, 0]));
}

#[test]
fn threads_that_return_before_a_barrier() {
    let error = found(
        "setp.eq.u32 %p, %t, 40;
        @%p ret; // bug
        bar.sync 0; // here",
    );
    assert!(matches!(error.fault, Fault::Barrier { ended: true, .. } | Fault::Divergent { .. }), "{error}");
}

#[test]
fn two_barriers_at_once() {
    let error = found(
        "setp.lt.u32 %p, %t, 32;
        @%p bra OTHER; // bug
        bar.sync 0; // fixed:bar.sync 0;
        bra.uni END;
        OTHER:
        bar.sync 1; // here
        END:",
    );
    assert!(matches!(error.fault, Fault::Barrier { ended: false, .. }), "{error}");
}

#[test]
fn a_shuffle_from_a_lane_that_is_elsewhere() {
    let error = found(
        "and.b32 %r1, %t, 1;\nsetp.eq.u32 %p, %r1, 1;
        @%p bra END; // bug
        activemask.b32 %r2;
        shfl.sync.bfly.b32 %r3|%q, %t, 1, 31, %r2; // here
        END:",
    );
    assert!(matches!(error.fault, Fault::InactiveLane { lane: 1 }), "{error}");
    let error = found(
        "setp.lt.u32 %p, %t, 48;
        @%p bra END; // bug
        shfl.sync.bfly.b32 %r3|%q, %t, 1, 31, -1; // here
        END:",
    );
    assert!(matches!(error.fault, Fault::Divergent { active: 0xffff_0000, expected: u32::MAX }), "{error}");
}

#[test]
fn a_product_that_only_some_lanes_make() {
    let error = found(
        "mov.b32 %r1, 0;
        setp.eq.u32 %p, %t, 5;
        @%p bra END; // bug
        mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r2, %r3, %r4, %r5}, {%r1, %r1}, {%r1}, {%r1, %r1, %r1, %r1}; // here
        END:",
    );
    assert!(matches!(error.fault, Fault::Divergent { .. }), "{error}");
}

#[test]
fn a_matrix_whose_rows_are_not_aligned() {
    let error = found(
        "mov.u32 %r1, 33; // fixed:mov.u32 %r1, 32;
        mov.b32 %r2, 0;
        setp.lt.u32 %p, %t, 32;\n@%p bra END;
        wmma.store.d.sync.aligned.row.m16n16k8.shared.f32 [tile], {%r2, %r2, %r2, %r2, %r2, %r2, %r2, %r2}, %r1; // here // fixed:mov.u32 %r3, 0;
        END:",
    );
    assert!(matches!(error.fault, Fault::Stride { stride: 33 }), "{error}");
}

/// A fragment loaded transposed causes no fault; the product is wrong.
#[test]
fn a_fragment_that_is_transposed() {
    let product = |trans: &str| {
        let body = format!(
            "st.shared.u32 [%s], 0;\nbar.sync 0;
            setp.ne.u32 %p, %t, 0;\n@%p bra READY;\nst.shared.u32 [tile+4], 0x3f80;
            READY:\nbar.sync 0;
            setp.ge.u32 %p, %t, 32;\n@%p bra END;
            and.b32 %r1, %t, 7;\nshl.b32 %r1, %r1, 4;\nadd.s32 %r1, %r1, %r0;
            ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r2}}, [%r1];
            mov.b32 %r3, 0x3f803f80;\nmov.b32 %r4, 0;
            mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {{%r5, %r6, %r7, %r8}}, {{%r3, %r3}}, {{%r2}}, {{%r4, %r4, %r4, %r4}};
            st.global.u32 [%g], %r5;
            END:"
        );
        let memory = DeviceMemory::default();
        let data = Buffer::new(&memory, &[0; 64]);
        launch(&kernel(&planted(&body)), &memory, [1, 64], &[&data]).unwrap();
        data.values()[..4].iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>()
    };
    // The one of B is at (k, n) = (2, 0) as a column, and at (0, 2) as a row: in another column of the
    // product.
    assert_eq!(product(""), [1.0, 0.0, 0.0, 0.0]);
    assert_eq!(product(".trans"), [0.0, 1.0, 0.0, 0.0]);
}

/// An accumulator that is not zeroed: on a GPU, it contains the last kernel's values.
#[test]
fn a_register_that_is_read_before_it_is_written() {
    let error = found(
        "// fixed:mov.u32 %r5, 0;
        mov.u32 %r6, 0;
        LOOP:
        add.u32 %r5, %r5, %t; // here
        add.u32 %r6, %r6, 1;
        setp.lt.u32 %p, %r6, 3;
        @%p bra LOOP;
        st.global.u32 [%g], %r5;",
    );
    assert!(matches!(error.fault, Fault::Unset), "{error}");
    assert_eq!(error.thread, [0, 0, 0]);
}

/// Lanes are distinguished.
#[test]
fn a_register_that_some_lanes_have_not_written() {
    let error = found(
        "setp.lt.u32 %p, %t, 40;
        @%p mov.u32 %r5, 1;
        // fixed:@!%p mov.u32 %r5, 2;
        st.global.u32 [%g], %r5; // here",
    );
    assert!(matches!(error.fault, Fault::Unset), "{error}");
    assert_eq!(error.thread, [40, 0, 0]);
}
