//! The header of a safetensors file, for files that are written as a stream: what is to come is known
//! before the first value is.

use serde_json::json;

/// Headers end where 8 bytes end, so that tensors can be mapped.
const ALIGNMENT: usize = 8;

/// An array of a file.
pub(crate) struct Array<'a> {
    /// Its key.
    pub(crate) key: &'a str,
    /// `F32`, `BF16`, …
    pub(crate) dtype: &'static str,
    /// Bytes of an element.
    pub(crate) width: usize,
    /// Its shape.
    pub(crate) shape: &'a [usize],
}

/// The first bytes of a file with one entry of `metadata`, as name and value, and `arrays`, whose data
/// follows in this order without gaps.
pub(crate) fn header<'a>(
    metadata: (&str, &str),
    arrays: impl Iterator<Item = Array<'a>>,
) -> Vec<u8> {
    let (name, value) = metadata;
    let mut text = json!({"__metadata__": {name: value}}).to_string();
    let mut start = 0;
    for Array { key, dtype, width, shape } in arrays {
        let end = start + width * shape.iter().product::<usize>();
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        // Into the object, in this order.
        text.pop();
        text.push_str(&format!(",{}:{entry}}}", json!(key)));
        start = end;
    }
    let mut text = text.into_bytes();
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}
