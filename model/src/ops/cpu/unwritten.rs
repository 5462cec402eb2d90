//! Memory for results, which is not filled with zeros first: a kernel writes all of it.

use std::mem::MaybeUninit;

/// Room for the elements of a result, none of which has a value yet.
#[derive(Debug)]
pub struct Unwritten<T> {
    values: Vec<T>,
    len: usize,
}

impl<T: Copy> Unwritten<T> {
    /// Room for `len` elements.
    pub fn new(len: usize) -> Self {
        Unwritten { values: Vec::with_capacity(len), len }
    }

    /// Where the elements are to be written.
    pub fn slots(&mut self) -> &mut [MaybeUninit<T>] {
        &mut self.values.spare_capacity_mut()[..self.len]
    }

    /// The elements.
    ///
    /// # Safety
    ///
    /// Every one of [`Unwritten::slots`] has been written.
    pub unsafe fn written(mut self) -> Vec<T> {
        // SAFETY: the capacity is at least `len`, and the caller has written so many elements.
        unsafe { self.values.set_len(self.len) };
        self.values
    }
}
