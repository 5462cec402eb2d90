//! Verification of every checksum.

use kiln_sys::Meter;
use rayon::prelude::*;

use super::manifest::{Chunk, FileEntry, TensorEntry, check_plain_file};
use super::tensor_file::TensorFile;
use super::{Checkpoint, CheckpointError};

/// The result of verifying every byte of a checkpoint.
#[derive(Debug)]
pub struct Verified {
    /// Number of verified files, without the manifest, which was checked when it was opened.
    pub files: usize,
    /// Their bytes, according to the manifest.
    pub bytes: u64,
    /// The problems, file by file.
    pub problems: Vec<CheckpointError>,
}

/// Reads all files of a checkpoint and compares them with the manifest.
pub fn verify(checkpoint: &Checkpoint) -> Verified {
    verify_counted(checkpoint, &Meter::default())
}

/// Like [`verify`]; `meter` counts the bytes that are read.
pub fn verify_counted(checkpoint: &Checkpoint, meter: &Meter) -> Verified {
    meter.begin(checkpoint.manifest().bytes());
    let manifest = checkpoint.manifest();
    let files: Vec<_> = manifest.files.iter().collect();
    let problems =
        files.par_iter().flat_map_iter(|(name, entry)| verify_file(checkpoint, name, entry, meter)).collect();
    Verified { files: files.len(), bytes: manifest.bytes(), problems }
}

fn verify_file(
    checkpoint: &Checkpoint,
    name: &str,
    entry: &FileEntry,
    meter: &Meter,
) -> Vec<CheckpointError> {
    let tensors = &checkpoint.manifest().tensors;
    let chunks = tensors.iter().flat_map(|tensor| {
        tensor.chunks.iter().filter(|chunk| chunk.file == name).map(move |chunk| (tensor, chunk))
    });
    let chunks: Vec<(&TensorEntry, &Chunk)> = chunks.collect();
    let path = checkpoint.folder().join(name);
    if chunks.is_empty() {
        return check_plain_file(checkpoint.folder(), name, entry).err().into_iter().collect();
    }
    let file = match TensorFile::open(path, entry) {
        Ok(file) => file,
        Err(error) => return vec![error],
    };
    let wrong = |(tensor, chunk): (&TensorEntry, &Chunk)| {
        let key = tensor.key();
        let checksum = file.checksum(&key, chunk.length);
        meter.add(chunk.length * size_of::<f32>() as u64);
        match checksum {
            Ok(checksum) if checksum == chunk.checksum => None,
            Ok(_) => Some(CheckpointError::damaged_tensor(file.path(), &key)),
            Err(error) => Some(error),
        }
    };
    chunks.into_iter().filter_map(wrong).collect()
}
