//! Branches, barriers, and instructions across the lanes of a warp.

use kiln_ptx::{DeviceMemory, LaunchError};

use crate::support::{Buffer, kernel, lanes, launch, random, text};

#[test]
fn lanes_take_their_own_branches_and_meet_again() {
    let values = random(64, 1);
    let body = "
        and.b32 %r2, %r1, 3;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra ZERO;
        setp.eq.u32 %p1, %r2, 1;
        @%p1 bra ONE;
        mov.u32 %r0, 30;
        bra.uni DONE;
        ZERO:
        mov.u32 %r0, 10;
        bra.uni DONE;
        ONE:
        mov.u32 %r0, 20;
        DONE:
        activemask.b32 %r3;
        setp.eq.s32 %p2, %r3, -1;
        selp.b32 %r4, 1, 0, %p2;
        add.s32 %r0, %r0, %r4;";
    let wanted: Vec<u32> = values.iter().map(|v| [11, 21, 31, 31][(v & 3) as usize]).collect();
    assert_eq!(lanes(&[&values], body), wanted);
}

/// Nested loops with a different number of iterations in each lane, and with an exit in the middle.
#[test]
fn lanes_leave_loops_when_they_are_done() {
    let values: Vec<u32> = random(96, 2).iter().map(|v| v % 23).collect();
    let body = "
        mov.u32 %r0, 0;
        mov.u32 %r2, 0;
        OUTER:
        setp.ge.u32 %p1, %r2, %r1;
        @%p1 bra OUT;
        mov.u32 %r3, 0;
        INNER:
        setp.gt.u32 %p2, %r3, %r2;
        @%p2 bra NEXT;
        add.s32 %r0, %r0, %r3;
        setp.gt.u32 %p3, %r0, 500;
        @%p3 bra OUT;
        add.s32 %r3, %r3, 1;
        bra.uni INNER;
        NEXT:
        add.s32 %r2, %r2, 1;
        bra.uni OUTER;
        OUT:
        activemask.b32 %r4;
        not.b32 %r4, %r4;
        add.s32 %r0, %r0, %r4;";
    let turns = |limit: u32| {
        let mut sum = 0;
        for i in 0..limit {
            for j in 0..=i {
                sum += j;
                if sum > 500 {
                    return sum;
                }
            }
        }
        sum
    };
    let wanted: Vec<u32> = values.iter().map(|&v| turns(v)).collect();
    assert_eq!(lanes(&[&values], body), wanted);
}

#[test]
fn lanes_that_return_early_are_no_longer_there() {
    let memory = DeviceMemory::default();
    let result = Buffer::new(&memory, &[7; 32]);
    let code = text(
        1,
        "",
        ".reg .b32 %t, %r<4>;\n.reg .b64 %x, %y;\n.reg .pred %p;
        mov.u32 %t, %tid.x;
        setp.lt.u32 %p, %t, 12;
        @%p ret;
        activemask.b32 %r1;
        ld.param.u64 %x, [p0];\nmul.wide.u32 %y, %t, 4;\nadd.s64 %x, %x, %y;\nst.global.u32 [%x], %r1;",
    );
    launch(&kernel(&code), &memory, [1, 32], &[&result]).unwrap();
    let wanted: Vec<u32> = (0..32).map(|lane| if lane < 12 { 7 } else { 0xffff_f000 }).collect();
    assert_eq!(result.values(), wanted);
}

