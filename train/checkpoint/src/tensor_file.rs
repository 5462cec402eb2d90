//! A safetensors file of a checkpoint, written as a stream and read in parts.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use kiln_sys::header::{Array, MAX_HEADER, header, read_header};
use kiln_sys::{Checksum, RunningChecksum, Stream, files};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use safetensors::tensor::Dtype;

use super::manifest::{FileEntry, WIDTH};
use super::{CheckpointError, Result};

/// Bytes to copy and then checksum while they are in the cache.
const CHUNK: usize = 1 << 20;

// Values are copied without conversion; safetensors files are little-endian.
const _: () = assert!(cfg!(target_endian = "little"));

/// Writes a tensor file. The header comes first, so all arrays must be known in advance.
pub(super) struct TensorFileWriter {
    path: PathBuf,
    stream: Stream,
    entry: FileEntry,
}

impl TensorFileWriter {
    /// Creates the file `path` for `arrays` of f32, given as keys and shapes, to be appended in this order. The header
    /// contains the file name, so that files with equal contents cannot be confused.
    pub(super) fn create(path: PathBuf, arrays: &[(String, Vec<usize>)]) -> Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let described =
            arrays.iter().map(|(key, shape)| Array { key, dtype: "F32", width: WIDTH as usize, shape });
        let header = header(("kiln_file", &name), described);
        let numel = |shape: &[usize]| shape.iter().map(|size| *size as u64).product::<u64>();
        let data: u64 = arrays.iter().map(|(_, shape)| WIDTH * numel(shape)).sum();
        let mut stream = Stream::create(&path).map_err(CheckpointError::io("create", &path))?;
        stream.append(&header, |_| {}).map_err(CheckpointError::io("write", &path))?;
        let covered = header.len() as u64;
        let entry = FileEntry { bytes: covered + data, covered, checksum: Checksum::of(&header) };
        Ok(TensorFileWriter { path, stream, entry })
    }

    pub(super) fn append(&mut self, values: &[f32]) -> Result<Checksum> {
        let mut checksum = RunningChecksum::default();
        let written = self.stream.append(bytemuck::cast_slice(values), |chunk| checksum.update(chunk));
        written.map_err(CheckpointError::io("write", &self.path))?;
        Ok(checksum.finish())
    }

    /// Waits until everything is on disk.
    pub(super) fn finish(self) -> Result<FileEntry> {
        let TensorFileWriter { path, stream, entry } = self;
        let written = stream.length();
        if written != entry.bytes {
            let problem = format!("{written} bytes were written instead of {}", entry.bytes);
            return Err(CheckpointError::damaged(&path, problem));
        }
        stream.finish().map_err(CheckpointError::io("write", &path))?;
        Ok(entry)
    }
}

/// A checkpoint file with a validated header. Not mapped into memory: truncating a mapped file would kill the process.
pub(super) struct TensorFile {
    pub(super) path: PathBuf,
    file: File,
    /// Byte range of each array in the file.
    arrays: HashMap<String, Range<usize>>,
}

impl TensorFile {
    /// Opens `path`. Fails unless the file's length and header match `entry`, its description in the manifest.
    pub(super) fn open(path: PathBuf, entry: &FileEntry) -> Result<Self> {
        let damaged = |problem: String| CheckpointError::damaged(&path, problem);
        let file = files::open(&path).map_err(CheckpointError::unreadable(&path))?;
        let bytes = file.metadata().map_err(CheckpointError::io("read", &path))?.len();
        if bytes != entry.bytes {
            return Err(damaged(format!("it has {bytes} bytes, and should have {}", entry.bytes)));
        }
        if entry.covered > bytes.min(MAX_HEADER) {
            return Err(damaged("its header does not match the manifest".to_owned()));
        }
        let mut header = vec![0; entry.covered as usize];
        file.read_exact_at(&mut header, 0).map_err(unreadable(&path))?;
        if Checksum::of(&header) != entry.checksum {
            return Err(damaged("its header does not match the manifest".to_owned()));
        }
        let read = read_header(&file).map_err(unreadable(&path))?;
        let (start, metadata) = read.map_err(|error| damaged(error.to_string()))?;
        if start != header.len() {
            return Err(damaged("its header has another length than described".to_owned()));
        }
        let mut arrays = HashMap::new();
        for (key, info) in metadata.tensors() {
            if info.dtype != Dtype::F32 {
                return Err(damaged(format!("`{key}` is not an array of F32")));
            }
            arrays.insert(key, start + info.data_offsets.0..start + info.data_offsets.1);
        }
        Ok(TensorFile { file, arrays, path })
    }

