//! Safetensors files, written as a stream: the header from known sizes, then one tensor after the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};

use half::{bf16, f16};
use kiln_sys::header::{Array, header};
use serde_json::{Value, json};

use super::HuggingFaceError;
use super::folder::in_file;
use super::names::HuggingFaceName;
use super::output::NewFolder;
use crate::CheckpointError;
use crate::weights::Weights;

/// Rows of a matrix that are reordered at once during transposition.
const ROWS: usize = 64;

/// Type of the elements of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ExportDtype {
    /// 32-bit floating point, the weights as they are.
    F32,
    /// bfloat16.
    Bf16,
    /// 16-bit floating point.
    F16,
}

impl ExportDtype {
    /// Returns its name in safetensors.
    fn name(self) -> &'static str {
        ["F32", "BF16", "F16"][self as usize]
    }

    /// Returns its name in PyTorch.
    pub fn torch_name(self) -> &'static str {
        ["float32", "bfloat16", "float16"][self as usize]
    }

    /// Returns the bytes of an element.
    pub fn width(self) -> usize {
        if self == ExportDtype::F32 { 4 } else { 2 }
    }

    /// Appends a value, rounded to the nearest; returns `false` if it is out of range.
    fn append(self, value: f32, bytes: &mut Vec<u8>) -> bool {
        let rounded = match self {
            ExportDtype::F32 => {
                bytes.extend(value.to_le_bytes());
                value
            }
            ExportDtype::Bf16 => {
                let rounded = bf16::from_f32(value);
                bytes.extend(rounded.to_le_bytes());
                rounded.to_f32()
            }
            ExportDtype::F16 => {
                let rounded = f16::from_f32(value);
                bytes.extend(rounded.to_le_bytes());
                rounded.to_f32()
            }
        };
        rounded.is_finite() || !value.is_finite()
    }
}

/// A tensor to write.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// The weight's name in [`Weights`].
    pub(super) name: String,
    /// The first of its elements to write.
    pub(super) first: usize,
    /// The shape of the written part, as in the weight.
    pub(super) shape: Vec<usize>,
    /// Its name and orientation in the file.
    pub(super) there: HuggingFaceName,
}

impl Item {
    fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns its bytes in a file.
    pub(super) fn bytes(&self, dtype: ExportDtype) -> usize {
        self.numel() * dtype.width()
    }
}

/// Writes `items` to the file `file` of `folder`; holds one tensor in memory at a time.
pub(super) fn write_file(
    folder: &NewFolder,
    file: &str,
    weights: &dyn Weights,
    items: &[Item],
    dtype: ExportDtype,
) -> Result<(), CheckpointError> {
    let path = folder.path().join(file);
    let failed = |error| HuggingFaceError::io("write", &path)(error);
    let out = File::create(&path).map_err(HuggingFaceError::io("create", &path))?;
    let mut out = BufWriter::with_capacity(1 << 20, out);
    let shapes: Vec<_> = items.iter().map(|item| in_file(&item.shape, &item.there)).collect();
    let arrays = items.iter().zip(&shapes).map(|(item, shape)| Array {
        key: &item.there.name,
        dtype: dtype.name(),
        width: dtype.width(),
        shape,
    });
    out.write_all(&header(("format", "pt"), arrays)).map_err(failed)?;
    for item in items {
        write_tensor(&mut out, weights, item, dtype, &failed)?;
    }
    let out = out.into_inner().map_err(|error| failed(error.into_error()))?;
    out.sync_all().map_err(failed)?;
    Ok(())
}

fn write_tensor(
    out: &mut impl Write,
    weights: &dyn Weights,
    item: &Item,
    dtype: ExportDtype,
    failed: &impl Fn(std::io::Error) -> HuggingFaceError,
) -> Result<(), CheckpointError> {
    let numel = item.numel();
    let mut values = vec![0.0; numel];
    weights.read(&item.name, item.first..item.first + numel, &mut values)?;
    let mut bytes = Vec::new();
    let mut put = |values: &mut dyn Iterator<Item = f32>| -> Result<(), CheckpointError> {
        bytes.clear();
        for value in values {
            if !dtype.append(value, &mut bytes) {
                let (name, dtype) = (item.there.name.clone(), dtype.torch_name());
                return Err(HuggingFaceError::Range { name, value, dtype }.into());
            }
        }
        out.write_all(&bytes).map_err(failed)?;
        Ok(())
    };
    let (true, [rows, columns]) = (item.there.transposed, item.shape.as_slice()) else {
        for part in values.chunks(1 << 16) {
            put(&mut part.iter().copied())?;
        }
        return Ok(());
    };
    // Columns become rows, several at a time, so that every fetched cache line is fully used.
    let mut transposed = vec![0.0; ROWS.min(*columns) * rows];
    for left in (0..*columns).step_by(ROWS) {
        let width = ROWS.min(columns - left);
        for (row, line) in values.chunks_exact(*columns).enumerate() {
            for (column, value) in line[left..left + width].iter().enumerate() {
                transposed[column * rows + row] = *value;
            }
        }
        put(&mut transposed[..width * rows].iter().copied())?;
    }
    Ok(())
}

/// Returns `model.safetensors.index.json`, which gives the file of each tensor.
pub(super) fn index(files: &[(String, Vec<Item>)], dtype: ExportDtype) -> Value {
    let items = files.iter().flat_map(|(file, items)| items.iter().map(move |item| (file, item)));
    let total: usize = items.clone().map(|(_, item)| item.bytes(dtype)).sum();
    let weight_map: BTreeMap<_, _> = items.map(|(file, item)| (&item.there.name, file)).collect();
    json!({"metadata": {"total_size": total}, "weight_map": weight_map})
}
