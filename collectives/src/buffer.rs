//! Flat, typed memory that collectives read and write.

use crate::dtype::{DType, Element};
use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

#[cfg(feature = "cube")]
use crate::device::DeviceMemory;

/// Unit of allocation: one cache line. Its alignment is the alignment of every buffer.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

const LINE: usize = size_of::<Line>();

thread_local! {
    static FOR_ALL: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is just allocating memory for all ranks of a group. An allocator that counts
/// what each rank holds asks this: such memory is not that of the rank that happens to write it.
pub fn allocates_for_all() -> bool {
    FOR_ALL.get()
}

/// Where the elements of a buffer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Location {
    /// In the host's memory.
    Host,
    /// In the memory of a GPU.
    Device,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Location::Host => "the host",
            Location::Device => "a GPU",
        })
    }
}

/// A buffer could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BufferError {
    /// As the wrong element type.
    #[error("the buffer holds {len} elements of {actual}, but was read as {requested}")]
    DType {
        /// Type the buffer holds.
        actual: DType,
        /// Type the caller asked for.
        requested: DType,
        /// Number of elements in the buffer.
        len: usize,
    },
    /// It is in the memory of a GPU.
    #[error("the {len} elements of {dtype} are on a GPU and cannot be read in place")]
    OnDevice {
        /// Type the buffer holds.
        dtype: DType,
        /// Number of elements in the buffer.
        len: usize,
    },
    /// The GPU did not deliver it.
    #[error("cannot copy {len} elements of {dtype} from the GPU: {reason}")]
    Device {
        /// Type the buffer holds.
        dtype: DType,
        /// Number of elements in the buffer.
        len: usize,
        /// What the GPU's runtime said.
        reason: String,
    },
}

/// Owned, flat, typed memory: of the host, aligned to 64 bytes, or of a GPU.
///
/// `Clone` copies the contents; `Debug` prints dtype and length, never the contents.
#[derive(Clone)]
pub struct Buffer {
    dtype: DType,
    /// Number of elements.
    len: usize,
    storage: Storage,
}

/// Where the elements are.
#[derive(Clone)]
enum Storage {
    /// At least `len * dtype.size()` bytes; the tail of the last line is padding.
    Host(Vec<Line>),
    /// The same, read by several buffers. The one that writes gets a copy of its own first.
    Shared(Arc<Vec<Line>>),
    /// Of the host, once it is needed.
    Unallocated,
    /// At least `len * dtype.size()` bytes.
    #[cfg(feature = "cube")]
    Device(DeviceMemory),
}

impl Buffer {
    /// Makes a buffer of `len` zeros on the host.
    ///
    /// The memory comes zeroed from the allocator, so large buffers cost nothing until used.
    ///
    /// # Panics
    ///
    /// Like `Vec`, if the size overflows or the allocator is out of memory.
    pub fn zeros(dtype: DType, len: usize) -> Buffer {
        // An overflow saturates to a size that the allocation refuses.
        let bytes = len.saturating_mul(dtype.size());
        let lines = bytemuck::zeroed_vec(bytes.div_ceil(LINE));
        Buffer { dtype, len, storage: Storage::Host(lines) }
    }

    /// A buffer of `len` elements on the host that has no memory yet. What fills it finds the memory: an
    /// all-gather among ranks that share memory fills one for all of them. At the first write by anyone else
    /// it becomes a buffer of zeros.
    pub fn unallocated(dtype: DType, len: usize) -> Buffer {
        Buffer { dtype, len, storage: Storage::Unallocated }
    }

    /// Whether there is memory.
    pub fn is_allocated(&self) -> bool {
        !matches!(self.storage, Storage::Unallocated)
    }

    /// Whether the memory may be read through other buffers.
    pub fn is_shared(&self) -> bool {
        matches!(self.storage, Storage::Shared(_))
    }

