//! Text in preallocated memory, for signal handlers, which may not allocate.

use std::ffi::c_char;
use std::fmt;

/// Up to `N - 1` bytes. Further bytes are dropped.
pub(super) struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    pub(super) const fn new() -> Self {
        Text { bytes: [0; N], len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Keeps only the first `len` bytes.
    pub(super) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Appends as many of `bytes` as there is room for; returns true if there was room for all.
    pub(super) fn push(&mut self, bytes: &[u8]) -> bool {
        // Room for a last byte.
        let room = N - 1 - self.len;
        let taken = bytes.len().min(room);
        self.bytes[self.len..self.len + taken].copy_from_slice(&bytes[..taken]);
        self.len += taken;
        taken == bytes.len()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Returns the text followed by `last`, for which there is always room.
    pub(super) fn ended_by(&mut self, last: u8) -> &[u8] {
        self.bytes[self.len] = last;
        &self.bytes[..=self.len]
    }

    /// Ends the text with a line break, replacing its last byte if there is no room.
    pub(super) fn ended_by_line(&mut self) {
        self.truncate(N - 2);
        self.push(b"\n");
    }

    /// Returns the text as a C string.
    pub(super) fn as_c_string(&mut self) -> *const c_char {
        self.ended_by(0).as_ptr().cast()
    }
}

impl<const N: usize> fmt::Write for Text<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.push(text.as_bytes()) { Ok(()) } else { Err(fmt::Error) }
    }
}