    /// Copies elements `part` of the array `key`, which has `length` elements, into `values`, and returns their
    /// checksum. Calls `copied` after every chunk with its number of bytes.
    pub(super) fn copy(
        &self,
        key: &str,
        length: u64,
        part: Range<u64>,
        values: &mut [f32],
        mut copied: impl FnMut(usize),
    ) -> Result<Checksum> {
        let bytes = self.part(key, length, &part)?;
        let mut checksum = RunningChecksum::default();
        for (offset, to) in bytes.clone().step_by(CHUNK).zip(values.chunks_mut(CHUNK / WIDTH as usize)) {
            self.read(bytemuck::cast_slice_mut(to), offset)?;
            checksum.update(bytemuck::cast_slice(to));
            copied(size_of_val(to));
        }
        Ok(checksum.finish())
    }

    pub(super) fn prefetch(&self, bytes: Range<usize>) {
        let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
        let _ = posix_fadvise(&self.file, bytes.start as i64, bytes.len() as i64, advice);
    }

    /// Returns the byte range of elements `part` of the array `key`, which has `length` elements.
    pub(super) fn part(&self, key: &str, length: u64, part: &Range<u64>) -> Result<Range<usize>> {
        let array = self.range(key, length)?;
        let (start, end) = ((part.start * WIDTH) as usize, (part.end * WIDTH) as usize);
        Ok(array.start + start..array.start + end)
    }

    pub(super) fn checksum(&self, key: &str, length: u64) -> Result<Checksum> {
        let bytes = self.range(key, length)?;
        let mut chunk = vec![0; CHUNK.min(bytes.len())];
        let mut checksum = RunningChecksum::default();
        for offset in bytes.clone().step_by(CHUNK) {
            let chunk = &mut chunk[..CHUNK.min(bytes.end - offset)];
            self.read(chunk, offset)?;
            checksum.update(chunk);
        }
        Ok(checksum.finish())
    }

    fn read(&self, bytes: &mut [u8], offset: usize) -> Result<()> {
        self.file.read_exact_at(bytes, offset as u64).map_err(unreadable(&self.path))
    }

    fn range(&self, key: &str, length: u64) -> Result<Range<usize>> {
        let missing = || CheckpointError::damaged(&self.path, format!("it lacks `{key}`"));
        let range = self.arrays.get(key).cloned().ok_or_else(missing)?;
        if range.len() as u64 != length.saturating_mul(WIDTH) {
            let problem = format!("`{key}` has {} bytes there", range.len());
            return Err(CheckpointError::damaged(&self.path, problem));
        }
        Ok(range)
    }
}