/// The manual's formula with clamps and segments, for all kinds.
#[test]
fn shuffles_move_values_inside_of_their_segments() {
    let values = random(32, 3);
    for (kind, by, limits) in [
        ("bfly", 1, 31),
        ("bfly", 16, 31),
        ("bfly", 4, 0x1807),
        ("up", 3, 0),
        ("up", 2, 0x1800),
        ("down", 5, 31),
        ("down", 3, 0x1c1f),
        ("idx", 9, 31),
        ("idx", 2, 0x181f),
    ] {
        let body = format!(
            "shfl.sync.{kind}.b32 %r2|%p1, %r1, {by}, {limits}, -1;\nselp.b32 %r3, 1, 0, %p1;
            xor.b32 %r0, %r2, %r3;"
        );
        let wanted: Vec<u32> = (0..32i32)
            .map(|lane| {
                let (clamp, segment) = (limits & 31, limits >> 8 & 31);
                let most = (lane & segment) | (clamp & !segment);
                let least = lane & segment;
                let (from, there) = match kind {
                    "up" => (lane - by, lane - by >= most),
                    "down" => (lane + by, lane + by <= most),
                    "bfly" => (lane ^ by, (lane ^ by) <= most),
                    _ => (least | (by & !segment), (least | (by & !segment)) <= most),
                };
                let from = if there { from } else { lane };
                values[from as usize] ^ u32::from(there)
            })
            .collect();
        assert_eq!(lanes(&[&values], &body), wanted, "{kind} by {by} in {limits:#x}");
    }
}

#[test]
fn a_sum_over_a_warp_by_butterflies() {
    let values: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let mut body = String::from("mov.b32 %r0, %r1;\n");
    for step in [16, 8, 4, 2, 1] {
        body += &format!(
            "activemask.b32 %r3;\nshfl.sync.bfly.b32 %r2|%p1, %r0, {step}, 31, %r3;\nadd.f32 %r0, %r0, %r2;\n"
        );
    }
    let sums = crate::support::floats(&[&values], &body);
    assert!(sums[..32].iter().all(|&sum| sum == 496.0) && sums[32..].iter().all(|&sum| sum == 1520.0));
}

#[test]
fn votes_ask_all_lanes() {
    let values: Vec<u32> = (0..96).map(|i| if i < 32 { 1 } else { i % 3 }).collect();
    let body = |vote: &str| {
        format!("setp.ne.u32 %p1, %r1, 0;\nvote.sync.{vote}.pred %p2, %p1, -1;\nselp.b32 %r0, 1, 0, %p2;")
    };
    let expect = |vote: &str, warps: [u32; 3]| {
        let wanted: Vec<u32> = warps.iter().flat_map(|&says| [says; 32]).collect();
        assert_eq!(lanes(&[&values], &body(vote)), wanted, "{vote}");
    };
    expect("all", [1, 0, 0]);
    expect("any", [1, 1, 1]);
    expect("uni", [1, 0, 0]);
    let ballots = lanes(&[&values], "setp.ne.u32 %p1, %r1, 0;\nvote.sync.ballot.b32 %r0, %p1, -1;");
    let bits = |warp: usize| (0..32).map(|i| u32::from(values[32 * warp + i] != 0) << i).sum::<u32>();
    assert_eq!([ballots[0], ballots[32], ballots[95]], [bits(0), bits(1), bits(2)]);
}

/// Each thread writes its word and, after the barrier, reads one of another warp; twice, so that words are
/// reused.
#[test]
fn barriers_join_warps() {
    let memory = DeviceMemory::default();
    let result = Buffer::raw(&memory, 256);
    let code = text(
        1,
        ".shared .align 4 .b8 tile[1024];",
        ".reg .b32 %t, %r<8>;\n.reg .b64 %x, %y;
        mov.u32 %t, %tid.x;\nmov.u32 %r1, tile;\nshl.b32 %r2, %t, 2;\nadd.s32 %r2, %r2, %r1;
        st.shared.u32 [%r2], %t;
        bar.sync 0;
        xor.b32 %r3, %t, 255;\nshl.b32 %r3, %r3, 2;\nadd.s32 %r3, %r3, %r1;\nld.shared.u32 %r4, [%r3];
        bar.sync 0;
        st.shared.u32 [%r3], %r4;
        bar.sync 0;
        ld.shared.u32 %r5, [%r2];\nshl.b32 %r5, %r5, 16;\nor.b32 %r5, %r5, %r4;
        ld.param.u64 %x, [p0];\nmul.wide.u32 %y, %t, 4;\nadd.s64 %x, %x, %y;\nst.global.u32 [%x], %r5;",
    );
    launch(&kernel(&code), &memory, [1, 256], &[&result]).unwrap();
    assert_eq!(result.values(), (0..256).map(|t| t << 16 | (255 - t)).collect::<Vec<_>>());
}

