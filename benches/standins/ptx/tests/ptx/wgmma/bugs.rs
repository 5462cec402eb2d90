//! Bugs planted into kernels with warpgroup products: each is found at its place, and the same kernel without
//! it runs.

use kiln_ptx::{Error, Fault, LaunchError, Space};

use super::support::{Half, Tile, registers, run, with_shared};
use crate::support::mended;

/// Number of words of shared memory that are written: two tiles of 64 × 64 halves, A and B.
const WORDS: usize = 4096;
const TILE: Tile = Tile { lines: 64, k: 64, transposed: false, chunks: 8 };

/// One line: a product of 16 of the 64 elements along the sum, with `%d` or `%e`, and with B at `start`.
fn product(d: &str, a: &str, step: u64, start: usize, adds: bool) -> String {
    let (da, db) = (TILE.descriptor(0) + 2 * step, TILE.descriptor(start) + 2 * step);
    let trans = if a.starts_with('{') { "0" } else { "0, 0" };
    format!(
        "mov.u64 %da, {da}; mov.u64 %db, {db}; setp.ne.u32 %q, {}, 0; \
         wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{}}}, {a}, %db, %q, 1, 1, {trans};",
        u32::from(adds),
        registers(d, 32)
    )
}

/// The product of both tiles.
fn whole(d: &str) -> String {
    (0..4).map(|step| product(d, "%da", step, 8192, step > 0) + "\n").collect()
}

const READY: &str = "fence.proxy.async;\nbar.sync 0;\nwgmma.fence.sync.aligned;\n";
const DONE: &str = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n";

fn try_run(body: &str, threads: u32) -> (String, Result<Vec<u32>, LaunchError>) {
    let text = with_shared(WORDS, body);
    let halves = Half::Bf16.random(2 * WORDS, 1);
    let words: Vec<u32> =
        halves.chunks(2).map(|pair| u32::from(pair[0]) | u32::from(pair[1]) << 16).collect();
    let result = run(&text, threads, &words, &vec![0; 128 * threads as usize]);
    (text, result)
}

/// The output of a correct kernel.
#[track_caller]
fn fine(body: &str) -> Vec<u32> {
    try_run(body, 128).1.unwrap_or_else(|error| panic!("{error}"))
}

/// The fault of `body`, which must be in the line with `// here`.
#[track_caller]
fn found(body: &str) -> Error {
    let (text, result) = try_run(body, 128);
    let Err(LaunchError::Failed(error)) = result else { panic!("no fault") };
    let line = text.lines().nth(error.line as usize - 1).unwrap();
    assert!(line.contains("// here"), "in another line: {error}");
    let message = error.to_string();
    assert!(message.contains("kernel test, line") && message.contains("block [0, 0, 0]"), "{message}");
    fine(&mended(body));
    *error
}

/// The text of the line that a fault names.
fn named(body: &str, line: u32) -> String {
    with_shared(WORDS, body).lines().nth(line as usize - 1).unwrap_or_default().to_owned()
}

#[test]
fn no_fence_before_the_first_product() {
    let error = found(&format!(
        "fence.proxy.async;\nbar.sync 0;
        // fixed:wgmma.fence.sync.aligned;
        {} // here\n{DONE}",
        product("d", "%da", 0, 8192, false)
    ));
    assert_eq!(error.fault, Fault::Unfenced { line: 0 });
}

/// Registers of D, of A, and registers that were only read.
#[test]
fn a_forgotten_fence_behind_other_uses_of_registers() {
    let first = format!("{READY}{}{DONE}", whole("d"));
    let uses = [
        ("mul.f32 %d5, %d5, 0f40000000; // use", product("d", "%da", 0, 8192, true)),
        ("st.global.f32 [%out], %d5; // use", product("d", "%da", 0, 8192, false)),
        ("st.global.f32 [%out], %d5; // use\nmov.f32 %d5, 0f00000000;", product("d", "%da", 0, 8192, false)),
        ("mov.f32 %d5, 0f00000000; // use", product("d", "%da", 0, 8192, true)),
        ("cvt.rn.bf16x2.f32 %a1, %d1, %d0; // use", product("e", "{%a0, %a1, %a2, %a3}", 0, 8192, false)),
    ];
    for (used, product) in uses {
        let body = format!(
            "mov.b32 %a0, 0;\nmov.b32 %a1, 0;\nmov.b32 %a2, 0;\nmov.b32 %a3, 0;
            {first}{used}
            // fixed:wgmma.fence.sync.aligned;
            {product} // here\n{DONE}"
        );
        let error = found(&body);
        let Fault::Unfenced { line } = error.fault else { panic!("{error}") };
        assert!(named(&body, line).contains("// use"), "{error}");
    }
}

