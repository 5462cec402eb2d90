//! Messages as frames: four bytes of length, then bincode.
//!
//! The only place that knows bincode. What comes in may come from anyone: the length is checked
//! before memory is taken, and the decoder counts what it claims against the same limit.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};

/// Most bytes of a frame before its sender has proved that it belongs to the job.
pub(super) const STRANGER_LIMIT: usize = 1024;

/// Most bytes of any frame.
pub(super) const MEMBER_LIMIT: usize = 4 << 20;

const CONFIG: bincode::config::Configuration<
    bincode::config::LittleEndian,
    bincode::config::Varint,
    bincode::config::Limit<MEMBER_LIMIT>,
> = bincode::config::standard().with_limit::<MEMBER_LIMIT>();

/// Why bytes are no frame.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// It says it is longer than the sender may send.
    #[error("a frame of {length} bytes, where at most {limit} are allowed")]
    TooLong {
        /// Length claimed or needed.
        length: usize,
        /// Most allowed.
        limit: usize,
    },
    /// Its content is not the message expected.
    #[error("a frame that is no message: {0}")]
    Garbage(String),
    /// The connection failed or ended.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Encodes a message as one frame of at most `limit` bytes.
pub fn encode<T: Serialize>(message: &T, limit: usize) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; 4];
    bincode::serde::encode_into_std_write(message, &mut frame, CONFIG)
        .map_err(|error| FrameError::Garbage(error.to_string()))?;
    let length = frame.len() - 4;
    if length > limit {
        return Err(FrameError::TooLong { length, limit });
    }
    // Fits: limits are far below 4 GiB.
    frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// Decodes the content of a frame, all of it.
pub fn decode<T: DeserializeOwned>(content: &[u8]) -> Result<T, FrameError> {
    let (message, used) = bincode::serde::decode_from_slice(content, CONFIG)
        .map_err(|error| FrameError::Garbage(error.to_string()))?;
    if used != content.len() {
        let left = content.len() - used;
        return Err(FrameError::Garbage(format!("{left} bytes after its end")));
    }
    Ok(message)
}

/// Writes a message as one frame.
pub(super) fn write<T: Serialize>(
    mut to: impl Write,
    message: &T,
    limit: usize,
) -> Result<(), FrameError> {
    Ok(to.write_all(&encode(message, limit)?)?)
}

/// Reads one frame of at most `limit` bytes.
pub fn read<T: DeserializeOwned>(mut from: impl Read, limit: usize) -> Result<T, FrameError> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        return Err(FrameError::TooLong { length, limit });
    }
    let mut content = vec![0; length];
    from.read_exact(&mut content)?;
    decode(&content)
}
