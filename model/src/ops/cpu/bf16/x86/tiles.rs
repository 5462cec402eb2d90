//! Tiles of AMX, which have no stable intrinsics in Rust.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::marker::PhantomData;

use super::pack::{Panel, Sums};

/// Proof that the processor has bf16 tiles and that the operating system lets this process use them.
#[derive(Clone, Copy, Debug)]
pub struct Tiles(());

/// Keeps tiles configured on this thread while it lives.
#[derive(Debug)]
pub struct Configured(PhantomData<*const ()>);

/// Layout of `ldtilecfg`'s operand.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Tiles {
    /// Requests tiles, and space for saving them from the operating system; `None` if either is refused.
    pub fn try_new() -> Option<Tiles> {
        const TILES_AND_BF16: u32 = 1 << 24 | 1 << 22;
        let known = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILES_AND_BF16 == TILES_AND_BF16;
        if !known {
            return None;
        }
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: the request passes a number and touches no memory of this process.
        let refused = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
        (refused == 0).then_some(Tiles(()))
    }

    /// Configures all eight tiles with 16 rows of 64 bytes on this thread.
    pub fn configure(self) -> Configured {
        let mut all =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        all.row_bytes[..8].fill(64);
        all.rows[..8].fill(16);
        // SAFETY: the processor has tiles and the kernel allows them (`self`); it reads the 64 bytes of `all`.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &all, options(nostack, readonly, preserves_flags)) };
        Configured(PhantomData)
    }
}

impl Configured {
    /// Multiplies the 32 rows of one panel with the 32 columns of another, into `sums`.
    ///
    /// # Safety
    ///
    /// `lhs` and `rhs` must have `blocks` blocks, and `blocks` must not be 0.
    #[inline(always)]
    pub unsafe fn multiply(&self, lhs: Panel, rhs: Panel, blocks: usize, sums: &mut Sums) {
        // SAFETY: tiles are configured (`self`). Each iteration reads one of the `blocks` blocks of both panels; four
        // tiles of 16 lines of 64 bytes are written to `sums`, whose lines are 128 bytes apart.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{upper} + {row}]",
                "tileloadd tmm6, [{left} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{right} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{lower} + {row}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {upper}, {step}",
                "add {lower}, {step}",
                "add {left}, {block}",
                "add {right}, {block}",
                "dec {blocks}",
                "jnz 2b",
                "tilestored [{sums} + 2 * {line}], tmm0",
                "tilestored [{sums} + 2 * {line} + 64], tmm1",
                "tilestored [{sums} + 2 * {line} + 2048], tmm2",
                "tilestored [{sums} + 2 * {line} + 2112], tmm3",
                upper = inout(reg) lhs.start => _,
                lower = inout(reg) lhs.start.wrapping_add(lhs.second) => _,
                left = inout(reg) rhs.start => _,
                right = inout(reg) rhs.start.wrapping_add(rhs.second) => _,
                row = in(reg) lhs.row,
                line = in(reg) rhs.row,
                step = in(reg) lhs.block,
                block = in(reg) rhs.block,
                blocks = inout(reg) blocks => _,
                sums = in(reg) sums,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: returns the thread to the state before it used tiles, which is the cheapest to save.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
