//! The location of a `wgmma` matrix in shared memory.
//!
//! Based on PTX's manual ("Shared Memory Matrix Layout", "Matrix Descriptor Format", 9.7.15.5.1.2) and
//! CUTLASS (`include/cute/arch/mma_sm90_desc.hpp` for the bits, `include/cute/atom/mma_traits_sm90_gmma.hpp`
//! for the layouts).
//!
//! A descriptor has 64 bits: the start address in bits 0 to 13, the leading offset in bits 16 to 29, the
//! stride offset in bits 32 to 45, all three in units of 16 bytes; the base offset in bits 49 to 51; and the
//! swizzling in bits 62 and 63 (0 none, 1 of 128 bytes, 2 of 64, 3 of 32).
//!
//! A matrix is read in chunks of 16 bytes, which are 8 elements of 16 bits. With swizzling, a row of a
//! *pattern* has W chunks (8, 4 or 2), and a pattern has 8 consecutive rows. The location of element (mn, k),
//! where `mn` is a row of A or a column of B:
//!
//! - **K-major** (`trans` 0), the elements of a chunk have one mn and 8 k: at start + (mn / 8) · stride
//!   offset + (mn % 8) · 16 W + (k / 8) · 16. The leading offset is not used. A product uses 16 consecutive
//!   k; for the next 16, the start address advances by 32 bytes, inside the pattern (`DescriptorIterator` in
//!   CUTLASS, `advance_gmma_desc_lo` in DeepGEMM).
//! - **MN-major** (`trans` 1), the elements of a chunk have one k and 8 mn: at start + (mn / 8 W) · leading
//!   offset + (k / 8) · stride offset + (k % 8) · 16 W + (mn % 8 W / 8) · 16. For the next 16 k, the start
//!   address advances by two stride offsets.
//! - **Without swizzling**, the chunks of 8 rows are consecutive. K-major: (mn / 8) · stride offset + (mn %
//!   8) · 16 + (k / 8) · leading offset. MN-major: (mn / 8) · stride offset + (k / 8) · leading offset + (k %
//!   8) · 16.
//!
//! Swizzling then changes the address in shared memory: bits 4 to 6 by an exclusive or with bits 7 to 9; with
//! 64 bytes, bits 4 and 5 with 7 and 8; with 32 bytes, bit 4 with 7. So a pattern starts at a multiple of
//! 1024 bytes (512, 256). A pattern that does not has a base offset, which is not supported here.

use crate::error::Fault;

/// The permutation of the chunks of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Swizzle {
    None,
    /// Number of chunks of a row: 8, 4 or 2.
    Chunks(u32),
}

/// Bytes of a chunk.
pub const CHUNK: u32 = 16;

/// Number of elements of a chunk, and of rows of a pattern.
const EIGHT: u32 = 8;

/// A matrix in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    start: u32,
    leading: u32,
    stride: u32,
    swizzle: Swizzle,
}

