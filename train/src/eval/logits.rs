//! Logits of a sequence, and the `.npy` file they are written to.

use std::io;
use std::path::Path;

use burn::tensor::Device;
use kiln_model::decoder;
use kiln_model::layers::Layer;

use super::EvalError;
use crate::device;
use crate::metrics::write_beside;
use crate::sharded::ShardedDecoder;
use crate::source::ModelSource;
use crate::train::TrainError;

/// The header of a `.npy` file and what comes before it take a multiple of this many bytes.
const NPY_ALIGNMENT: usize = 64;

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
        Some(index) => {
            Err(EvalError::UnknownToken { id: tokens[index], position: index + 1, known })
        }
        None => Ok(tokens.iter().map(|id| *id as i32).collect()),
    }
}

/// The logits of `model` after each of `tokens`, the same on every rank. Collective.
pub fn logits<B: Layer>(
    model: &ShardedDecoder<B>,
    device: &Device,
    tokens: &[i32],
) -> Result<Logits, TrainError> {
    let tokens = device::tokens(tokens.to_vec(), 1, tokens.len(), device);
    let logits = decoder::logits(&model.pass(device), tokens);
    model.engine().finish_evaluation()?;
    let [_, seq, vocab_size] = logits.dims();
    let values = logits.into_data().iter::<f32>().collect();
    Ok(Logits { shape: [seq, vocab_size], values })
}

impl Logits {
    /// Writes a `.npy` file of version 1.0: little-endian f32 in C order.
    pub fn write_npy(&self, path: &Path) -> io::Result<()> {
        let mut content = npy_header(self.shape);
        content.extend(self.values.iter().flat_map(|value| value.to_le_bytes()));
        write_beside(path, &content)
    }
}

/// Everything before the data, as NumPy's format description has it: magic, version, length of the
/// header, and the header, filled up with spaces.
fn npy_header(shape: [usize; 2]) -> Vec<u8> {
    let [rows, columns] = shape;
    let mut text =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let before = b"\x93NUMPY\x01\x00".len() + size_of::<u16>();
    let length = (before + text.len() + 1).next_multiple_of(NPY_ALIGNMENT) - before;
    text.extend(std::iter::repeat_n(' ', length - 1 - text.len()));
    text.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
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
}
