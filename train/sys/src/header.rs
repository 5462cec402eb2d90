//! The header of a safetensors file: written before the first value, and read without the values.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use safetensors::SafeTensorError;
use safetensors::tensor::Metadata;
use serde_json::json;

/// Maximum size of a header in bytes: its text may be as long as the library `safetensors` allows.
pub const MAX_HEADER: u64 = 100_000_000 + size_of::<u64>() as u64;

/// Headers end at a multiple of 8 bytes, so that tensors can be mapped into memory.
const ALIGNMENT: usize = 8;

/// Returns the size in bytes of a file's header: its text and the text's length field. `first` is the start
/// of the file, and `length` the length of the file, which the header never exceeds.
pub fn header_bytes(first: [u8; size_of::<u64>()], length: u64) -> Result<usize, SafeTensorError> {
    let header = u64::from_le_bytes(first).saturating_add(first.len() as u64);
    if header > MAX_HEADER {
        return Err(SafeTensorError::HeaderTooLarge);
    }
    if header > length { Err(SafeTensorError::InvalidHeaderLength) } else { Ok(header as usize) }
}

/// Parses a header of [`header_bytes`] bytes. Fails unless the arrays that it describes follow without gaps
/// up to `length`, the end of the file.
pub fn parse_header(header: &[u8], length: u64) -> Result<Metadata, SafeTensorError> {
    let text = header.get(size_of::<u64>()..).ok_or(SafeTensorError::HeaderTooSmall)?;
    let text = std::str::from_utf8(text).map_err(SafeTensorError::InvalidHeader)?;
    // Checks the arrays as well.
    let metadata: Metadata =
        serde_json::from_str(text).map_err(SafeTensorError::InvalidHeaderDeserialization)?;
    if metadata.data_len() as u64 + header.len() as u64 != length {
        return Err(SafeTensorError::MetadataIncompleteBuffer);
    }
    Ok(metadata)
}

/// Reads only the header of `file`; returns the header's size and content. The outer error is a failure to
/// read, the inner error an invalid header.
pub fn read_header(file: &File) -> io::Result<Result<(usize, Metadata), SafeTensorError>> {
    let length = file.metadata()?.len();
    let mut first = [0; size_of::<u64>()];
    if length < first.len() as u64 {
        return Ok(Err(SafeTensorError::HeaderTooSmall));
    }
    file.read_exact_at(&mut first, 0)?;
    let bytes = match header_bytes(first, length) {
        Ok(bytes) => bytes,
        Err(error) => return Ok(Err(error)),
    };
    let mut header = vec![0; bytes];
    file.read_exact_at(&mut header, 0)?;
    Ok(parse_header(&header, length).map(|metadata| (bytes, metadata)))
}

/// An array in a file.
pub struct Array<'a> {
    /// Key of the array.
    pub key: &'a str,
    /// `F32`, `BF16`, …
    pub dtype: &'static str,
    /// Number of bytes per element.
    pub width: usize,
    /// Shape of the array.
    pub shape: &'a [usize],
}

/// Returns the header of a file that has one `metadata` entry, given as name and value, and `arrays`, whose
/// data must follow in this order without gaps.
pub fn header<'a>(metadata: (&str, &str), arrays: impl Iterator<Item = Array<'a>>) -> Vec<u8> {
    let (name, value) = metadata;
    let mut text = json!({"__metadata__": {name: value}}).to_string();
    let mut start = 0;
    for Array { key, dtype, width, shape } in arrays {
        let end = start + width * shape.iter().product::<usize>();
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        // Appended to the object, in this order.
        text.pop();
        text.push_str(&format!(",{}:{entry}}}", json!(key)));
        start = end;
    }
    let mut text = text.into_bytes();
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}
