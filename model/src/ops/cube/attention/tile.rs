//! The layout of a tile of the scores on the units of a cube.
//!
//! A cube holds `rows` rows of queries or keys, and processes `columns` columns of the other kind at a time. A unit
//! holds `rows_per_unit` rows of a product in registers, with `columns_per_unit` scores each, or `runs_per_unit` runs
//! of `run` adjacent values of `head_dim`.

use burn::tensor::Device;
use cubecl::ir::features::MmaConfig;
use cubecl::ir::{DeviceProperties, ElemType, FloatKind};
use cubecl::prelude::*;

use crate::ops::plain::{FusedOp, is_plain};

/// Instructions that multiply tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Instructions {
    /// `wgmma` of 64 × columns × 16 on half precision, in `f32`, on compute capability 9.0 only. The four planes of
    /// a cube multiply together, with one or both operands in shared memory; accumulators are laid out as for `mma`.
    Wgmma,
    /// `mma` of 16 × 8 × 16 on half precision, in `f32`. Four units share a row. Products stay in registers: an
    /// accumulator has the layout of the next product's left operand.
    Mma,
    /// Multiplications and additions on values in shared memory. `FMA_LANES` units share a row.
    Fma,
}

const FMA_LANES: usize = 8;
const PLANE: usize = 32;
const WARPGROUP_ROWS: usize = 64;
/// Bytes of the atoms that a swizzle of 128 bytes permutes.
pub(super) const ATOM_BYTES: usize = 1024;
/// Bytes of shared memory that tiles leave free for the kernel.
const RESERVE: usize = 256;

/// Sizes of a tile, fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Instructions that multiply tiles.
    pub instructions: Instructions,
    /// Type of the elements in memory.
    pub elem: FloatKind,
    /// Width of a head.
    pub head_dim: usize,
    /// Number of rows per cube.
    pub rows: usize,
    /// Number of columns per step.
    pub columns: usize,
    /// Number of rows of which a unit holds values.
    pub rows_per_unit: usize,
    /// Stages of columns in shared memory: with 2, the next stage loads while the current one is used.
    pub stages: usize,
    /// True if rows stay in registers as left operands of `wgmma`.
    pub keeps_rows: bool,
}

/// Kernel that uses a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Rows are queries; the result stays in registers.
    Forward,
    /// Rows are queries; their gradient stays in registers.
    Queries,
    /// Rows are keys; the gradients of keys and values stay in registers.
    Keys,
}

impl Tile {
    /// Returns the tile of a pass for elements of type `dtype` on a device, if one fits.
    pub fn select(
        pass: Pass,
        properties: &DeviceProperties,
        dtype: FloatKind,
        head_dim: usize,
    ) -> Option<Tile> {
        let limit = properties.hardware.max_shared_memory_size.saturating_sub(RESERVE);
        let size = if dtype == FloatKind::F32 { 4 } else { 2 };
        let units = properties.hardware.max_units_per_cube as usize;
        let tile = |instructions, (rows, columns, rows_per_unit), stages| Tile {
            instructions,
            elem: dtype,
            head_dim,
            rows,
            columns,
            rows_per_unit,
            stages,
            keeps_rows: false,
        };
        let fits = |tile: &Tile| tile.shared_bytes(pass, size) <= limit && tile.units() <= units;
        if uses_wgmma(properties) && multiplies(properties, dtype) && matches!(head_dim, 64 | 128) {
            let columns = if pass == Pass::Forward && head_dim == 64 { 128 } else { 64 };
            // Two cubes must fit into a multiprocessor; three for forward with heads of 64, which waits for units other
            // than tensor cores.
            let keeps_rows = !matches!((pass, head_dim), (Pass::Keys, 128) | (Pass::Forward, 64));
            let tile = Tile { keeps_rows, ..tile(Instructions::Wgmma, (WARPGROUP_ROWS, columns, 2), 2) };
            if fits(&tile) {
                return Some(tile);
            }
        }
        if multiplies(properties, dtype) && matches!(head_dim, 64 | 128) {
            // Rows, columns, rows per unit. More rows per unit mean fewer reads of columns, but kept values must fit
            // into 255 registers, and two cubes into a multiprocessor of compute capability 9.0.
            let sizes = match (pass, head_dim) {
                (Pass::Forward, 64) => (128, 64, 4),
                (Pass::Forward, _) => (128, 32, 4),
                (Pass::Queries, 64) => (128, 64, 4),
                (Pass::Queries, _) => (64, 64, 2),
                (Pass::Keys, 64) => (128, 32, 4),
                (Pass::Keys, _) => (64, 32, 2),
            };
            let tile = tile(Instructions::Mma, sizes, 2);
            if fits(&tile) {
                return Some(tile);
            }
        }
        [(32, 32, 2), (32, 16, 2), (16, 16, 1), (16, 8, 1), (8, 8, 1), (4, 8, 1)]
            .map(|sizes| tile(Instructions::Fma, sizes, 1))
            .into_iter()
            .find(fits)
    }

