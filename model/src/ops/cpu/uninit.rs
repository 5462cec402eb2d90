//! Memory for results that is not zeroed first, because a kernel writes every element.

use std::mem::MaybeUninit;

use super::parallel::{BLOCK, for_each_block};
use super::scalar::Real;

/// Uninitialised memory for the elements of a result.
#[derive(Debug)]
pub struct UninitVec<T> {
    values: Vec<T>,
    len: usize,
}

impl<T: Copy> UninitVec<T> {
    pub fn new(len: usize) -> Self {
        UninitVec { values: Vec::with_capacity(len), len }
    }

    pub fn slots(&mut self) -> &mut [MaybeUninit<T>] {
        &mut self.values.spare_capacity_mut()[..self.len]
    }

    /// Returns the elements.
    ///
    /// # Safety
    ///
    /// Every element of [`UninitVec::slots`] must have been written.
    pub unsafe fn assume_init(mut self) -> Vec<T> {
        // SAFETY: the capacity is at least `len`, and the caller has written `len` elements.
        unsafe { self.values.set_len(self.len) };
        self.values
    }
}

/// Returns `len` elements, written by `write` in blocks of `size` with [`for_each_block`].
///
/// # Safety
///
/// `write` must write every element of a block.
pub unsafe fn written<T: Copy + Send>(
    len: usize,
    size: usize,
    write: impl Fn(usize, &mut [MaybeUninit<T>]) + Sync + Send,
) -> Vec<T> {
    let mut values = UninitVec::new(len);
    for_each_block(values.slots(), size, write);
    // SAFETY: the blocks cover all elements, and the caller guarantees that each is written.
    unsafe { values.assume_init() }
}

/// Returns zeros for a gradient of `len` elements, if the gradient is `wanted`.
pub fn zeros<T: Real>(wanted: bool, len: usize) -> Option<Vec<T>> {
    // In parallel: the allocator would zero the memory on this thread only.
    let fill = |_: usize, block: &mut [MaybeUninit<T>]| block.fill(MaybeUninit::new(T::ZERO));
    // SAFETY: `fill` writes every element.
    wanted.then(|| unsafe { written(len, 4 * BLOCK, fill) })
}
