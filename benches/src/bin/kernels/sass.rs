//! Machine code as printed by `nvdisasm`: the instructions of a kernel's hot loop, and their time.

use std::collections::BTreeMap;

/// FLOPs of a product of fragments `m16n8k16` (`HMMA`).
const FLOPS_OF_HMMA: u32 = 4096;

/// FLOPs per cycle of the tensor cores in a quarter of a multiprocessor of sm_90, by the data sheet.
const TENSOR_FLOPS: f64 = 1024.0;

/// Share of [`TENSOR_FLOPS`] that products of fragments (`mma.sync`) reach; products of a warpgroup (`wgmma`) exceed it
/// (Luo et al., arXiv:2402.13499, table of tensor core throughput).
const HMMA_SHARE: f64 = 0.629;

/// Bytes that a quarter of a multiprocessor moves between registers and L1 or shared memory per cycle.
const L1_BYTES: f64 = 32.0;

const LANES: f64 = 32.0;

const WARPS: u32 = 4;

/// Numbers of instructions in some code, by the unit that executes them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mix {
    pub all: u32,
    /// Products on tensor cores, of fragments or of a warpgroup.
    pub tensor: u32,
    pub fragment_flops: u32,
    /// The warp's share of the FLOPs of its warpgroup's products (`HGMMA`).
    pub warpgroup_flops: u32,
    /// Exponentials, reciprocals and conversions between integers and floats.
    pub special: u32,
    pub float: u32,
    /// Integer arithmetic, comparisons, selections, and packing.
    pub integer: u32,
    pub shuffle: u32,
    /// Bytes that a warp moves to or from L1 and shared memory, with its share of its warpgroup's products.
    pub l1_bytes: u32,
    /// Bytes that a thread reads from device memory.
    pub read: u32,
    /// Bytes that a thread writes to device memory.
    pub written: u32,
}

impl Mix {
    fn add(&mut self, Instruction { opcode, operands }: Instruction<'_>) {
        self.all += 1;
        let name = opcode.split('.').next().unwrap_or_default();
        let bytes = width(opcode);
        match name {
            "HMMA" => {
                self.tensor += 1;
                self.fragment_flops += FLOPS_OF_HMMA;
            }
            "HGMMA" => {
                let [rows, columns, k] = shape(opcode);
                self.tensor += 1;
                self.warpgroup_flops += 2 * rows * columns * k / WARPS;
                // Two bytes of each element described by a descriptor: always the elements of B.
                let left = if operands.split(',').nth(1).is_some_and(is_descriptor) { rows } else { 0 };
                self.l1_bytes += 2 * (left + columns) * k / WARPS;
            }
            "MUFU" | "I2F" | "F2I" | "POPC" | "FLO" => self.special += 1,
            "FADD" | "FMUL" | "FFMA" => self.float += 1,
            "SHFL" => self.shuffle += 1,
            "LDSM" => self.l1_bytes += matrices(opcode) * 128,
            "LDS" | "STS" => self.l1_bytes += bytes * LANES as u32,
            "LDG" | "LDGSTS" => {
                self.read += bytes;
                self.l1_bytes += bytes * LANES as u32;
            }
            "STG" => {
                self.written += bytes;
                self.l1_bytes += bytes * LANES as u32;
            }
            "IADD3" | "VIADD" | "IMAD" | "ISETP" | "LOP3" | "LEA" | "SEL" | "SHF" | "FSEL" | "FSETP"
            | "FMNMX" | "F2FP" | "PRMT" | "IMNMX" | "VIMNMX" => self.integer += 1,
            _ => {}
        }
    }

    /// Returns the minimum cycles of a warp on a quarter of a multiprocessor, and the busiest unit, by the rates of
    /// CUDA's programming guide for compute capability 9.0.
    pub fn cycles(&self) -> (f64, &'static str) {
        let units = [
            (f64::from(self.all), "issue"),
            (self.tensor_cycles(), "tensor cores"),
            (f64::from(self.special) * 8.0, "special functions"),
            (f64::from(self.float), "f32"),
            (f64::from(self.integer) * 2.0, "integers"),
            (f64::from(self.shuffle) * 4.0 + f64::from(self.l1_bytes) / L1_BYTES, "shared memory"),
        ];
        units.into_iter().max_by(|one, other| one.0.total_cmp(&other.0)).unwrap_or((0.0, "issue"))
    }

    pub fn tensor_flops(&self) -> f64 {
        f64::from(self.fragment_flops) + f64::from(self.warpgroup_flops)
    }

    fn tensor_cycles(&self) -> f64 {
        (f64::from(self.fragment_flops) / HMMA_SHARE + f64::from(self.warpgroup_flops)) / TENSOR_FLOPS
    }
}

#[derive(Clone, Copy)]
struct Instruction<'a> {
    opcode: &'a str,
    operands: &'a str,
}

/// Returns the rows, columns and inner elements of `HGMMA.64x128x16.F32.BF16`; zeros for other instructions.
fn shape(opcode: &str) -> [u32; 3] {
    let sizes = opcode.split('.').nth(1).unwrap_or_default().split('x').map(|size| size.parse().unwrap_or(0));
    sizes.collect::<Vec<_>>().try_into().unwrap_or_default()
}

fn is_descriptor(operand: &str) -> bool {
    operand.trim_start().starts_with("gdesc[")
}

/// Returns the bytes per thread from the suffixes of a load or store.
fn width(opcode: &str) -> u32 {
    let of = |suffix: &str| match suffix {
        "128" => Some(16),
        "64" => Some(8),
        "U16" | "S16" => Some(2),
        "U8" | "S8" => Some(1),
        _ => None,
    };
    opcode.split('.').find_map(of).unwrap_or(4)
}