/// A block whose last warp is incomplete, and grids of three dimensions.
#[test]
fn threads_and_blocks_have_their_numbers() {
    let memory = DeviceMemory::default();
    let result = Buffer::new(&memory, &[0; 8 * 40]);
    let code = text(
        1,
        "",
        ".reg .b32 %r<20>;\n.reg .b64 %x, %y;
        mov.u32 %r1, %tid.x;\nmov.u32 %r2, %tid.y;\nmov.u32 %r3, %tid.z;\nmov.u32 %r4, %ntid.x;\nmov.u32 %r5, %ntid.y;
        mad.lo.s32 %r6, %r3, %r5, %r2;\nmad.lo.s32 %r6, %r6, %r4, %r1;
        mov.u32 %r7, %ctaid.x;\nmov.u32 %r8, %ctaid.y;\nmov.u32 %r9, %ctaid.z;\nmov.u32 %r10, %nctaid.x;\nmov.u32 %r11, %nctaid.y;
        mad.lo.s32 %r12, %r9, %r11, %r8;\nmad.lo.s32 %r12, %r12, %r10, %r7;
        mad.lo.s32 %r13, %r12, 40, %r6;
        mov.u32 %r14, %laneid;\nshl.b32 %r15, %r14, 16;\nadd.s32 %r15, %r15, %r13;
        ld.param.u64 %x, [p0];\nmul.wide.u32 %y, %r13, 4;\nadd.s64 %x, %x, %y;\nst.global.u32 [%x], %r15;",
    );
    let address = result.address().to_le_bytes();
    let launch = kiln_ptx::Launch::new(&kernel(&code), [2, 2, 2], [5, 4, 2], &[&address]).unwrap();
    launch.run(&memory, kiln_ptx::Options::default()).unwrap();
    assert_eq!(result.values(), (0..320).map(|i| (i % 40 % 32) << 16 | i).collect::<Vec<_>>());
}

#[test]
fn launches_that_no_device_has_are_refused() {
    let memory = DeviceMemory::default();
    let small = kernel(&text(0, "", "").replace("test()", "test()\n.maxntid 64, 1, 1"));
    let refused = |kernel, sizes| matches!(launch(kernel, &memory, sizes, &[]), Err(LaunchError::Refused(_)));
    assert!(launch(&small, &memory, [1, 64], &[]).is_ok());
    assert!(refused(&small, [1, 65]));
    assert!(refused(&small, [0, 64]));
    assert!(refused(&small, [1, 0]));
    let plain = kernel(&text(0, "", ""));
    assert!(refused(&plain, [1, 1025]));
    assert!(refused(&plain, [u32::MAX, 32]));
    // 48 KiB, or more if the function is allowed to request it.
    let mut asks = kiln_ptx::Launch::new(&plain, [1; 3], [32, 1, 1], &[]).unwrap();
    asks.dynamic_shared = 100 << 10;
    assert!(matches!(asks.run(&memory, kiln_ptx::Options::default()), Err(LaunchError::Refused(_))));
    asks.dynamic_shared_limit = 100 << 10;
    assert!(asks.run(&memory, kiln_ptx::Options::default()).is_ok());
    let takes_one = kernel(&text(1, "", ""));
    assert!(matches!(launch(&takes_one, &memory, [1, 32], &[]), Err(LaunchError::Refused(_))));
}

#[test]
fn an_unknown_instruction_is_told_with_its_line() {
    let error = kiln_ptx::module(&text(0, "", ".reg .b32 %r<2>;\nfrob.b32 %r0, %r1;")).unwrap_err();
    assert_eq!(error.to_string(), "line 8: unknown instruction `frob.b32`");
    // An unknown flag makes a different instruction.
    let error = kiln_ptx::module(&text(0, "", ".reg .b32 %r<2>;\nadd.frob.s32 %r0, %r1, %r1;")).unwrap_err();
    assert_eq!(error.to_string(), "line 8: unknown instruction `add.frob.s32`");
    let error = kiln_ptx::module(&text(0, "", "bra NOWHERE;")).unwrap_err();
    assert_eq!(error.to_string(), "line 7: no label `NOWHERE`");
}
