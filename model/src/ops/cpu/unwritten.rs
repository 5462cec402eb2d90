//! Memory for results, which is not filled with zeros first: a kernel writes all of it.

use std::mem::MaybeUninit;

use super::parallel::{BLOCK, for_each_block};
use super::scalar::Real;

/// Memory for the elements of a result, none of which has a value yet.
#[derive(Debug)]
pub struct Unwritten<T> {
    values: Vec<T>,
    len: usize,
}

impl<T: Copy> Unwritten<T> {
    /// Memory for `len` elements.
    pub fn new(len: usize) -> Self {
        Unwritten { values: Vec::with_capacity(len), len }
    }

    /// The memory of the elements, for writing them.
    pub fn slots(&mut self) -> &mut [MaybeUninit<T>] {
        &mut self.values.spare_capacity_mut()[..self.len]
    }

    /// The elements, all of which have been written.
    ///
    /// # Safety
    ///
    /// Every element of [`Unwritten::slots`] has been written.
    pub unsafe fn written(mut self) -> Vec<T> {
        // SAFETY: the capacity is at least `len`, and the caller has written so many elements.
        unsafe { self.values.set_len(self.len) };
        self.values
    }
}

/// Zeros for a gradient of `len` elements, or `None` if the gradient is not wanted.
pub fn zeros<T: Real>(wanted: bool, len: usize) -> Option<Vec<T>> {
    wanted.then(|| {
        let mut values = Unwritten::new(len);
        // In parallel, where the allocator would do it on this thread.
        let fill = |_, block: &mut [MaybeUninit<T>]| block.fill(MaybeUninit::new(T::ZERO));
        for_each_block(values.slots(), 4 * BLOCK, fill);
        // SAFETY: the blocks are all elements.
        unsafe { values.written() }
    })
}