    pub(super) fn operand(&self) -> &'static str {
        if self.elem == FloatKind::BF16 { "bf16" } else { "f16" }
    }

    fn either(&self, tensor_cores: usize, fma: usize) -> usize {
        match self.instructions {
            Instructions::Wgmma | Instructions::Mma => tensor_cores,
            Instructions::Fma => fma,
        }
    }

    /// Returns the number of units per cube.
    pub fn units(&self) -> usize {
        self.either(self.rows / (8 * self.rows_per_unit) * PLANE, self.rows / self.rows_per_unit * FMA_LANES)
    }

    /// Returns the number of values per vector that kernels read.
    pub fn vector(&self) -> usize {
        self.either(8, 4)
    }

    /// Returns the number of adjacent values of a row that a unit holds, and writes at once.
    pub fn run(&self) -> usize {
        self.either(2, 4)
    }

    /// Returns the offset, in columns, of score `index` from score 0 among the scores of a row that one unit holds.
    fn column_offset(&self, index: usize) -> usize {
        self.either(index / 2 * 8 + index % 2, index * FMA_LANES)
    }

    /// Returns the number of scores of a row that a unit holds.
    pub fn columns_per_unit(&self) -> usize {
        self.columns / self.lanes()
    }

    /// Returns the number of runs of a row of `head_dim` values that a unit holds.
    pub fn runs_per_unit(&self) -> usize {
        (self.head_dim / self.run()).div_ceil(self.lanes())
    }

    /// Returns the number of values that a unit holds of its rows of `head_dim` values.
    pub fn values_per_unit(&self) -> usize {
        self.rows_per_unit * self.runs_per_unit() * self.run()
    }

    /// Returns whether the last run of some units lies past the end of a row.
    pub fn runs_past(&self) -> bool {
        !(self.head_dim / self.run()).is_multiple_of(self.lanes())
    }

    /// Returns the number of scores that a unit holds.
    pub fn scores_per_unit(&self) -> usize {
        self.rows_per_unit * self.columns_per_unit()
    }

    /// Returns the number of units that share a row.
    pub fn lanes(&self) -> usize {
        self.either(4, FMA_LANES)
    }

    /// Returns the number of vectors per row in global memory.
    pub fn row_vectors(&self) -> usize {
        self.head_dim / self.vector()
    }

    /// Returns the distance in vectors between rows in shared memory, padded except for `wgmma` to avoid bank
    /// conflicts.
    pub fn stride(&self) -> usize {
        match self.instructions {
            Instructions::Wgmma => self.row_vectors(),
            Instructions::Mma | Instructions::Fma => self.row_vectors() + 1,
        }
    }

    /// Returns the alignment of rows in shared memory in bytes. `wgmma` reads atoms of 8 rows of 128 bytes.
    pub fn alignment(&self) -> usize {
        match self.instructions {
            Instructions::Wgmma => ATOM_BYTES,
            Instructions::Mma | Instructions::Fma => 16,
        }
    }

    /// Returns whether stages are filled by asynchronous copies.
    pub fn asynchronous(&self) -> bool {
        self.stages == 2
    }

    /// Returns how many steps ahead of the computation columns are staged.
    pub fn ahead(&self) -> u32 {
        u32::from(self.asynchronous())
    }

    /// Returns whether a tile of scores must be written to shared memory before it is multiplied with columns.
    pub fn publishes(&self) -> bool {
        self.instructions == Instructions::Fma
    }

    /// Returns the number of values in shared memory for `products` tiles of scores that are multiplied again.
    pub fn published(&self, products: usize) -> usize {
        if self.publishes() { products * self.rows * self.columns } else { 1 }
    }

    /// Returns the number of values in shared memory for sums and maxima over rows.
    pub fn partials(&self) -> usize {
        if self.publishes() { self.rows * FMA_LANES } else { 1 }
    }

    fn shared_bytes(&self, pass: Pass, size: usize) -> usize {
        let row = self.stride() * self.vector() * size;
        let streams = 2 * self.columns * self.stages * row;
        let scratch = match pass {
            Pass::Forward | Pass::Queries => self.published(1) + self.partials(),
            Pass::Keys => self.published(2) + 2 * self.columns * self.stages,
        };
        let kept = match pass {
            Pass::Forward => 1,
            Pass::Queries | Pass::Keys => 2,
        };
        kept * self.rows * row + streams + 4 * scratch
    }
}

