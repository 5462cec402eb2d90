//! Reads and writes headers of safetensors files, without the values.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use safetensors::SafeTensorError;
use safetensors::tensor::Metadata;
use serde_json::json;

/// Maximum size of a header in bytes, as in the library `safetensors`.
pub const MAX_HEADER: u64 = 100_000_000 + size_of::<u64>() as u64;

/// Padding to 8 bytes lets tensors be mapped into memory.
const ALIGNMENT: usize = 8;

/// Returns a header's size in bytes, including its length field. `first` holds the file's first bytes, and `length` is
/// the file's size in bytes.
pub fn header_bytes(first: [u8; size_of::<u64>()], length: u64) -> Result<usize, SafeTensorError> {
    let header = u64::from_le_bytes(first).saturating_add(first.len() as u64);
    if header > MAX_HEADER {
        return Err(SafeTensorError::HeaderTooLarge);
    }
    if header > length { Err(SafeTensorError::InvalidHeaderLength) } else { Ok(header as usize) }
}

/// Parses a header of [`header_bytes`] bytes. Fails unless the arrays fill the file up to `length` without gaps.
pub fn parse_header(header: &[u8], length: u64) -> Result<Metadata, SafeTensorError> {
    let text = header.get(size_of::<u64>()..).ok_or(SafeTensorError::HeaderTooSmall)?;
    let text = std::str::from_utf8(text).map_err(SafeTensorError::InvalidHeader)?;
    // Deserializing validates the offsets of the arrays.
    let metadata: Metadata =
        serde_json::from_str(text).map_err(SafeTensorError::InvalidHeaderDeserialization)?;
    if metadata.data_len() as u64 + header.len() as u64 != length {
        return Err(SafeTensorError::MetadataIncompleteBuffer);
    }
    Ok(metadata)
}

/// Reads the header of `file`: size in bytes and content. The inner error is an invalid header.
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

/// An array in a safetensors file.
pub struct Array<'a> {
    /// Key of the array.
    pub key: &'a str,
    /// Element type, such as `F32` or `BF16`.
    pub dtype: &'static str,
    /// Number of bytes per element.
    pub width: usize,
    /// Shape of the array.
    pub shape: &'a [usize],
}

/// Returns a header with one `metadata` entry (name, value) and `arrays`, whose data must follow in order without gaps.
pub fn header<'a>(metadata: (&str, &str), arrays: impl Iterator<Item = Array<'a>>) -> Vec<u8> {
    let (name, value) = metadata;
    let mut text = json!({"__metadata__": {name: value}}).to_string();
    let mut start = 0;
    for Array { key, dtype, width, shape } in arrays {
        let end = start + width * shape.iter().product::<usize>();
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        text.pop();
        text.push_str(&format!(",{}:{entry}}}", json!(key)));
        start = end;
    }
    let mut text = text.into_bytes();
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}