    /// The elements of `inputs` (on the host, of one type) one after another, in memory that copies of the
    /// result share.
    pub(crate) fn concatenated(dtype: DType, inputs: &[Arc<Buffer>]) -> Buffer {
        let len = inputs.iter().map(|input| input.len()).sum::<usize>();
        let lines = (len * dtype.size()).div_ceil(LINE);
        FOR_ALL.set(true);
        let mut whole = Vec::with_capacity(lines);
        FOR_ALL.set(false);
        if inputs.iter().all(|input| input.size_in_bytes().is_multiple_of(LINE)) {
            for input in inputs {
                whole.extend_from_slice(input.lines());
            }
        } else {
            whole.resize(lines, Line::zeroed());
            let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut whole);
            for input in inputs {
                let (slot, next) = rest.split_at_mut(input.size_in_bytes());
                slot.copy_from_slice(input.as_bytes());
                rest = next;
            }
        }
        Buffer { dtype, len, storage: Storage::Shared(Arc::new(whole)) }
    }

    /// Copies `values` into a new buffer on the host.
    pub fn from_slice<T: Element>(values: &[T]) -> Buffer {
        let mut buffer = Buffer::zeros(T::DTYPE, values.len());
        buffer.as_bytes_mut().copy_from_slice(bytemuck::cast_slice(values));
        buffer
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer holds no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bytes of all elements, without padding.
    pub fn size_in_bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Where the elements are.
    pub fn location(&self) -> Location {
        match &self.storage {
            #[cfg(feature = "cube")]
            Storage::Device(_) => Location::Device,
            _ => Location::Host,
        }
    }

    /// Whether the elements are in the host's memory.
    pub fn is_on_host(&self) -> bool {
        self.location() == Location::Host
    }

    /// Whether both are on the host, or on the same GPU.
    pub(crate) fn is_beside(&self, other: &Buffer) -> bool {
        match (&self.storage, &other.storage) {
            #[cfg(feature = "cube")]
            (Storage::Device(one), Storage::Device(two)) => {
                one.client().service_id() == two.client().service_id()
            }
            _ => self.is_on_host() && other.is_on_host(),
        }
    }

    /// Room for `len` elements of the same type in the same place. Zeros on the host, arbitrary on a
    /// GPU, and without memory like this one.
    pub fn like(&self, len: usize) -> Buffer {
        match &self.storage {
            Storage::Host(_) | Storage::Shared(_) => Buffer::zeros(self.dtype, len),
            Storage::Unallocated => Buffer::unallocated(self.dtype, len),
            #[cfg(feature = "cube")]
            Storage::Device(memory) => Buffer::empty_on(memory.client(), self.dtype, len),
        }
    }

    /// A copy in the same place whose bytes `change` has changed, which happens on the host. For rare
    /// uses: from and to a GPU, all bytes travel.
    ///
    /// # Errors
    ///
    /// If the GPU has failed.
    pub fn changed(&self, change: impl FnOnce(&mut [u8])) -> Result<Buffer, BufferError> {
        #[cfg(feature = "cube")]
        if let Storage::Device(memory) = &self.storage {
            let mut host = self.to_host()?;
            change(host.as_bytes_mut());
            return Ok(host.to_device(memory.client()));
        }
        let mut copy = self.clone();
        change(copy.as_bytes_mut());
        Ok(copy)
    }

    fn lines(&self) -> &[Line] {
        match &self.storage {
            Storage::Host(lines) => lines,
            Storage::Shared(lines) => lines,
            Storage::Unallocated => panic!("a buffer is read before it has memory"),
            #[cfg(feature = "cube")]
            Storage::Device(_) => panic!("{}", self.on_device()),
        }
    }

    /// The elements as bytes in native order.
    ///
    /// # Panics
    ///
    /// If they are not on the host, or have no memory yet.
    pub fn as_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(self.lines())[..self.size_in_bytes()]
    }

    /// The elements as writable bytes in native order.
    ///
    /// # Panics
    ///
    /// If they are not on the host.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.size_in_bytes();
        match &mut self.storage {
            Storage::Shared(lines) => {
                let lines = Arc::unwrap_or_clone(std::mem::take(lines));
                self.storage = Storage::Host(lines);
            }
            Storage::Unallocated => *self = Buffer::zeros(self.dtype, self.len),
            _ => {}
        }
        match &mut self.storage {
            Storage::Host(lines) => &mut bytemuck::cast_slice_mut(lines)[..bytes],
            #[cfg(feature = "cube")]
            Storage::Device(_) => {
                panic!("{}", BufferError::OnDevice { dtype: self.dtype, len: self.len })
            }
            // Both have become the buffer's own above.
            Storage::Shared(_) | Storage::Unallocated => &mut [],
        }
    }

    fn on_device(&self) -> BufferError {
        BufferError::OnDevice { dtype: self.dtype, len: self.len }
    }

    /// The elements as a slice of `T`.
    ///
    /// # Errors
    ///
    /// [`BufferError`] if the buffer does not hold `T`, or not on the host.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], BufferError> {
        self.check::<T>()?;
        Ok(bytemuck::cast_slice(self.as_bytes()))
    }

    /// The elements as a writable slice of `T`.
    ///
    /// # Errors
    ///
    /// [`BufferError`] if the buffer does not hold `T`, or not on the host.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], BufferError> {
        self.check::<T>()?;
        Ok(bytemuck::cast_slice_mut(self.as_bytes_mut()))
    }

    fn check<T: Element>(&self) -> Result<(), BufferError> {
        if T::DTYPE != self.dtype {
            let (actual, requested) = (self.dtype, T::DTYPE);
            return Err(BufferError::DType { actual, requested, len: self.len });
        }
        if self.is_on_host() { Ok(()) } else { Err(self.on_device()) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("dtype", &self.dtype).field("len", &self.len).finish()
    }
}