/// Returns the error for unreadable bytes that the file contained when it was opened.
fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |error| match error.kind() {
        io::ErrorKind::UnexpectedEof => CheckpointError::damaged(path, "it became shorter while it was read"),
        _ => CheckpointError::io("read", path)(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_shard::memory;
    use proptest::prelude::*;
    use safetensors::SafeTensors;

    fn arrays() -> Vec<(String, Vec<usize>)> {
        let array = |key: &str, shape: &[usize]| (key.to_owned(), shape.to_vec());
        vec![array("a.weight", &[2, 3]), array("b", &[5]), array("empty", &[0, 4])]
    }

    fn written(folder: &Path) -> (PathBuf, FileEntry) {
        let path = folder.join("file.safetensors");
        let mut writer = TensorFileWriter::create(path.clone(), &arrays()).unwrap();
        writer.append(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        writer.append(&[7.0, 8.0, 9.0, 10.0, 11.0]).unwrap();
        (path, writer.finish().unwrap())
    }

    #[test]
    fn files_are_read_as_written() {
        let folder = tempfile::tempdir().unwrap();
        let (path, entry) = written(folder.path());
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!((bytes.len() as u64, entry.covered % 8), (entry.bytes, 0));
        let others = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(others.tensor("a.weight").unwrap().shape(), [2, 3]);
        assert_eq!(others.len(), 3);

        let file = TensorFile::open(path, &entry).unwrap();
        let mut values = [0.0; 3];
        let checksum = file.copy("a.weight", 6, 2..5, &mut values, |_| {}).unwrap();
        assert_eq!(values, [3.0, 4.0, 5.0]);
        assert_eq!(checksum, Checksum::of(bytemuck::cast_slice(&values)));
        let whole: Vec<f32> = (1..=6_u8).map(f32::from).collect();
        let expected = Checksum::of(bytemuck::cast_slice(&whole));
        assert_eq!(file.checksum("a.weight", 6).unwrap(), expected);
        assert!(file.checksum("a.weight", 5).is_err(), "another length");
        assert!(file.checksum("c", 5).is_err(), "another name");
    }

    #[test]
    fn file_truncated_while_open_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let (path, entry) = written(folder.path());
        let file = TensorFile::open(path.clone(), &entry).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(entry.bytes - 4).unwrap();
        assert!(file.checksum("a.weight", 6).is_ok(), "what is still there");
        let errors =
            [file.checksum("b", 5).unwrap_err(), file.copy("b", 5, 0..5, &mut [0.0; 5], |_| {}).unwrap_err()];
        for error in errors {
            let error = error.to_string();
            assert!(error.contains("it became shorter while it was read"), "{error}");
        }
    }

    #[test]
    fn file_that_lacks_values_is_not_finished() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.safetensors");
        let mut writer = TensorFileWriter::create(path, &arrays()).unwrap();
        writer.append(&[1.0; 6]).unwrap();
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.contains("bytes were written instead of"), "{error}");
    }

    #[test]
    fn any_header_is_read_without_a_panic() {
        let folder = tempfile::tempdir().unwrap();
        let (path, entry) = written(folder.path());
        let whole = std::fs::read(&path).unwrap();
        let rank = memory::MAX_RANKS - 2;
        memory::bind_to_rank(rank);
        memory::reset_peak(rank);
        let mutation = prop_oneof![
            // Mutates a byte, the header's length, a number in the JSON, or a range of bytes.
            (0..entry.covered as usize, any::<u8>()).prop_map(|(at, byte)| (at, vec![byte])),
            any::<u64>().prop_map(|length| (0, length.to_le_bytes().to_vec())),
            (8..entry.covered as usize, "[0-9]{1,20}").prop_map(|(at, n)| (at, n.into_bytes())),
            (0..entry.covered as usize, prop::collection::vec(any::<u8>(), 1..64)),
        ];
        let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) };
        proptest!(config, |(mutations in prop::collection::vec(mutation, 1..4))| {
            let mut bytes = whole.clone();
            for (at, new) in mutations {
                let end = (at + new.len()).min(bytes.len());
                bytes[at..end].copy_from_slice(&new[..end - at]);
            }
            std::fs::write(&path, &bytes).unwrap();
            let covered = &bytes[..entry.covered as usize];
            let entry = FileEntry { checksum: Checksum::of(covered), ..entry.clone() };
            if let Ok(file) = TensorFile::open(path.clone(), &entry) {
                for key in ["a.weight", "b", "empty"] {
                    let _ = file.checksum(key, 5);
                }
            }
        });
        let peak = memory::peak_bytes(rank);
        assert!(peak < 4 << 20, "{peak} bytes at one time");
    }
}
