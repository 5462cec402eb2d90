//! Logits of a sequence, and the `.npy` file they are written to.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use burn::tensor::Device;
use kiln_model::decoder;

use super::EvalError;
use crate::device;
use crate::error::Result;
use crate::metrics::write_beside;
use crate::sharded::ShardedDecoder;
use crate::source::ModelSource;

/// The header of a `.npy` file and what comes before it take a multiple of this many bytes.
const NPY_ALIGNMENT: usize = 64;

/// What a `.npy` file starts with.
const NPY_MAGIC: &[u8] = b"\x93NUMPY";

/// Logits of every position: `[seq, vocab_size]`, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// Positions and vocabulary.
    pub shape: [usize; 2],
    /// As many values.
    pub values: Vec<f32>,
}

/// Fails unless `model` knows all of `tokens` and can read them at once.
pub fn check_tokens(model: &ModelSource, tokens: &[u32]) -> Result<Vec<i32>, EvalError> {
    let (known, context) = (model.model().vocab_size, model.context_length());
    if tokens.len() > context {
        return Err(EvalError::TooLong { what: "--tokens", tokens: tokens.len(), context });
    }
    let outside = tokens.iter().position(|id| *id as usize >= known);
    match outside {
        Some(index) => Err(EvalError::UnknownToken { id: tokens[index], position: index + 1, known }),
        None => Ok(tokens.iter().map(|id| *id as i32).collect()),
    }
}

/// The logits of `model` after each of `tokens`, the same on every rank. Collective.
pub fn logits(model: &ShardedDecoder, device: &Device, tokens: &[i32]) -> Result<Logits> {
    let tokens = device::tokens(tokens.to_vec(), 1, tokens.len(), device);
    let logits = decoder::logits(&model.pass(device), tokens);
    model.engine().finish_evaluation()?;
    let [_, seq, vocab_size] = logits.dims();
    let values = logits.into_data().iter::<f32>().collect();
    Ok(Logits { shape: [seq, vocab_size], values })
}

impl Logits {
    /// Writes a `.npy` file of version 1.0: little-endian f32 in C order. An earlier one is replaced as
    /// a whole, where a link leads to it as well; into a pipe or a device it is written.
    ///
    /// # Errors
    ///
    /// If `path` is a file of another kind, which stays as it is, or cannot be written.
    pub fn write_npy(&self, path: &Path) -> io::Result<()> {
        let mut content = npy_header(self.shape);
        content.extend(self.values.iter().flat_map(|value| value.to_le_bytes()));
        let kind = match fs::metadata(path) {
            Ok(metadata) => metadata.file_type(),
            // Through a link that leads nowhere yet, the file is made where it leads.
            Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_symlink() => {
                return fs::write(path, &content);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return write_beside(path, &content);
            }
            Err(error) => return Err(error),
        };
        if !kind.is_file() {
            return OpenOptions::new().write(true).open(path)?.write_all(&content);
        }
        let path = path.canonicalize()?;
        let mut start = Vec::new();
        File::open(&path)?.take(NPY_MAGIC.len() as u64).read_to_end(&mut start)?;
        if !start.is_empty() && start != NPY_MAGIC {
            let problem = "it is there already and is no .npy file: name another file";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, problem));
        }
        write_beside(&path, &content)
    }
}

/// Everything before the data, as NumPy's format description has it: magic, version, length of the
/// header, and the header, filled up with spaces.
fn npy_header(shape: [usize; 2]) -> Vec<u8> {
    let [rows, columns] = shape;
    let mut text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let version = [1, 0];
    let before = NPY_MAGIC.len() + version.len() + size_of::<u16>();
    let length = (before + text.len() + 1).next_multiple_of(NPY_ALIGNMENT) - before;
    text.extend(std::iter::repeat_n(' ', length - 1 - text.len()));
    text.push('\n');
    let mut header = [NPY_MAGIC, &version].concat();
    // Two numbers of 20 digits at most keep the header far below the limit of this version.
    header.extend((length as u16).to_le_bytes());
    header.extend(text.bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_aligned_and_say_the_shape() {
        for shape in [[1, 1], [3, 257], [usize::MAX, usize::MAX]] {
            let header = npy_header(shape);
            assert_eq!(header.len() % 64, 0, "{shape:?}");
            assert_eq!(header[..8], *b"\x93NUMPY\x01\x00");
            let length = u16::from_le_bytes([header[8], header[9]]);
            assert_eq!(usize::from(length), header.len() - 10);
            let text = std::str::from_utf8(&header[10..]).expect("text");
            let says = format!("'shape': ({}, {}), }}", shape[0], shape[1]);
            assert!(text.trim_end().ends_with(&says) && text.ends_with('\n'), "{text:?}");
        }
    }

    #[test]
    fn only_an_earlier_file_of_its_kind_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let logits = Logits { shape: [1, 2], values: vec![1.0, 2.0] };
        let [old, link, dangling, other, pipe] =
            ["old.npy", "link", "dangling", "config.toml", "pipe"].map(|name| folder.path().join(name));
        logits.write_npy(&old).unwrap();
        let content = fs::read(&old).unwrap();
        assert_eq!(content[content.len() - 8..], [0, 0, 128, 63, 0, 0, 0, 64]);
        std::os::unix::fs::symlink(&old, &link).unwrap();
        std::os::unix::fs::symlink(folder.path().join("new.npy"), &dangling).unwrap();
        let again = Logits { shape: [1, 2], values: vec![2.0, 1.0] };
        for path in [&link, &dangling] {
            again.write_npy(path).unwrap();
            assert!(path.is_symlink());
            assert_eq!(fs::read(path).unwrap()[content.len() - 8..], [0, 0, 0, 64, 0, 0, 128, 63]);
        }
        assert_eq!(fs::read(&old).unwrap(), fs::read(&link).unwrap());

        fs::write(&other, "[model]").unwrap();
        let error = logits.write_npy(&other).unwrap_err();
        assert!(error.to_string().contains("is no .npy file"), "{error}");
        assert_eq!(fs::read(&other).unwrap(), b"[model]");

        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let read = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        logits.write_npy(&pipe).unwrap();
        assert_eq!(read.join().unwrap(), content);
        assert!(!fs::metadata(&pipe).unwrap().is_file());
    }
}