#[cfg(feature = "cube")]
impl Buffer {
    /// A buffer of `len` elements in `memory`, which has room for them, in whole words of 4 bytes.
    pub fn from_device(dtype: DType, len: usize, memory: DeviceMemory) -> Buffer {
        Buffer { dtype, len, storage: Storage::Device(memory) }
    }

    /// Where the elements are, if that is on a GPU.
    pub fn device(&self) -> Option<&DeviceMemory> {
        match &self.storage {
            Storage::Device(memory) => Some(memory),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn holds_every_element_type_aligned_and_zeroed() {
        fn check<T: Element + PartialEq + fmt::Debug>() {
            for len in [0, 1, 63, 64, 65, 1023] {
                let mut buffer = Buffer::zeros(T::DTYPE, len);
                assert_eq!(buffer.dtype(), T::DTYPE);
                assert_eq!(buffer.len(), len);
                assert_eq!(buffer.is_empty(), len == 0);
                assert_eq!(buffer.size_in_bytes(), len * size_of::<T>());
                assert_eq!(T::DTYPE.size(), size_of::<T>());
                assert_eq!(buffer.as_slice::<T>().unwrap(), vec![T::zeroed(); len]);
                assert_eq!(buffer.as_mut_slice::<T>().unwrap().len(), len);
                assert_eq!(buffer.as_ref().as_ptr() as usize % 64, 0);
            }
        }
        check::<f64>();
        check::<f32>();
        check::<f16>();
        check::<bf16>();
        check::<u8>();
    }

    #[test]
    fn copies_are_deep_and_debug_hides_contents() {
        let original = Buffer::from_slice(&[1.0f32, 2.0, 3.0]);
        let mut copy = original.clone();
        copy.as_mut_slice::<f32>().unwrap()[0] = 9.0;
        assert_eq!(original.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0]);
        assert_eq!(format!("{original:?}"), "Buffer { dtype: F32, len: 3 }");
    }

    #[test]
    fn shared_memory_is_copied_before_it_is_written() {
        for len in [3, 16, 40] {
            let parts = [vec![1.0f32; len], vec![2.0; len]];
            let inputs: Vec<_> =
                parts.iter().map(|part| Arc::new(Buffer::from_slice(part))).collect();
            let whole = Buffer::concatenated(DType::F32, &inputs);
            let mut other = whole.clone();
            assert!(whole.is_shared() && whole.as_bytes().as_ptr() == other.as_bytes().as_ptr());
            other.as_mut_slice::<f32>().unwrap()[0] = 9.0;
            assert!(whole.as_slice::<f32>().unwrap() == parts.concat(), "{len}");
            assert!(!other.is_shared() && other.as_slice::<f32>().unwrap()[0] == 9.0);
        }
    }

    #[test]
    fn memory_comes_with_the_first_write() {
        let mut buffer = Buffer::unallocated(DType::F32, 5).like(7);
        assert!(!buffer.is_allocated() && buffer.is_on_host() && buffer.len() == 7);
        assert_eq!(buffer.as_mut_slice::<f32>().unwrap(), [0.0; 7]);
        assert!(buffer.is_allocated());
    }

    #[test]
    fn refuses_the_wrong_type() {
        let mut buffer = Buffer::from_slice(&[1.0f32, 2.0]);
        let error = buffer.as_slice::<f16>().unwrap_err();
        assert_eq!(error.to_string(), "the buffer holds 2 elements of f32, but was read as f16");
        assert_eq!(buffer.as_mut_slice::<f16>().unwrap_err(), error);
    }
}
