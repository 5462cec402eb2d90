//! Kernels in a few lines: the surrounding text, their memory, and their results.

use std::sync::Arc;

use kiln_ptx::{Checks, DeviceMemory, Error, Kernel, Launch, LaunchError, Options, module};

/// Device memory of 32-bit words.
pub struct Buffer {
    words: Vec<u32>,
    start: usize,
    len: usize,
    memory: DeviceMemory,
}

impl Buffer {
    /// Unwritten memory.
    pub fn raw(memory: &DeviceMemory, len: usize) -> Buffer {
        // Starts at a multiple of 64 bytes, and has no neighbour in the same allocation.
        let words = vec![0xdead_beef; len + 16];
        let start = words.as_ptr().align_offset(64);
        let buffer = Buffer { words, start, len, memory: memory.clone() };
        // SAFETY: the words are in this buffer, which unregisters them when it is dropped.
        unsafe { memory.add(buffer.address(), 4 * len as u64, true) };
        buffer
    }

    pub fn new(memory: &DeviceMemory, values: &[u32]) -> Buffer {
        let mut buffer = Buffer::raw(memory, values.len());
        let start = buffer.start;
        buffer.words[start..][..values.len()].copy_from_slice(values);
        memory.wrote(buffer.address(), 4 * values.len() as u64);
        buffer
    }

    pub fn address(&self) -> u64 {
        self.words[self.start..].as_ptr() as u64
    }

    pub fn values(&self) -> Vec<u32> {
        // Volatile, because the kernel wrote without the compiler's knowledge.
        let start = self.words[self.start..].as_ptr();
        // SAFETY: the words are in this buffer.
        (0..self.len).map(|i| unsafe { start.add(i).read_volatile() }).collect()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.memory.remove(self.address());
    }
}

/// A kernel `test` with this body and with pointer parameters `p0`, `p1` and so on.
pub fn text(parameters: usize, declarations: &str, body: &str) -> String {
    let parameters: Vec<_> = (0..parameters).map(|i| format!(".param .u64 p{i}")).collect();
    format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n{declarations}\n.visible .entry test({})\n{{\n{body}\nret;\n}}\n",
        parameters.join(", ")
    )
}

pub fn kernel(text: &str) -> Arc<Kernel> {
    let module = module(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    module.kernel("test").expect("a kernel `test`").clone()
}

/// Launches `kernel` with buffers as its arguments.
pub fn launch(
    kernel: &Arc<Kernel>,
    memory: &DeviceMemory,
    [grid, block]: [u32; 2],
    buffers: &[&Buffer],
) -> Result<(), LaunchError> {
    let addresses: Vec<_> = buffers.iter().map(|buffer| buffer.address().to_le_bytes()).collect();
    let arguments: Vec<&[u8]> = addresses.iter().map(|address| &address[..]).collect();
    Launch::new(kernel, [grid, 1, 1], [block, 1, 1], &arguments)?
        .run(memory, Options { checks: Checks::Strict, ..Options::default() })
        .map(|_| ())
}

/// The registers of [`lanes`] and [`lanes64`].
const REGISTERS: &str = "
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<40>;
    .reg .u32 %tid;";

/// Runs one block of a warp: `%r1`, `%r2`, … have the lanes' values of `inputs`, and `%r0` their results.
pub fn lanes(inputs: &[&[u32]], body: &str) -> Vec<u32> {
    let memory = DeviceMemory::default();
    let buffers: Vec<_> = inputs.iter().map(|values| Buffer::new(&memory, values)).collect();
    let threads = inputs.first().map_or(32, |values| values.len());
    let result = Buffer::raw(&memory, threads);
    let mut code = format!("{REGISTERS}\nmov.u32 %tid, %tid.x;\nmul.wide.u32 %rd39, %tid, 4;\n");
    for i in 1..=inputs.len() {
        code += &format!(
            "ld.param.u64 %rd38, [p{i}];\nadd.s64 %rd38, %rd38, %rd39;\nld.global.u32 %r{i}, [%rd38];\n"
        );
    }
    code += body;
    code += "\nld.param.u64 %rd38, [p0];\nadd.s64 %rd38, %rd38, %rd39;\nst.global.u32 [%rd38], %r0;";
    let all: Vec<_> = std::iter::once(&result).chain(&buffers).collect();
    let kernel = kernel(&text(all.len(), "", &code));
    launch(&kernel, &memory, [1, threads as u32], &all).unwrap_or_else(|error| panic!("{error}"));
    result.values()
}

/// The same on f32.
pub fn floats(inputs: &[&[f32]], body: &str) -> Vec<f32> {
    let bits: Vec<Vec<u32>> =
        inputs.iter().map(|values| values.iter().map(|v| v.to_bits()).collect()).collect();
    let bits: Vec<&[u32]> = bits.iter().map(|values| &values[..]).collect();
    lanes(&bits, body).into_iter().map(f32::from_bits).collect()
}

/// The fault of a launch that must fail.
#[track_caller]
pub fn fault(text: &str, sizes: [u32; 2], memory: &DeviceMemory, buffers: &[&Buffer]) -> Error {
    match launch(&kernel(text), memory, sizes, buffers) {
        Err(LaunchError::Failed(error)) => *error,
        other => panic!("expected a fault, found {other:?}"),
    }
}

/// A body without its bugs: without the lines that end in `// bug`, and with the text after `// fixed:`.
pub fn mended(body: &str) -> String {
    let lines = body.lines().filter(|line| !line.contains("// bug"));
    let mended = lines.map(|line| line.split_once("// fixed:").map_or(line, |(_, mended)| mended));
    mended.collect::<Vec<_>>().join("\n")
}

/// Numbers of the random generator SplitMix64.
pub fn random(len: usize, seed: u64) -> Vec<u32> {
    let one = |i: u64| {
        let mut z = (seed << 32 | i).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z >> 32) as u32
    };
    (0..len as u64).map(one).collect()
}

/// f32 of all magnitudes: random bits, and values at the limits of the format.
pub fn edges(seed: u64) -> Vec<f32> {
    let mut values: Vec<f32> = random(480, seed).into_iter().map(f32::from_bits).collect();
    // Moderate magnitudes too, so that results are neither 0 nor infinite.
    values.extend(
        random(480, seed + 100).into_iter().map(|bits| f32::from_bits(bits & 0x83ff_ffff | 0x3c00_0000)),
    );
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        2.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN,
        f32::MIN_POSITIVE,
        -f32::MIN_POSITIVE,
        f32::from_bits(1),
        f32::from_bits(0x8000_0001),
        f32::EPSILON,
        1.0 + f32::EPSILON,
        65504.0,
        65520.0,
        5.960_464_5e-8,
        2.980_232_2e-8,
        3.389_531_4e38,
        16_777_216.0,
        16_777_218.0,
        2_147_483_648.0,
        -2_147_483_648.0,
        4_294_967_296.0,
        0.499_999_97,
        1.5,
        2.5,
        -2.5,
        1e-45,
    ];
    let turn = seed as usize % special.len();
    values.extend(special[turn..].iter().chain(&special[..turn]));
    values
}

/// Returns `true` if two results have the same bits or are both NaN.
pub fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}
