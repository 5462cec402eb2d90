//! Memory for results that is not filled with zeros first: a kernel writes every element.

use std::mem::MaybeUninit;

use super::parallel::{BLOCK, for_each_block};
use super::scalar::Real;

/// Memory for the elements of a result, none of which has a value yet.
#[derive(Debug)]
pub struct UninitVec<T> {
    values: Vec<T>,
    len: usize,
}

impl<T: Copy> UninitVec<T> {
    /// Memory for `len` elements.
    pub fn new(len: usize) -> Self {
        UninitVec { values: Vec::with_capacity(len), len }
    }

    /// The memory of the elements, for writing them.
    pub fn slots(&mut self) -> &mut [MaybeUninit<T>] {
        &mut self.values.spare_capacity_mut()[..self.len]
    }

    /// The elements, all of which have been written.
    ///
    /// # Safety
    ///
    /// Every element of [`UninitVec::slots`] has been written.
    pub unsafe fn assume_init(mut self) -> Vec<T> {
        // SAFETY: the capacity is at least `len`, and the caller has written so many elements.
        unsafe { self.values.set_len(self.len) };
        self.values
    }
}

/// `len` elements, in blocks of `size` that `write` writes as [`for_each_block`] runs it.
///
/// # Safety
///
/// `write` writes every element of a block.
pub unsafe fn written<T: Copy + Send>(
    len: usize,
    size: usize,
    write: impl Fn(usize, &mut [MaybeUninit<T>]) + Sync + Send,
) -> Vec<T> {
    let mut values = UninitVec::new(len);
    for_each_block(values.slots(), size, write);
    // SAFETY: the blocks are all elements, and the caller promises that each is written.
    unsafe { values.assume_init() }
}

/// Zeros for a gradient of `len` elements, or `None` if the gradient is not wanted.
pub fn zeros<T: Real>(wanted: bool, len: usize) -> Option<Vec<T>> {
    // In parallel: the allocator would write the zeros on this thread.
    let fill = |_: usize, block: &mut [MaybeUninit<T>]| block.fill(MaybeUninit::new(T::ZERO));
    // SAFETY: `fill` writes every element.
    wanted.then(|| unsafe { written(len, 4 * BLOCK, fill) })
}
