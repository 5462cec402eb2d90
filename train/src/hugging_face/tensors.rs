//! One safetensors file, mapped into memory, and parts of its tensors as f32.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

use super::HuggingFaceError;

/// Rows and columns of a square that is transposed at once: its lines stay in the first cache.
const BLOCK: usize = 64;

/// A safetensors file. Opening it reads the header only; the header is checked against the length
/// of the file, so nothing in it can make a read go wrong.
#[derive(Clone, Debug)]
pub(super) struct TensorFile {
    path: PathBuf,
    map: Arc<Mmap>,
    tensors: BTreeMap<String, Entry>,
}

/// Where a tensor is.
#[derive(Clone, Debug)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    /// Bytes of the file.
    bytes: Range<usize>,
}

impl TensorFile {
    /// Maps `path` and reads its header.
    pub(super) fn open(path: &Path) -> Result<Self, HuggingFaceError> {
        let file = File::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => HuggingFaceError::damaged(path, "the file is missing"),
            _ => HuggingFaceError::io("read", path)(error),
        })?;
        // SAFETY: files of weights are written once and then only read; a file that someone
        // truncates while it is mapped is outside what this can guard against.
        let map = unsafe { Mmap::map(&file) }.map_err(HuggingFaceError::io("map", path))?;
        let tensors = header(&map).map_err(|problem| HuggingFaceError::damaged(path, problem))?;
        Ok(TensorFile { path: path.to_owned(), map: Arc::new(map), tensors })
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all tensors, in their order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor as it is in the file.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|entry| entry.shape.as_slice())
    }

    /// The name of the dtype of a tensor.
    pub(super) fn dtype(&self, name: &str) -> Option<String> {
        self.tensors.get(name).map(|entry| format!("{:?}", entry.dtype))
    }

    /// Fails unless the tensor `name` is there in a dtype that can be read.
    pub(super) fn check_dtype(&self, name: &str) -> Result<(), HuggingFaceError> {
        let entry = self.entry(name)?;
        if matches!(entry.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Ok(());
        }
        Err(HuggingFaceError::Unsupported {
            path: self.path.clone(),
            key: name.to_owned(),
            value: format!("{:?}", entry.dtype),
            supported: "weights are F32, F16 or BF16",
        })
    }

    /// Reads elements `range` of the tensor `name` into `values`, which are as many. With
    /// `transposed`, `range` counts elements of the transposed matrix, and only columns that it
    /// touches are read.
    pub(super) fn read(
        &self,
        name: &str,
        transposed: bool,
        range: Range<usize>,
        values: &mut [f32],
    ) -> Result<(), HuggingFaceError> {
        self.check_dtype(name)?;
        let entry = self.entry(name)?;
        let numel: usize = entry.shape.iter().product();
        if range.start > range.end || range.end > numel || range.len() != values.len() {
            let problem = format!(
                "elements {range:?} of `{name}` were asked for, into {}; it has {numel}",
                values.len()
            );
            return Err(HuggingFaceError::damaged(&self.path, problem));
        }
        let bytes = &self.map[entry.bytes.clone()];
        let rows_in_file = match (transposed, entry.shape.as_slice()) {
            (true, [rows, _]) => Some(*rows),
            _ => None,
        };
        match entry.dtype {
            Dtype::F32 => copy(bytes, f32::from_le_bytes, rows_in_file, range, values),
            Dtype::F16 => {
                copy(bytes, |b| f16::from_le_bytes(b).to_f32(), rows_in_file, range, values);
            }
            _ => copy(bytes, |b| bf16::from_le_bytes(b).to_f32(), rows_in_file, range, values),
        }
        Ok(())
    }

    fn entry(&self, name: &str) -> Result<&Entry, HuggingFaceError> {
        self.tensors.get(name).ok_or_else(|| {
            HuggingFaceError::damaged(&self.path, format!("`{name}` is not in the file"))
        })
    }
}

/// The tensors of a file: the header must be there as a whole, agree with the length of the file,
/// and leave no bytes out.
fn header(bytes: &[u8]) -> Result<BTreeMap<String, Entry>, String> {
    let (length, metadata) =
        SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
    // Lies within the file, as `read_metadata` has checked, as do all offsets.
    let data = size_of::<u64>() + length;
    let entry = |info: &safetensors::tensor::TensorInfo| Entry {
        dtype: info.dtype,
        shape: info.shape.clone(),
        bytes: data + info.data_offsets.0..data + info.data_offsets.1,
    };
    Ok(metadata.tensors().into_iter().map(|(name, info)| (name, entry(info))).collect())
}