/// Consecutive products on the same D, copies inserted by a compiler, and zeros that are not added to.
#[test]
fn what_needs_no_fence() {
    let zeros: String = (0..32).map(|i| format!("mov.f32 %d{i}, 0f00000000;\n")).collect();
    let copies: String = (0..32).map(|i| format!("mov.f32 %e{i}, %d{i};\n")).collect();
    let out: String = (0..32).map(|i| format!("st.global.f32 [%out+{}], %e{i};\n", 4 * i)).collect();
    let plain = fine(&format!("{READY}{}{}{DONE}{copies}{out}", whole("d"), whole("d")));
    let copied = fine(&format!("{READY}{zeros}{}{copies}{}{DONE}{out}", whole("d"), whole("e")));
    assert_eq!(plain, copied);
    assert!(plain.iter().any(|&bits| bits != 0));
}

#[test]
fn a_wait_for_products_that_is_one_group_short() {
    let body = format!(
        "{READY}{}wgmma.commit_group.sync.aligned;\n{}wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 1; // fixed:wgmma.wait_group.sync.aligned 0;
        st.global.f32 [%out], %d7;
        st.global.f32 [%out], %e7; // here
        wgmma.wait_group.sync.aligned 0;",
        whole("d"),
        whole("e")
    );
    let error = found(&body);
    let Fault::InFlight { line } = error.fault else { panic!("{error}") };
    assert!(named(&body, line).contains("{%e0, "), "{error}");
}

#[test]
fn registers_that_are_written_while_a_product_uses_them() {
    for (use_of, product) in [
        ("mov.f32 %d3, 0f00000000;", product("d", "%da", 0, 8192, false)),
        ("mov.b32 %a2, 0;", product("d", "{%a0, %a1, %a2, %a3}", 0, 8192, false)),
    ] {
        let error = found(&format!(
            "mov.b32 %a0, 0;\nmov.b32 %a1, 0;\nmov.b32 %a2, 0;\nmov.b32 %a3, 0;
            {READY}{product}\nwgmma.commit_group.sync.aligned;
            // fixed:wgmma.wait_group.sync.aligned 0;
            {use_of} // here
            wgmma.wait_group.sync.aligned 0;"
        ));
        assert!(matches!(error.fault, Fault::InFlight { .. }), "{error}");
    }
}

#[test]
fn products_of_another_size_on_the_same_registers() {
    let narrow = product("d", "%da", 0, 8192, false)
        .replace("m64n64", "m64n32")
        .replace(&registers("d", 32), &registers("d", 16));
    let error = found(&format!(
        "{READY}{}\nwgmma.commit_group.sync.aligned;
        // fixed:wgmma.wait_group.sync.aligned 0;
        {narrow} // here\n{DONE}",
        product("d", "%da", 0, 8192, false)
    ));
    assert!(matches!(error.fault, Fault::InFlight { .. }), "{error}");
}

#[test]
fn products_that_nobody_waits_for() {
    let error = found(&format!(
        "{READY}{}
        // fixed:wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0; // here",
        whole("d")
    ));
    assert!(matches!(error.fault, Fault::Uncommitted { .. }), "{error}");
    let error = found(&format!(
        "{READY}{}wgmma.commit_group.sync.aligned;
        // fixed:wgmma.wait_group.sync.aligned 0;
        ret; // here",
        whole("d")
    ));
    assert!(matches!(error.fault, Fault::Unwaited { .. }), "{error}");
}

#[test]
fn a_missing_fence_between_writes_and_reads_of_a_product() {
    let behind =
        format!("wgmma.fence.sync.aligned;\n{} // here\n{DONE}", product("d", "%da", 0, 8192, false));
    let error = found(&format!("// fixed:fence.proxy.async.shared::cta;\nbar.sync 0;\n{behind}"));
    let Fault::Proxy { other, .. } = error.fault else { panic!("{error}") };
    assert!(error.to_string().contains("read by the async proxy without a fence.proxy.async"), "{error}");
    assert!(named(&behind, other.line).contains("st.shared"), "{error}");
    // A fence that the barrier does not order before the product.
    let error = found(&format!(
        "// fixed:fence.proxy.async;
        bar.sync 0;
        fence.proxy.async; // bug\n{behind}"
    ));
    assert!(matches!(error.fault, Fault::Proxy { .. }), "{error}");
    // A fence before the thread has waited for its copy.
    let copy = "ld.param.u64 %x, [p1];\nand.b32 %r4, %t, 63;\nshl.b32 %r4, %r4, 4;\ncp.async.cg.shared::cta.global [%r4], [%x], 16;";
    let error = found(
        &format!(
            "bar.sync 0;\n{copy}
        fence.proxy.async; // bug
        cp.async.wait_all;
        // fixed:fence.proxy.async;
        bar.sync 0;\n{behind}"
        )
        .replace("and.b32 %r4, %t, 63", "mov.b32 %r4, %t"),
    );
    let Fault::Proxy { other, .. } = error.fault else { panic!("{error}") };
    assert!(other.line > 0, "{error}");
}

