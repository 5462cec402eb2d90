//! One safetensors file, and parts of its tensors as f32.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use kiln_sys::{files, header::read_header};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::HuggingFaceError;

/// Bytes that are read and decoded, and elements that are compared, at a time: they stay in the L2 cache.
const CHUNK: usize = 1 << 18;

/// Bytes of rows that are read before they are transposed.
const PANEL: usize = 4 << 20;

/// Rows and columns of a square that is transposed at once: its lines stay in the L1 cache.
const BLOCK: usize = 64;

/// A safetensors file. Opening it reads only the header, which is checked against the length of the file, so
/// no contents of it can make a read fail. Values are read from their positions; the file is not mapped into
/// memory, where a signal would end the process if the file were truncated.
#[derive(Clone, Debug)]
pub(super) struct WeightFile {
    path: PathBuf,
    file: Arc<File>,
    tensors: BTreeMap<String, Entry>,
}

/// Location of a tensor.
#[derive(Clone, Debug)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    /// Bytes of the file.
    bytes: Range<usize>,
}

impl WeightFile {
    /// Opens `path` and reads its header.
    pub(super) fn open(path: &Path) -> Result<Self, HuggingFaceError> {
        let file = files::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => HuggingFaceError::damaged(path, "the file is missing"),
            _ => HuggingFaceError::io("read", path)(error),
        })?;
        let (header, metadata) = read_header(&file)
            .map_err(HuggingFaceError::io("read", path))?
            .map_err(|problem| HuggingFaceError::damaged(path, problem.to_string()))?;
        let tensors = entries(header, &metadata);
        Ok(WeightFile { path: path.to_owned(), file: Arc::new(file), tensors })
    }

    /// Returns the path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of all tensors, in their order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the shape of a tensor in the file.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|entry| entry.shape.as_slice())
    }

    /// Returns the name of the dtype of a tensor.
    pub(super) fn dtype(&self, name: &str) -> Option<String> {
        self.tensors.get(name).map(|entry| format!("{:?}", entry.dtype))
    }

    /// Fails unless the tensor `name` exists with a supported dtype.
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

    /// Reads elements `range` of the tensor `name` into `values`, which has the same length. With
    /// `transposed`, `range` counts elements of the transposed matrix, and only the columns that it touches
    /// are read.
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
        let region = Region { file: &self.file, start: entry.bytes.start as u64, numel };
        let rows_in_file = match (transposed, entry.shape.as_slice()) {
            (true, [rows, _]) => Some(*rows),
            _ => None,
        };
        let read = match entry.dtype {
            Dtype::F32 => region.read(f32::from_le_bytes, rows_in_file, range, values),
            Dtype::F16 => region.read(|b| f16::from_le_bytes(b).to_f32(), rows_in_file, range, values),
            _ => region.read(|b| bf16::from_le_bytes(b).to_f32(), rows_in_file, range, values),
        };
        read.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                HuggingFaceError::damaged(&self.path, "it became shorter while it was read")
            }
            _ => HuggingFaceError::io("read", &self.path)(error),
        })
    }

    /// Compares the tensor `name` with `other_name` of `other`; returns true if shapes or values differ.
    pub(super) fn differs(
        &self,
        name: &str,
        other: &WeightFile,
        other_name: &str,
    ) -> Result<bool, HuggingFaceError> {
        let numel = self.entry(name)?.shape.iter().product();
        if self.shape(name) != other.shape(other_name) {
            return Ok(true);
        }
        let [mut a, mut b] = [vec![0.0_f32; CHUNK.min(numel)], vec![0.0_f32; CHUNK.min(numel)]];
        for start in (0..numel).step_by(CHUNK) {
            let range = start..numel.min(start + CHUNK);
            let (a, b) = (&mut a[..range.len()], &mut b[..range.len()]);
            self.read(name, false, range.clone(), a)?;
            other.read(other_name, false, range, b)?;
            if a.iter().zip(b).any(|(a, b)| a.to_bits() != b.to_bits()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn entry(&self, name: &str) -> Result<&Entry, HuggingFaceError> {
        self.tensors
            .get(name)
            .ok_or_else(|| HuggingFaceError::damaged(&self.path, format!("`{name}` is not in the file")))
    }
}

/// Returns the tensors that a header of `header` bytes describes.
fn entries(header: usize, metadata: &Metadata) -> BTreeMap<String, Entry> {
    // Lies within the file, like all offsets, as checked when the header was read.
    let entry = |info: &TensorInfo| Entry {
        dtype: info.dtype,
        shape: info.shape.clone(),
        bytes: header + info.data_offsets.0..header + info.data_offsets.1,
    };
    metadata.tensors().into_iter().map(|(name, info)| (name, entry(info))).collect()
}

/// The elements of a tensor in a file.
struct Region<'a> {
    file: &'a File,
    /// Position of the first byte.
    start: u64,
    /// Number of elements.
    numel: usize,
}

impl Region<'_> {
    /// Reads elements `range` of the tensor, or of the transpose of a matrix that has `rows_in_file` rows.
    /// Elements are `W` bytes wide.
    fn read<const W: usize>(
        &self,
        decode: impl Fn([u8; W]) -> f32 + Sync,
        rows_in_file: Option<usize>,
        range: Range<usize>,
        values: &mut [f32],
    ) -> io::Result<()> {
        let element = |index: usize| self.start + (index * W) as u64;
        match rows_in_file {
            None => values.par_chunks_mut(CHUNK / W).enumerate().try_for_each_init(
                || vec![0; CHUNK],
                |bytes, (index, values)| {
                    let bytes = &mut bytes[..values.len() * W];
                    self.file.read_exact_at(bytes, element(range.start + index * (CHUNK / W)))?;
                    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<W>().0) {
                        *value = decode(*bytes);
                    }
                    Ok(())
                },
            ),
            // An empty range; the length is divisible otherwise.
            Some(0) => Ok(()),
            Some(_) if range.is_empty() => Ok(()),
            Some(width) => {
                let height = self.numel / width;
                let band = range.start / width..range.end.div_ceil(width);
                let mut transpose = Transpose::new(width, &range, values);
                // As many rows of the file at a time as fit, and only the needed columns of each.
                let row = band.len() * W;
                let rows = (PANEL / row).clamp(1, width);
                let mut panel = vec![0; rows * row];
                for first in (0..width).step_by(rows) {
                    let panel = &mut panel[..rows.min(width - first) * row];
                    panel.par_chunks_mut(row).enumerate().try_for_each(|(index, bytes)| {
                        let at = element((first + index) * height + band.start);
                        self.file.read_exact_at(bytes, at)
                    })?;
                    transpose.put(first, panel.as_chunks::<W>().0, &decode);
                }
                Ok(())
            }
        }
    }
}