/// CubeCL's name of compute capability 9.0, the only devices with `wgmma`.
const HOPPER: &str = "ptx_sm90";

/// Returns whether `device` supports [`Instructions::Wgmma`].
pub fn has_warpgroups(device: &Device) -> bool {
    device.identity().is_some_and(|identity| identity.fingerprint == HOPPER)
}

fn uses_wgmma(properties: &DeviceProperties) -> bool {
    properties.identity.fingerprint == HOPPER && !is_plain(FusedOp::WarpgroupAttention)
}

/// Returns whether a device supports [`Instructions::Mma`] for `dtype`.
fn multiplies(properties: &DeviceProperties, dtype: FloatKind) -> bool {
    let elem = ElemType::Float(dtype);
    let instruction = MmaConfig {
        a_type: elem,
        b_type: elem,
        cd_type: ElemType::Float(FloatKind::F32),
        m: 16,
        n: 8,
        k: 16,
    };
    let features = &properties.features;
    let plane = properties.hardware.plane_size_min as usize == PLANE
        && properties.hardware.plane_size_max as usize == PLANE;
    plane
        && features.matmul.mma.contains(&instruction)
        && features.matmul.ldmatrix.contains(&elem)
        && features.copy_async
}

/// Returns the tile's row that is this unit's row `index`.
#[cube]
pub(super) fn row_of(#[comptime] index: usize, #[comptime] tile: Tile) -> u32 {
    match comptime!(tile.instructions) {
        Instructions::Wgmma | Instructions::Mma => {
            let first = UNIT_POS / 32 * comptime!(8 * tile.rows_per_unit as u32);
            first + UNIT_POS % 32 / 4 + comptime!(8 * index as u32)
        }
        Instructions::Fma => {
            UNIT_POS / comptime!(FMA_LANES as u32) * comptime!(tile.rows_per_unit as u32)
                + comptime!(index as u32)
        }
    }
}

#[cube]
pub(super) fn lane(#[comptime] tile: Tile) -> u32 {
    UNIT_POS % comptime!(tile.lanes() as u32)
}

/// Returns the tile's column that is score `index` of this unit's rows.
#[cube]
pub(super) fn column_of(#[comptime] index: usize, #[comptime] tile: Tile) -> u32 {
    lane(tile) * comptime!(tile.either(2, 1) as u32) + comptime!(tile.column_offset(index) as u32)
}

/// Returns whether score `index` of a row is in a column before `end`, in a tile that begins at `column`.
#[cube]
pub(super) fn is_before(#[comptime] index: usize, end: u32, column: u32, #[comptime] tile: Tile) -> bool {
    match comptime!(tile.instructions) {
        // Compares with constants: one register per column would leave room for fewer cubes.
        Instructions::Wgmma => {
            let first = column + column_of(0usize, tile);
            comptime!(tile.column_offset(index) as i32) < end as i32 - first as i32
        }
        Instructions::Mma | Instructions::Fma => column + column_of(index, tile) < end,
    }
}

/// Returns the run of a row of `head_dim` values that is this unit's run `index`.
#[cube]
pub(super) fn run_of(#[comptime] index: usize, #[comptime] tile: Tile) -> u32 {
    lane(tile) + comptime!((index * tile.lanes()) as u32)
}