#[test]
fn a_missing_barrier_between_writes_and_reads_of_a_product() {
    let behind =
        format!("wgmma.fence.sync.aligned;\n{} // here\n{DONE}", product("d", "%da", 0, 8192, false));
    let error = found(&format!("fence.proxy.async;\n// fixed:bar.sync 0;\n{behind}"));
    assert!(matches!(error.fault, Fault::ReadAfterWrite { space: Space::Shared, .. }), "{error}");
    let error = found(&format!(
        "bar.sync 0;\nshl.b32 %r4, %t, 2;\nst.shared.u32 [%r4], 0;
        fence.proxy.async;
        // fixed:bar.sync 0;
        {behind}"
    ));
    assert!(matches!(error.fault, Fault::ReadAfterWrite { space: Space::Shared, .. }), "{error}");
}

#[test]
fn a_tile_that_is_written_while_a_product_reads_it() {
    let write = "shl.b32 %r4, %t, 2;\nst.shared.u32 [%r4+8192], 0; // here\n";
    let body = format!(
        "{READY}{}wgmma.commit_group.sync.aligned;
        bar.sync 0; // bug
        // fixed:wgmma.wait_group.sync.aligned 0;
        // fixed:bar.sync 0;
        {write}wgmma.wait_group.sync.aligned 0;",
        whole("d")
    );
    let error = found(&body);
    let Fault::AsyncRead { other, .. } = error.fault else { panic!("{error}") };
    assert!(named(&body, other.line).contains("wgmma.mma_async"), "{error}");
    // With a wait, but without a barrier for the warps that are not as far: they find other words. The last
    // warp writes words that all have read.
    let error = found(&format!(
        "{READY}{}{DONE}
        setp.lt.u32 %p, %t, 96;
        // fixed:bar.sync 0;
        shl.b32 %r4, %t, 2;
        @!%p st.shared.u32 [%r4+8192], 0; // here",
        whole("d")
    ));
    assert!(matches!(error.fault, Fault::WriteAfterRead { space: Space::Shared, .. }), "{error}");
    // One stage may be written while a product reads the other; a group that was waited for is done.
    fine(&format!(
        "{READY}{}wgmma.commit_group.sync.aligned;\n{}wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 1;
        bar.sync 0;
        shl.b32 %r4, %t, 2;\nst.shared.u32 [%r4+8192], 0;
        wgmma.wait_group.sync.aligned 0;",
        whole("d"),
        product("e", "%da", 0, 0, false)
    ));
}

#[test]
fn descriptors_of_other_places() {
    let right = product("d", "%da", 0, 8192, false);
    let b = TILE.descriptor(8192).to_string();
    let with = |descriptor: u64| {
        let bugged = right.replace(&b, &descriptor.to_string());
        assert_ne!(bugged, right);
        found(&format!("{READY}{bugged} // here // fixed:{right}\n{DONE}")).fault
    };
    assert!(matches!(with(TILE.descriptor(16384)), Fault::OutOfBounds { space: Space::Shared, .. }));
    assert!(matches!(with(TILE.descriptor(8192) + 8), Fault::Descriptor { .. }));
    assert!(matches!(with(TILE.descriptor(8192) | 1 << 49), Fault::Descriptor { .. }));
    // A doubled stride leads out of the tile.
    assert!(matches!(with(TILE.descriptor(8192) + (64 << 32)), Fault::OutOfBounds { .. }));
}

/// A halved stride, a descriptor that does not advance, a transposed matrix: the accesses are valid, but the
/// sums are wrong.
#[test]
fn sums_of_other_elements() {
    let out: String = (0..32).map(|i| format!("st.global.f32 [%out+{}], %d{i};\n", 4 * i)).collect();
    let right = format!("{READY}{}{DONE}{out}", whole("d"));
    let results = fine(&right);
    let b = |step: u64| (TILE.descriptor(8192) + 2 * step).to_string();
    let half_stride = (TILE.descriptor(8192) + 2 - (32 << 32)).to_string();
    for (text, bug) in
        [(&b(1), &half_stride), (&b(2), &b(1)), (&"1, 1, 0, 0;".to_owned(), &"1, 1, 0, 1;".to_owned())]
    {
        let bugged = right.replace(text, bug);
        assert_ne!(bugged, right);
        assert_ne!(fine(&bugged), results, "{bug} for {text}");
    }
}