/// Elements `start..` of a transpose, in the order of its rows. It is filled column by column.
struct Transpose<'a> {
    /// Elements of a row.
    width: usize,
    /// Number of touched rows.
    rows: usize,
    /// Column of the first element of `head`, which extends to the end of its row.
    column: usize,
    head: &'a mut [f32],
    whole: &'a mut [f32],
    /// The beginning of a row.
    tail: &'a mut [f32],
}

impl<'a> Transpose<'a> {
    fn new(width: usize, range: &Range<usize>, values: &'a mut [f32]) -> Self {
        let column = range.start % width;
        let (head, rest) = values.split_at_mut(((width - column) % width).min(values.len()));
        let (whole, tail) = rest.split_at_mut(rest.len() - rest.len() % width);
        let rows = range.end.div_ceil(width) - range.start / width;
        Transpose { width, rows, column, head, whole, tail }
    }

    /// Fills columns `first..` from `panel`, which contains the columns one after the other, each with an
    /// element per touched row.
    fn put<const W: usize>(
        &mut self,
        first: usize,
        panel: &[[u8; W]],
        decode: &(impl Fn([u8; W]) -> f32 + Sync),
    ) {
        let Transpose { width, rows, column, .. } = *self;
        let columns = panel.len() / rows;
        for (values, column, row) in [(&mut *self.head, column, 0), (&mut *self.tail, 0, rows - 1)] {
            let covered = first.max(column)..(first + columns).min(column + values.len());
            for at in covered {
                values[at - column] = decode(panel[(at - first) * rows + row]);
            }
        }
        let top = usize::from(!self.head.is_empty());
        self.whole.par_chunks_mut(BLOCK * width).enumerate().for_each(|(block, values)| {
            let (top, count) = (top + block * BLOCK, values.len() / width);
            for left in (0..columns).step_by(BLOCK) {
                for at in left..(left + BLOCK).min(columns) {
                    let line = &panel[at * rows + top..][..count];
                    for (row, element) in line.iter().enumerate() {
                        values[row * width + first + at] = decode(*element);
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A file of `bytes`.
    fn file(bytes: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    proptest! {
        /// Any part of a transpose is the same part of the whole, regardless of the blocks.
        #[test]
        fn parts_of_a_transpose(rows in 1..150_usize, columns in 1..150_usize, a: u32, b: u32) {
            let numel = rows * columns;
            // Not at the start of the file.
            let numbers = (0..numel).flat_map(|i| (i as f32).to_le_bytes());
            let file = file(&[0; 5].into_iter().chain(numbers).collect::<Vec<_>>());
            let region = Region { file: &file, start: 5, numel };
            let (a, b) = (a as usize % (numel + 1), b as usize % (numel + 1));
            let range = a.min(b)..a.max(b);
            let mut values = vec![-1.0; range.len()];
            region.read(f32::from_le_bytes, Some(rows), range.clone(), &mut values).unwrap();
            for (value, flat) in values.iter().zip(range.clone()) {
                prop_assert_eq!(*value, (flat % rows * columns + flat / rows) as f32);
            }
            region.read(f32::from_le_bytes, None, range.clone(), &mut values).unwrap();
            for (value, flat) in values.iter().zip(range) {
                prop_assert_eq!(*value, flat as f32);
            }
        }

        /// For any contents of a file, reading its header results in tensors inside the file or an error.
        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            check_header(&bytes);
        }

        /// The same, with a matching length and text that is almost a header.
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
        let Ok((header, metadata)) = read_header(&file(bytes)).unwrap() else { return };
        for entry in entries(header, &metadata).into_values() {
            assert!(entry.bytes.start <= entry.bytes.end && entry.bytes.end <= bytes.len());
        }
    }

    /// More than one panel and more than one chunk, in every dtype.
    #[test]
    fn large_matrices_are_read_in_panels() {
        let (rows, columns) = (3000, 700);
        let number = |index: usize| (index % 251) as f32;
        let numel = rows * columns;
        let wide = file(&(0..numel).flat_map(|i| number(i).to_le_bytes()).collect::<Vec<_>>());
        let narrow = |encode: fn(f32) -> [u8; 2]| {
            file(&(0..numel).flat_map(|i| encode(number(i))).collect::<Vec<_>>())
        };
        let brain = narrow(|value| bf16::from_f32(value).to_le_bytes());
        let half = narrow(|value| f16::from_f32(value).to_le_bytes());
        let region = |file| Region { file, start: 0, numel };
        for range in [0..numel, 1234..numel - 77] {
            for rows_in_file in [None, Some(rows)] {
                let mut values = vec![vec![0.0; range.len()]; 3];
                let [a, b, c] = &mut values[..] else { unreachable!() };
                let range = || range.clone();
                region(&wide).read(f32::from_le_bytes, rows_in_file, range(), a).unwrap();
                let decode = |bytes| bf16::from_le_bytes(bytes).to_f32();
                region(&brain).read(decode, rows_in_file, range(), b).unwrap();
                let decode = |bytes| f16::from_le_bytes(bytes).to_f32();
                region(&half).read(decode, rows_in_file, range(), c).unwrap();
                for (at, flat) in range().enumerate() {
                    let expected = match rows_in_file {
                        None => number(flat),
                        Some(_) => number(flat % rows * columns + flat / rows),
                    };
                    assert!(values.iter().all(|values| values[at] == expected), "{flat}");
                }
            }
        }
    }

    #[test]
    fn a_file_that_is_truncated_while_it_is_open_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let text = r#"{"w":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]}}"#;
        let header = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        std::fs::write(&path, [&header[..], &[0; 64]].concat()).unwrap();
        let file = WeightFile::open(&path).unwrap();
        let shorter = File::options().write(true).open(&path).unwrap();
        shorter.set_len(header.len() as u64 + 60).unwrap();
        for (transposed, range, fits) in
            [(false, 0..15, true), (false, 0..16, false), (true, 0..12, true), (true, 0..16, false)]
        {
            let read = file.read("w", transposed, range.clone(), &mut vec![0.0; range.len()]);
            assert_eq!(read.is_ok(), fits, "{range:?}");
            if let Err(error) = read {
                let error = error.to_string();
                assert!(error.contains("it became shorter while it was read"), "{error}");
            }
        }
    }

    /// A length beyond the file is refused before any memory is allocated for it.
    #[test]
    fn lengths_beyond_the_file() {
        for length in [1_u64 << 20, 1 << 40, u64::MAX - 7, u64::MAX] {
            let mut bytes = length.to_le_bytes().to_vec();
            bytes.extend(b"{}");
            assert!(read_header(&file(&bytes)).unwrap().is_err(), "{length}");
        }
        let whole = [&2_u64.to_le_bytes(), b"{}".as_slice()].concat();
        let (header, metadata) = read_header(&file(&whole)).unwrap().unwrap();
        assert!(header == 10 && entries(header, &metadata).is_empty());
    }
}
