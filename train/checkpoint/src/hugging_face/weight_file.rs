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

use crate::CheckpointError;
use crate::error::Result;

/// Bytes to decode, or elements to compare, at a time; they fit in the L2 cache.
const CHUNK: usize = 1 << 18;

/// Number of bytes of rows to read before each transposition.
const PANEL: usize = 4 << 20;

/// Rows and columns of a square to transpose at a time; its lines fit in the L1 cache.
const BLOCK: usize = 64;

/// A safetensors file with a validated header. Not mapped into memory: truncating a mapped file would kill the process.
#[derive(Clone, Debug)]
pub(super) struct WeightFile {
    pub(super) path: PathBuf,
    file: Arc<File>,
    pub(super) tensors: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    bytes: Range<usize>,
}

impl WeightFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = files::open(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => CheckpointError::damaged_weights(path, "the file is missing"),
            _ => CheckpointError::io("read", path)(error),
        })?;
        let (header, metadata) = read_header(&file)
            .map_err(CheckpointError::io("read", path))?
            .map_err(|problem| CheckpointError::damaged_weights(path, problem.to_string()))?;
        let tensors = entries(header, &metadata);
        Ok(WeightFile { path: path.to_owned(), file: Arc::new(file), tensors })
    }

    pub(super) fn check_dtype(&self, name: &str) -> Result<&Entry> {
        let entry = &self.tensors[name];
        if matches!(entry.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Ok(entry);
        }
        Err(CheckpointError::Unsupported {
            path: self.path.clone(),
            key: name.to_owned(),
            value: format!("{:?}", entry.dtype),
            supported: "F32, F16 and BF16",
        })
    }

    /// Reads elements `range` of the tensor `name`, or of its transpose if `transposed`, into `values`, which must have
    /// the same length. Reads only the columns in the range.
    pub(super) fn read(
        &self,
        name: &str,
        transposed: bool,
        range: Range<usize>,
        values: &mut [f32],
    ) -> Result<()> {
        let entry = self.check_dtype(name)?;
        let numel: usize = entry.shape.iter().product();
        assert!(range.end <= numel && range.len() == values.len(), "`{name}` has {numel} elements");
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
                CheckpointError::damaged_weights(&self.path, "it became shorter while it was read")
            }
            _ => CheckpointError::io("read", &self.path)(error),
        })
    }

    pub(super) fn differs(&self, name: &str, other: &WeightFile, other_name: &str) -> Result<bool> {
        let shape = &self.tensors[name].shape;
        if *shape != other.tensors[other_name].shape {
            return Ok(true);
        }
        let numel = shape.iter().product();
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
}

fn entries(header: usize, metadata: &Metadata) -> BTreeMap<String, Entry> {
    // Cannot overflow: the header was validated, so all data is within the file.
    let entry = |info: &TensorInfo| Entry {
        dtype: info.dtype,
        shape: info.shape.clone(),
        bytes: header + info.data_offsets.0..header + info.data_offsets.1,
    };
    metadata.tensors().into_iter().map(|(name, info)| (name, entry(info))).collect()
}

struct Region<'a> {
    file: &'a File,
    start: u64,
    numel: usize,
}

impl Region<'_> {
    /// Reads elements of width `W` in `range`, from the transpose if the tensor is a matrix with `rows_in_file` rows.
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
            // The range is empty. Any other length is divisible.
            Some(0) => Ok(()),
            Some(_) if range.is_empty() => Ok(()),
            Some(width) => {
                let height = self.numel / width;
                let band = range.start / width..range.end.div_ceil(width);
                // First column and values of each row of the transpose. Only the first and the last row may be
                // incomplete.
                let (mut rows, mut column, mut rest) = (Vec::new(), range.start % width, values);
                while !rest.is_empty() {
                    let row = (width - column).min(rest.len());
                    let (row, later) = rest.split_at_mut(row);
                    rows.push((column, row));
                    (column, rest) = (0, later);
                }
                let line = band.len() * W;
                let lines = (PANEL / line).clamp(1, width);
                let mut panel = vec![0; lines * line];
                for first in (0..width).step_by(lines) {
                    let lines = lines.min(width - first);
                    let panel = &mut panel[..lines * line];
                    panel.par_chunks_mut(line).enumerate().try_for_each(|(index, bytes)| {
                        let at = element((first + index) * height + band.start);
                        self.file.read_exact_at(bytes, at)
                    })?;
                    let panel = panel.as_chunks::<W>().0;
                    rows.par_chunks_mut(BLOCK).enumerate().for_each(|(block, rows)| {
                        for left in (0..lines).step_by(BLOCK) {
                            for at in left..(left + BLOCK).min(lines) {
                                let line = &panel[at * band.len() + block * BLOCK..];
                                for ((column, row), element) in rows.iter_mut().zip(line) {
                                    if let Some(value) = row.get_mut((first + at).wrapping_sub(*column)) {
                                        *value = decode(*element);
                                    }
                                }
                            }
                        }
                    });
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(bytes: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    proptest! {
        /// Reading part of a transpose gives the values that reading the whole transpose gives.
        #[test]
        fn transposes_are_read_in_parts(rows in 1..150_usize, columns in 1..150_usize, a: u32, b: u32) {
            let numel = rows * columns;
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

        /// Reading the header of any file returns an error or tensors inside the file.
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            check_header(&bytes);
        }

        #[test]
        fn near_headers_are_read_without_a_panic(
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
    fn file_truncated_while_open_is_an_error() {
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

    #[test]
    fn lengths_beyond_the_file_are_refused() {
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