impl Descriptor {
    /// Decodes a descriptor.
    ///
    /// # Errors
    ///
    /// If the pattern's start does not match a base offset of 0, or if the base offset is not 0.
    pub fn read(bits: u64) -> Result<Descriptor, Fault> {
        let field = |from: u32| (bits >> from & 0x3fff) as u32 * CHUNK;
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::Chunks(8),
            2 => Swizzle::Chunks(4),
            _ => Swizzle::Chunks(2),
        };
        let descriptor = Descriptor { start: field(0), leading: field(16), stride: field(32), swizzle };
        let fail = |reason| Err(Fault::Descriptor { descriptor: bits, reason });
        if bits >> 49 & 7 != 0 && swizzle != Swizzle::None {
            return fail("its base offset is not 0, which is not supported");
        }
        if let Swizzle::Chunks(chunks) = swizzle
            && descriptor.start % (CHUNK * EIGHT * chunks) >= CHUNK * chunks
        {
            return fail("its swizzled pattern does not start at a multiple of its size");
        }
        Ok(descriptor)
    }

    /// Returns the address of the chunk with element (mn, k). For a K-major matrix, k must be a multiple of 8; for an
    /// MN-major one, mn.
    pub fn chunk(&self, mn_major: bool, mn: u32, k: u32) -> u32 {
        let row_of = |chunks: u32, row: u32, chunk: u32| row * CHUNK * chunks + chunk * CHUNK;
        let offset = match (self.swizzle, mn_major) {
            (Swizzle::None, _) => {
                let row = if mn_major { k } else { mn };
                mn / EIGHT * self.stride + k / EIGHT * self.leading + row % EIGHT * CHUNK
            }
            (Swizzle::Chunks(chunks), false) => {
                mn / EIGHT * self.stride + row_of(chunks, mn % EIGHT, k / EIGHT)
            }
            (Swizzle::Chunks(chunks), true) => {
                let width = EIGHT * chunks;
                mn / width * self.leading
                    + k / EIGHT * self.stride
                    + row_of(chunks, k % EIGHT, mn % width / EIGHT)
            }
        };
        let address = self.start + offset;
        match self.swizzle {
            Swizzle::None => address,
            Swizzle::Chunks(chunks) => address ^ ((address >> 3) & ((chunks - 1) * CHUNK)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(start: u64, leading: u64, stride: u64, swizzle: u64) -> u64 {
        start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | swizzle << 62
    }

    /// `Swizzle<b, 4, 3>` of CuTe over a layout of shape ((8, m), (8, 2)) or ((8, w, m), (8, k)), as listed
    /// in CUTLASS for elements of 16 bits.
    fn cute(address: u32, b: u32) -> u32 {
        let mask = (1 << b) - 1;
        address ^ ((address >> 7 & mask) << 4)
    }

    #[test]
    fn chunks_are_where_cutes_canonical_layouts_have_them() {
        // Eight elements (T) of 16 bits; layouts in units of bytes.
        for (swizzle, b) in [(1, 3), (2, 2), (3, 1)] {
            let w = 1 << b;
            let (start, lbo, sbo) = (4096, 8192, 2048);
            let matrix = Descriptor::read(bits(start, lbo, sbo, swizzle)).expect("a descriptor");
            let (start, lbo, sbo) = (start as u32, lbo as u32, sbo as u32);
            for mn in 0..256 {
                for k in 0..16 {
                    // ((8, m), (T, 2)) : ((w T, SBO), (1, T))
                    if k % 8 == 0 {
                        let plain = start + mn % 8 * w * 16 + mn / 8 * sbo + k / 8 * 16;
                        assert_eq!(matrix.chunk(false, mn, k), cute(plain, b), "{swizzle}: {mn}, {k}");
                    }
                    // ((T, w, m), (8, k)) : ((1, T, LBO), (w T, SBO))
                    if mn % 8 == 0 {
                        let plain = start + mn / 8 % w * 16 + mn / 8 / w * lbo + k % 8 * w * 16 + k / 8 * sbo;
                        assert_eq!(matrix.chunk(true, mn, k), cute(plain, b), "{swizzle}: {mn}, {k}");
                    }
                }
            }
        }
        // The example without swizzling in PTX's manual: bf16, MN-major, LBO of 128 elements, SBO of 64.
        let matrix = Descriptor::read(bits(0, 256, 128, 0)).expect("a descriptor");
        assert_eq!(
            [(0, 0), (0, 1), (8, 0), (0, 8)].map(|(mn, k)| matrix.chunk(true, mn, k)),
            [0, 16, 128, 256]
        );
        assert_eq!(
            [(0, 0), (1, 0), (8, 0), (0, 8)].map(|(mn, k)| matrix.chunk(false, mn, k)),
            [0, 16, 128, 256]
        );
    }

    #[test]
    fn a_pattern_starts_at_a_multiple_of_its_size() {
        for (swizzle, size) in [(1, 1024), (2, 512), (3, 256)] {
            for start in (0..2048).step_by(16) {
                let fits = start % size < size / 8;
                assert_eq!(
                    Descriptor::read(bits(start, 16, 1024, swizzle)).is_ok(),
                    fits,
                    "{swizzle}, {start}"
                );
            }
        }
        assert!(Descriptor::read(bits(0, 16, 1024, 1) | 1 << 49).is_err());
        assert!(Descriptor::read(bits(144, 16, 1024, 0)).is_ok());
    }
}