/// Elements `range` of a tensor, or of the transpose of a matrix that has `rows_in_file` rows.
fn copy<const W: usize>(
    bytes: &[u8],
    decode: impl Fn([u8; W]) -> f32 + Sync,
    rows_in_file: Option<usize>,
    range: Range<usize>,
    values: &mut [f32],
) {
    let (elements, _) = bytes.as_chunks::<W>();
    match rows_in_file {
        None => {
            for (value, element) in values.iter_mut().zip(&elements[range]) {
                *value = decode(*element);
            }
        }
        // A range of nothing; the rest divides.
        Some(0) => {}
        Some(width) => transpose(elements, &decode, width, range.start, values),
    }
}

/// Elements `start..` of the transpose, whose rows have `width` elements, from the matrix
/// `elements`, which has `width` rows.
fn transpose<const W: usize>(
    elements: &[[u8; W]],
    decode: &(impl Fn([u8; W]) -> f32 + Sync),
    width: usize,
    start: usize,
    values: &mut [f32],
) {
    let height = elements.len() / width;
    // From the middle of a row to its end; then whole rows; then the beginning of one.
    let first = (width - start % width) % width;
    let (head, rest) = values.split_at_mut(first.min(values.len()));
    let whole = rest.len() - rest.len() % width;
    let (rows, tail) = rest.split_at_mut(whole);
    let one_row = |at: usize, values: &mut [f32]| {
        for (value, flat) in values.iter_mut().zip(at..) {
            *value = decode(elements[flat % width * height + flat / width]);
        }
    };
    one_row(start, head);
    let start = start + head.len();
    one_row(start + whole, tail);
    rows.par_chunks_mut(BLOCK * width).enumerate().for_each(|(block, rows)| {
        let top = start / width + block * BLOCK;
        for left in (0..width).step_by(BLOCK) {
            for column in left..(left + BLOCK).min(width) {
                let line = &elements[column * height + top..];
                for (row, element) in line.iter().take(rows.len() / width).enumerate() {
                    rows[row * width + column] = decode(*element);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(rows: usize, columns: usize) -> Vec<u8> {
        (0..rows * columns).flat_map(|i| (i as f32).to_le_bytes()).collect()
    }

    proptest! {
        /// Any part of a transpose is that part of the whole, whatever the blocks.
        #[test]
        fn parts_of_a_transpose(rows in 1..150_usize, columns in 1..150_usize, a: u32, b: u32) {
            let bytes = file(rows, columns);
            let numel = rows * columns;
            let (a, b) = (a as usize % (numel + 1), b as usize % (numel + 1));
            let range = a.min(b)..a.max(b);
            let mut values = vec![-1.0; range.len()];
            copy(&bytes, f32::from_le_bytes, Some(rows), range.clone(), &mut values);
            for (value, flat) in values.iter().zip(range) {
                prop_assert_eq!(*value, (flat % rows * columns + flat / rows) as f32);
            }
        }

        /// Whatever is in a file, reading its header ends with tensors inside the file or an error.
        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            check_header(&bytes);
        }

        /// As above, with a length that fits and text that is nearly a header.
        #[test]
        fn nearly_a_header(
            name in "[a-z]{0,3}",
            dtype in prop_oneof![Just("F32"), Just("BF16"), Just("F4"), Just("I64"), Just("X")],
            shape in proptest::collection::vec(prop_oneof![0..9_u64, any::<u64>()], 0..4),
            begin in prop_oneof![0..9_u64, any::<u64>()],
            end in prop_oneof![0..99_u64, any::<u64>()],
            length in prop_oneof![3 => Just(None), 1 => any::<u64>().prop_map(Some)],
            data in 0..99_usize,
            flip in proptest::option::of((any::<u16>(), any::<u8>())),
        ) {
            let text = format!(
                r#"{{"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}}}"#
            );
            let length = length.unwrap_or(text.len() as u64);
            let mut bytes = [&length.to_le_bytes(), text.as_bytes(), &vec![0; data]].concat();
            if let Some((at, value)) = flip {
                let at = usize::from(at) % bytes.len();
                bytes[at] = value;
            }
            check_header(&bytes);
        }
    }

    fn check_header(bytes: &[u8]) {
        for entry in header(bytes).unwrap_or_default().into_values() {
            assert!(entry.bytes.start <= entry.bytes.end && entry.bytes.end <= bytes.len());
        }
    }

    /// A length that the file does not have is refused before anything is allocated for it.
    #[test]
    fn lengths_beyond_the_file() {
        for length in [1_u64 << 20, 1 << 40, u64::MAX - 7, u64::MAX] {
            let mut bytes = length.to_le_bytes().to_vec();
            bytes.extend(b"{}");
            assert!(header(&bytes).is_err(), "{length}");
        }
        let whole = [&2_u64.to_le_bytes(), b"{}".as_slice()].concat();
        assert!(header(&whole).unwrap().is_empty());
    }
}