fn matrices(opcode: &str) -> u32 {
    opcode.rsplit('.').next().and_then(|count| count.parse().ok()).filter(|count| *count <= 4).unwrap_or(1)
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Code {
    pub once: Mix,
    /// The loop with the most FLOPs on tensor cores, or else the most traffic; the shorter one of equals.
    pub hot_loop: Option<Mix>,
}

/// Parses the output of `nvdisasm -c` into kernels by name.
pub fn read(text: &str) -> BTreeMap<String, Code> {
    let mut kernels = BTreeMap::new();
    let mut sections = text.split("\n.text.");
    sections.next();
    for section in sections {
        let Some((name, body)) = section.split_once(':') else { continue };
        kernels.insert(name.to_owned(), read_kernel(body));
    }
    kernels
}

fn read_kernel(body: &str) -> Code {
    let mut instructions = Vec::new();
    let mut labels = BTreeMap::new();
    let mut loops = Vec::new();
    for line in body.lines() {
        let line = line.trim();
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label, instructions.len());
        } else if let Some((_, instruction)) = line.strip_prefix("/*").and_then(|rest| rest.split_once("*/"))
        {
            let mut rest = instruction.trim();
            if rest.starts_with('@') {
                rest = rest.split_once(' ').map_or("", |(_, rest)| rest.trim_start());
            }
            let (opcode, operands) = rest.split_once(' ').unwrap_or((rest, ""));
            let opcode = opcode.trim_end_matches(';');
            let target = instruction.split_once("`(").and_then(|(_, rest)| rest.split(')').next());
            // The code ends with a branch to itself.
            if let (true, Some(start)) = (opcode == "BRA", target.and_then(|target| labels.get(target)))
                && *start < instructions.len()
            {
                loops.push(*start..instructions.len() + 1);
            }
            instructions.push(Instruction { opcode, operands });
        }
    }
    let mix = |range: std::ops::Range<usize>| {
        let mut mix = Mix::default();
        instructions[range].iter().for_each(|instruction| mix.add(*instruction));
        mix
    };
    let weight =
        |mix: &Mix| (mix.fragment_flops + mix.warpgroup_flops, mix.read + mix.written, u32::MAX - mix.all);
    let hot_loop = loops.into_iter().map(mix).max_by_key(weight);
    Code { once: mix(0..instructions.len()), hot_loop }
}

#[cfg(test)]
mod tests {
    use super::read;

    const TEXT: &str = "\
	.text.ignored
.text.product_01234567:
        /*0000*/                   LDG.E.128.CONSTANT R4, desc[UR4][R4.64] ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0020*/                   LDSM.16.M88.4 R8, [R2] ;
        /*0030*/                   HMMA.16816.F32.BF16 R8, R8, R4, R8 ;
        /*0040*/                   HMMA.16816.F32.BF16 R8, R8, R4, R8 ;
        /*0050*/              @!P1 BRA `(.L_x_1) ;
.L_x_9:
        /*0060*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
.L_x_0:
        /*0070*/                   BRA `(.L_x_0);
";

    #[test]
    fn the_hot_loop_is_found() {
        let kernels = read(TEXT);
        let code = &kernels["product_01234567"];
        assert_eq!((code.once.all, code.once.read, code.once.written), (8, 16, 2));
        let hot = code.hot_loop.as_ref().expect("a loop");
        assert_eq!((hot.all, hot.tensor, hot.l1_bytes), (4, 2, 512));
        assert_eq!((hot.fragment_flops, hot.warpgroup_flops), (8192, 0));
        // Sixteen cycles for four matrices, and fewer for two products.
        assert_eq!(hot.cycles(), (16.0, "shared memory"));
    }

    /// Output of nvdisasm 13 for two products of a warpgroup, with both and with one matrix in shared memory.
    const WARPGROUP: &str = "\
	.text.ignored
.text.attention_01234567:
.L_x_10:
        /*0b40*/                   WARPGROUP.ARRIVE ;
        /*0b90*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0c80*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*0c90*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0db0*/                   HGMMA.64x128x16.F32 R56, R24, gdesc[UR36].tnspB, R56, gsb0 ;
        /*1360*/              @!P1 BRA `(.L_x_10) ;
        /*1370*/                   LDSM.16.M88.4 R8, [R2] ;
.L_x_11:
        /*1380*/                   HMMA.16816.F32.BF16 R8, R8, R4, R8 ;
        /*1390*/                   HMMA.16816.F32.BF16 R8, R8, R4, R8 ;
        /*13a0*/              @!P1 BRA `(.L_x_11) ;
";

    #[test]
    fn products_of_a_warpgroup_count_for_its_four_warps() {
        let kernels = read(WARPGROUP);
        let code = &kernels["attention_01234567"];
        let hot = code.hot_loop.as_ref().expect("a loop");
        assert_eq!((hot.all, hot.tensor), (6, 3));
        // 64 x 64 x 16 twice and 64 x 128 x 16 once, a quarter for each warp.
        assert_eq!(hot.warpgroup_flops, 2 * 16 * (2 * 64 * 64 + 64 * 128) / 4);
        assert_eq!((hot.fragment_flops, code.once.fragment_flops), (0, 8192));
        assert_eq!(hot.tensor_flops(), f64::from(hot.warpgroup_flops));
        assert_eq!(hot.l1_bytes, 2 * 16 * (2 * (64 + 64) + 128) / 4);
        // 32 cycles for 64 x 64 x 16, and 64 for the other product; shared memory takes less.
        assert_eq!(hot.cycles(), (128.0, "tensor cores"));
    }
}