#[test]
fn warps_that_do_not_the_same() {
    let right = product("d", "%da", 0, 8192, false);
    let b = TILE.descriptor(8192);
    let zeros: String = (0..32).map(|i| format!("mov.f32 %d{i}, 0f00000000;\n")).collect();
    let with = |edit: &str| {
        let bugged = right.replace("wgmma.mma", &format!("{edit} wgmma.mma"));
        found(&format!("{zeros}{READY}{bugged} // here // fixed:{right}\n{DONE}"))
    };
    let error = with(&format!("setp.eq.u32 %p, %t, 70; @%p mov.u64 %db, {};", b + 2));
    assert_eq!(error.fault, Fault::Unlike { what: "descriptor of B", other: None });
    assert_eq!(error.thread, [70, 0, 0]);
    let error = with(&format!("setp.ge.u32 %p, %t, 96; @%p mov.u64 %db, {};", b + 2));
    let Fault::Unlike { what: "descriptor of B", other: Some(other) } = error.fault else {
        panic!("{error}")
    };
    assert_eq!((other.thread, error.thread), (0, [96, 0, 0]));
    let error = with("setp.ge.u32 %q, %t, 96;");
    assert!(matches!(error.fault, Fault::Unlike { what: "predicate", other: Some(_) }), "{error}");
    let error = with("setp.ge.u32 %q, %t, 97;");
    assert_eq!((error.fault, error.thread), (Fault::Unlike { what: "predicate", other: None }, [97, 0, 0]));
    let error = with("setp.lt.u32 %p, %t, 97; @%p");
    assert!(matches!(error.fault, Fault::Divergent { .. }), "{error}");
    // A warp that skips a product is found at its next one, or at a barrier.
    let leaves_out = right.replace("wgmma.mma", "setp.lt.u32 %p, %t, 96; @%p wgmma.mma");
    let error = found(&format!(
        "{READY}{leaves_out} // fixed:{right}
        wgmma.commit_group.sync.aligned; // here
        wgmma.wait_group.sync.aligned 0;"
    ));
    assert!(matches!(error.fault, Fault::Unlike { what: "instruction", .. }), "{error}");
    let error = found(&format!(
        "fence.proxy.async;\nbar.sync 0;
        setp.lt.u32 %p, %t, 96; // bug
        @%p wgmma.fence.sync.aligned; // fixed:wgmma.fence.sync.aligned;
        bar.sync 0; // here\n{right}\n{DONE}"
    ));
    assert!(matches!(error.fault, Fault::Unlike { what: "instruction", .. }), "{error}");
    assert_eq!(error.thread, [96, 0, 0]);
}

#[test]
fn blocks_of_other_sizes() {
    let out: String = (0..32).map(|i| format!("st.global.f32 [%out+{}], %d{i};\n", 4 * i)).collect();
    let body = format!("{READY}{}{DONE}{out}", whole("d"));
    // Each warpgroup has its own product.
    let (one, two) = (fine(&body), try_run(&body, 256).1.unwrap_or_else(|error| panic!("{error}")));
    assert_eq!((&two[..one.len()], &two[one.len()..]), (&one[..], &one[..]));
    let Err(LaunchError::Failed(error)) = try_run(&body, 192).1 else { panic!("no fault") };
    assert_eq!((error.fault, error.thread), (Fault::Warpgroup { threads: 64 }, [128, 0, 0]));
}

/// Unsupported forms, and forms not available on the module's architecture, fail when the module is loaded.
#[test]
fn other_forms_say_their_line() {
    let right = with_shared(WORDS, &format!("{READY}{}\n{DONE}", product("d", "%da", 0, 8192, false)));
    let line = 1 + right.lines().position(|line| line.contains("wgmma.mma_async")).unwrap() as u32;
    let refused = |from: &str, to: &str| {
        assert!(right.contains(from));
        kiln_ptx::module(&right.replace(from, to)).unwrap_err()
    };
    for (from, to) in [
        ("%q, 1, 1, 0, 0;", "%q, -1, 1, 0, 0;"),
        ("%q, 1, 1, 0, 0;", "%q, 1, 1, 0;"),
        ("%q, 1, 1, 0, 0;", "%q, 1, 1, 0, 2;"),
        ("f32.bf16.bf16", "f32.bf16.f16"),
        ("f32.bf16.bf16", "f16.f16.f16"),
        ("m64n64k16", "m64n60k16"),
        ("m64n64k16", "m64n32k16"),
        ("%d31}", "%d31, %e0}"),
    ] {
        assert_eq!(refused(from, to).line, line, "{to}");
    }
    let error = refused(".target sm_90a", ".target sm_90");
    assert!(error.reason.contains("needs sm_90a, but the module is for sm_90"), "{error}");
}
