//! A kernel with warpgroup products in a few lines, and matrices in shared memory as drawn in PTX's manual.

use kiln_ptx::{DeviceMemory, LaunchError};

use crate::support::{Buffer, kernel, launch, random, text};

/// Halves of one format.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Half {
    Bf16,
    F16,
}

impl Half {
    pub fn name(self) -> &'static str {
        if self == Half::Bf16 { "bf16" } else { "f16" }
    }

    /// Normal numbers from 2⁻⁴ to 2⁴, of both signs.
    pub fn random(self, len: usize, seed: u64) -> Vec<u16> {
        let (fraction, bias) = if self == Half::Bf16 { (7, 127) } else { (10, 15) };
        let one = |bits: u32| {
            let exponent = bias - 4 + (bits >> 16) % 8;
            (bits >> 31) << 15 | exponent << fraction | bits & ((1 << fraction) - 1)
        };
        random(len, seed).into_iter().map(|bits| one(bits) as u16).collect()
    }

    /// The value of a normal half.
    pub fn number(self, bits: u16) -> f64 {
        let (fraction, bias) = if self == Half::Bf16 { (7, 127) } else { (10, 15) };
        let (exponent, sign) =
            (i32::from(bits << 1 >> 1) >> fraction, if bits >> 15 == 1 { -1.0 } else { 1.0 });
        let significand = f64::from(bits & ((1 << fraction) - 1) | 1 << fraction);
        sign * significand * f64::powi(2.0, exponent - bias - fraction)
    }
}

/// The layout of a matrix in shared memory, and its use by a product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tile {
    /// Rows of A, or columns of B.
    pub lines: usize,
    /// Number of elements along the sum.
    pub k: usize,
    pub transposed: bool,
    /// Number of 16-byte chunks in a row of a swizzled pattern: 8, 4 or 2; 1 without swizzling.
    pub chunks: usize,
}

impl Tile {
    /// Elements of the tile along the row of a pattern, and across.
    fn sides(&self) -> [usize; 2] {
        if self.transposed { [self.lines, self.k] } else { [self.k, self.lines] }
    }

    /// Bytes of the tile, whose last panel may have unused elements.
    pub fn bytes(&self) -> usize {
        let [along, across] = self.sides();
        2 * along.next_multiple_of(8 * self.chunks) * across
    }

    /// The position of element (line, k) in units of 2 bytes: rows of patterns are drawn with their chunks in
    /// swizzled order.
    pub fn place(&self, line: usize, k: usize) -> usize {
        let width = 8 * self.chunks;
        // Panels as wide as a pattern, with consecutive rows.
        let (row, along) = if self.transposed { (k, line) } else { (line, k) };
        let [_, rows] = self.sides();
        let turn = match self.chunks {
            8 => row % 8,
            4 => row / 2 % 4,
            2 => row / 4 % 2,
            _ => 0,
        };
        let chunk = (along % width / 8) ^ turn;
        along / width * rows * width + row * width + chunk * 8 + along % 8
    }

    /// The descriptor of the tile at `start`.
    pub fn descriptor(&self, start: usize) -> u64 {
        let pattern = 128 * self.chunks;
        let panel = 16 * self.chunks * self.sides()[1];
        // Without swizzling, a panel of chunks is the leading dimension only for K-major matrices.
        let (leading, stride) =
            if self.chunks == 1 && self.transposed { (pattern, panel) } else { (panel, pattern) };
        let swizzle = [1, 8, 4, 2].iter().position(|&chunks| chunks == self.chunks).unwrap();
        ((start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | swizzle << 62) as u64
    }

    /// The amount to add to a descriptor after `step` products along the sum.
    pub fn advance(&self, step: usize) -> u64 {
        let (width, k) = (8 * self.chunks, 16 * step);
        let place = match self.transposed {
            true => k * width,
            false => k / width * self.lines * width + k % width,
        };
        (2 * place) as u64 >> 4
    }

    /// The words of the tile with these elements, line by line. Unused elements are NaN.
    pub fn image(&self, elements: &[u16]) -> Vec<u32> {
        let mut halves = vec![0x7fff; self.bytes() / 2];
        for line in 0..self.lines {
            for k in 0..self.k {
                halves[self.place(line, k)] = elements[line * self.k + k];
            }
        }
        halves.chunks(2).map(|pair| u32::from(pair[0]) | u32::from(pair[1]) << 16).collect()
    }
}

/// Registers `%f0`, `%f1`, …
pub fn registers(letter: &str, count: usize) -> String {
    (0..count).map(|i| format!("%{letter}{i}")).collect::<Vec<_>>().join(", ")
}

/// Threads that copy `words` words from `p1` to shared memory, starting at `tile`, and continue with `body`.
/// `%t` is the thread, `%out` the address of its 128 words of `p0`, and `%in` that of its 128 words of `p2`.
pub fn with_shared(words: usize, body: &str) -> String {
    let code = format!(
        ".reg .b32 %t, %s, %r<8>, %a<32>;\n.reg .f32 %d<128>, %e<128>;\n.reg .b64 %x, %y, %out, %in, %da, %db, %rd<8>;\n.reg .pred %p, %q;
        mov.u32 %t, %tid.x;\nmov.u32 %s, tile;\nmov.u32 %r0, %t;
        ld.param.u64 %out, [p0];\nmul.wide.u32 %y, %t, 512;\nadd.s64 %out, %out, %y;
        ld.param.u64 %in, [p2];\nadd.s64 %in, %in, %y;
        COPY:
        setp.ge.u32 %p, %r0, {words};
        @%p bra COPIED;
        ld.param.u64 %x, [p1];\nmul.wide.u32 %y, %r0, 4;\nadd.s64 %x, %x, %y;\nld.global.u32 %r1, [%x];
        shl.b32 %r2, %r0, 2;\nadd.s32 %r2, %r2, %s;\nst.shared.u32 [%r2], %r1;
        mov.u32 %r1, %ntid.x;\nadd.s32 %r0, %r0, %r1;
        bra COPY;
        COPIED:\n{body}"
    );
    text(3, &format!(".shared .align 1024 .b8 tile[{}];", 4 * words), &code)
}

/// Runs `threads` threads with the words of shared memory and 128 input words for each thread. Returns the
/// 128 output words of each.
pub fn run(text: &str, threads: u32, shared: &[u32], input: &[u32]) -> Result<Vec<u32>, LaunchError> {
    let memory = DeviceMemory::default();
    let (out, shared) =
        (Buffer::new(&memory, &vec![0; 128 * threads as usize]), Buffer::new(&memory, shared));
    let input = Buffer::new(&memory, input);
    launch(&kernel(text), &memory, [1, threads], &[&out, &shared, &input])?;
    Ok(out.values())
}
