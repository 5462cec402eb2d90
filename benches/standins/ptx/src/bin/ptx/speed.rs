//! Speed in thread instructions per second, for loops of one kind of instruction each.

use std::error::Error;

use kiln_ptx::{Checks, DeviceMemory, Launch, Options, module};

/// Names of loops, and the instructions of one iteration. `%s` is the thread's place in shared memory, `%g`
/// the one in global memory.
const LOOPS: [(&str, &str); 6] = [
    (
        "integers",
        "mad.lo.s32 %r1, %r1, 3, %t;\nxor.b32 %r2, %r1, %r2;\nshl.b32 %r3, %r2, 3;\nadd.s32 %r1, %r1, %r3;
         mul.wide.u32 %y, %r1, 4;\nadd.s64 %x, %y, %x;",
    ),
    (
        "f32",
        "fma.rn.f32 %f1, %f2, %f3, %f1;\nfma.rn.f32 %f2, %f3, %f1, %f2;\nmul.f32 %f3, %f1, 0f3F000000;
         add.f32 %f1, %f1, %f3;\nmax.f32 %f2, %f2, %f1;\nex2.approx.ftz.f32 %f3, %f3;",
    ),
    (
        "shared memory",
        "ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%s];\nst.shared.v4.f32 [%s], {%f1, %f2, %f3, %f4};
         ld.shared.f32 %f5, [%s];\nbar.sync 0;",
    ),
    (
        "global memory",
        "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%g];\nst.global.v4.f32 [%g], {%f1, %f2, %f3, %f4};
         ld.global.nc.f32 %f5, [%g];",
    ),
    (
        "matrices",
        "ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%r1, %r2, %r3, %r4}, [%s];
         mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%f1, %f2, %f3, %f4};",
    ),
    (
        "warpgroups",
        "wgmma.fence.sync.aligned;
         wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%f8, %f9, %f10, %f11, %f12, %f13, %f14, %f15, %f16,
         %f17, %f18, %f19, %f20, %f21, %f22, %f23}, {%r1, %r2, %r3, %r4}, 4611686293305294848, %q, 1, 1, 0;
         wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;",
    ),
];

const THREADS: u32 = 256;
const BLOCKS: u32 = 64;

fn text(turn: &str) -> String {
    let turns = [turn; 8].join("\n");
    format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.shared .align 1024 .b8 tile[{}];
        .visible .entry speed(.param .u64 data, .param .u32 turns)\n{{
        .reg .b32 %t, %s, %n, %r<8>;\n.reg .f32 %f<24>;\n.reg .b64 %g, %x, %y;\n.reg .pred %p, %q;
        mov.u32 %t, %tid.x;\nshl.b32 %s, %t, 4;\nmov.u32 %r0, tile;\nadd.s32 %s, %s, %r0;
        mov.u32 %r1, %ctaid.x;\nmad.lo.s32 %r1, %r1, {THREADS}, %t;
        ld.param.u64 %g, [data];\nmul.wide.u32 %y, %r1, 16;\nadd.s64 %g, %g, %y;\nmov.u64 %x, 0;
        mov.f32 %f1, 0f3F800000;\nmov.f32 %f2, %f1;\nmov.f32 %f3, %f1;\nmov.f32 %f4, %f1;
        st.shared.v4.f32 [%s], {{%f1, %f2, %f3, %f4}};\nfence.proxy.async;\nbar.sync 0;
        mov.u32 %r2, 0;\nmov.u32 %r3, 0;\nmov.u32 %r4, 0;\nsetp.ne.u32 %q, %r2, 0;\nld.param.u32 %n, [turns];
        AGAIN:
        {turns}
        sub.s32 %n, %n, 8;\nsetp.gt.s32 %p, %n, 0;\n@%p bra AGAIN;
        ret;\n}}\n",
        16 * THREADS
    )
}

/// Returns the CPU time of this thread in seconds, which other processes on the machine hardly affect.
fn seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|first| first.parse::<u64>().ok());
    nanoseconds.unwrap_or_default() as f64 / 1e9
}

/// Measures each loop with and without checks, on one thread of the host.
pub fn measure() -> Result<(), Box<dyn Error>> {
    println!("million thread instructions per second, on one host thread");
    println!("{:16}{:>12}{:>12}", "", "checked", "unchecked");
    let data = vec![0u32; (4 * BLOCKS * THREADS) as usize + 4];
    let start = data.as_ptr() as u64 + data.as_ptr().align_offset(16) as u64 * 4;
    let memory = DeviceMemory::default();
    // SAFETY: `data` lives until the last launch has ended.
    unsafe { memory.add(start, 16 * u64::from(BLOCKS * THREADS), true) };
    memory.wrote(start, 16 * u64::from(BLOCKS * THREADS));
    for (name, turn) in LOOPS {
        let module = module(&text(turn))?;
        let mut speeds = [0.0; 2];
        for (speed, checks) in speeds.iter_mut().zip([Checks::On, Checks::Off]) {
            let arguments: [&[u8]; 2] = [&start.to_le_bytes(), &400u32.to_le_bytes()];
            let launch = Launch::new(&module.kernels[0], [BLOCKS, 1, 1], [THREADS, 1, 1], &arguments)?;
            let began = seconds();
            let work = launch.run(&memory, Options { checks, threads: 1 })?;
            *speed = work.instructions as f64 / (seconds() - began) / 1e6;
        }
        println!("{name:16}{:12.0}{:12.0}", speeds[0], speeds[1]);
    }
    Ok(())
}
