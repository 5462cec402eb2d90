//! Flat, typed memory that collectives read and write.

use crate::dtype::{DType, Element};
use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

#[cfg(feature = "cube")]
use crate::{device::DeviceMemory, kernels::WORD};
#[cfg(feature = "cube")]
use cubecl::prelude::Client;
#[cfg(feature = "cube")]
use std::ops::Range;

/// One cache line, the unit and alignment of host buffers.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

const LINE: usize = size_of::<Line>();

thread_local! {
    static ALLOCATES_FOR_ALL: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the calling thread is allocating memory for all ranks of a group. An allocator that counts memory
/// per rank must not charge such memory to the calling rank.
pub fn allocates_for_all() -> bool {
    ALLOCATES_FOR_ALL.get()
}

/// The memory that holds the elements of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Location {
    /// Memory of the host.
    Host,
    /// Memory of a GPU.
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

/// The reason why a buffer's elements could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BufferError {
    /// The buffer holds a different element type.
    #[error("the buffer holds {len} elements of {actual}, but was read as {requested}")]
    DType {
        /// Type that the buffer holds.
        actual: DType,
        /// Requested type.
        requested: DType,
        /// Number of elements in the buffer.
        len: usize,
    },
    /// The elements are in the memory of a GPU.
    #[error("the {len} elements of {dtype} are on a GPU and cannot be read in place")]
    OnDevice {
        /// Type that the buffer holds.
        dtype: DType,
        /// Number of elements in the buffer.
        len: usize,
    },
    /// The GPU did not deliver the elements.
    #[error("cannot copy {len} elements of {dtype} from the GPU: {reason}")]
    Device {
        /// Type that the buffer holds.
        dtype: DType,
        /// Number of elements in the buffer.
        len: usize,
        /// The error of the GPU's runtime.
        reason: String,
    },
}

/// Flat, typed, owned memory: on the host, aligned to 64 bytes, or on a GPU. `Clone` copies the contents.
#[derive(Clone)]
pub struct Buffer {
    dtype: DType,
    len: usize,
    storage: Storage,
}

#[derive(Clone)]
enum Storage {
    Host(Vec<Line>),
    /// Host memory of several buffers. A buffer copies it before its first write.
    Shared(Arc<Vec<Line>>),
    Unallocated,
    #[cfg(feature = "cube")]
    Device(DeviceMemory),
}

impl Buffer {
    /// Creates a buffer of `len` zeros on the host. Large buffers cost nothing until used.
    ///
    /// # Panics
    ///
    /// Panics if the size overflows or the allocator is out of memory, like `Vec`.
    pub fn zeros(dtype: DType, len: usize) -> Buffer {
        let bytes = len.saturating_mul(dtype.size());
        let lines = bytemuck::zeroed_vec(bytes.div_ceil(LINE));
        Buffer { dtype, len, storage: Storage::Host(lines) }
    }

    /// Creates a host buffer of `len` elements without memory. An all-gather among ranks that share memory allocates it
    /// once for all. Any other first write allocates and zeroes it.
    pub fn unallocated(dtype: DType, len: usize) -> Buffer {
        Buffer { dtype, len, storage: Storage::Unallocated }
    }

    /// Returns whether the buffer has memory.
    pub fn is_allocated(&self) -> bool {
        !matches!(self.storage, Storage::Unallocated)
    }

    /// Returns whether other buffers may read the same memory.
    pub fn is_shared(&self) -> bool {
        matches!(self.storage, Storage::Shared(_))
    }

    /// Concatenates `inputs` (on the host, of one type). Clones of the result share its memory.
    pub(crate) fn concatenated(dtype: DType, inputs: &[Arc<Buffer>]) -> Buffer {
        let len = inputs.iter().map(|input| input.len()).sum::<usize>();
        let lines = (len * dtype.size()).div_ceil(LINE);
        ALLOCATES_FOR_ALL.set(true);
        let mut whole = Vec::with_capacity(lines);
        ALLOCATES_FOR_ALL.set(false);
        if inputs.iter().all(|input| input.size_in_bytes().is_multiple_of(LINE)) {
            for input in inputs {
                whole.extend_from_slice(input.lines());
            }
        } else {
            whole.resize(lines, Line::zeroed());
            let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut whole);
            for input in inputs {
                let (chunk, next) = rest.split_at_mut(input.size_in_bytes());
                chunk.copy_from_slice(input.as_bytes());
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

    /// Returns whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size of all elements in bytes, without padding.
    pub fn size_in_bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Returns whether the elements are on the host or on a GPU.
    pub fn location(&self) -> Location {
        match &self.storage {
            #[cfg(feature = "cube")]
            Storage::Device(_) => Location::Device,
            _ => Location::Host,
        }
    }

    /// Returns whether the elements are on the host.
    pub fn is_on_host(&self) -> bool {
        self.location() == Location::Host
    }

    /// Returns whether both buffers are on the host, or on the same GPU.
    pub(crate) fn is_beside(&self, other: &Buffer) -> bool {
        match (&self.storage, &other.storage) {
            #[cfg(feature = "cube")]
            (Storage::Device(one), Storage::Device(two)) => {
                one.client().service_id() == two.client().service_id()
            }
            _ => self.is_on_host() && other.is_on_host(),
        }
    }

    /// Creates a buffer of `len` elements with this buffer's type and location: zeros on the host, arbitrary values on
    /// a GPU, and without memory if this buffer has none.
    pub fn like(&self, len: usize) -> Buffer {
        match &self.storage {
            Storage::Host(_) | Storage::Shared(_) => Buffer::zeros(self.dtype, len),
            Storage::Unallocated => Buffer::unallocated(self.dtype, len),
            #[cfg(feature = "cube")]
            Storage::Device(memory) => Buffer::empty_on(memory.client(), self.dtype, len),
        }
    }

    /// Returns a copy, at the same location, with `change` applied to its bytes. Slow on a GPU.
    ///
    /// # Errors
    ///
    /// Fails if the GPU has failed.
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

    /// Returns the elements as bytes in native order.
    ///
    /// # Panics
    ///
    /// Panics if the buffer is not on the host, or has no memory yet.
    pub fn as_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(self.lines())[..self.size_in_bytes()]
    }

    /// Returns the elements as writable bytes in native order.
    ///
    /// # Panics
    ///
    /// Panics if the buffer is not on the host.
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
            Storage::Shared(_) | Storage::Unallocated => &mut [],
        }
    }

    fn on_device(&self) -> BufferError {
        BufferError::OnDevice { dtype: self.dtype, len: self.len }
    }

    /// Returns the elements as a slice of `T`.
    ///
    /// # Errors
    ///
    /// [`BufferError`] if the elements are not of type `T`, or not on the host.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], BufferError> {
        self.check::<T>()?;
        Ok(bytemuck::cast_slice(self.as_bytes()))
    }

    /// Returns the elements as a writable slice of `T`.
    ///
    /// # Errors
    ///
    /// [`BufferError`] if the elements are not of type `T`, or not on the host.
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
    /// Creates a buffer of `len` elements in `memory`, which must hold them rounded up to words of 4 bytes.
    pub fn from_device(dtype: DType, len: usize, memory: DeviceMemory) -> Buffer {
        Buffer { dtype, len, storage: Storage::Device(memory) }
    }

    /// Creates a buffer of `len` elements on the device of `client`, with arbitrary contents.
    pub fn empty_on(client: &Client, dtype: DType, len: usize) -> Buffer {
        Buffer::from_device(dtype, len, DeviceMemory::empty(client, len * dtype.size()))
    }

    /// Returns the GPU memory of the elements, if they are on a GPU.
    pub fn device(&self) -> Option<&DeviceMemory> {
        match &self.storage {
            Storage::Device(memory) => Some(memory),
            _ => None,
        }
    }

    /// Copies a host buffer to the device of `client`.
    ///
    /// # Panics
    ///
    /// Panics if the buffer is not on the host.
    pub fn to_device(&self, client: &Client) -> Buffer {
        let memory = DeviceMemory::upload(client, self.as_bytes().to_vec());
        Buffer::from_device(self.dtype, self.len, memory)
    }

    /// Copies the buffer to the host. Waits for the device.
    ///
    /// # Errors
    ///
    /// Fails if the device has failed.
    pub fn to_host(&self) -> Result<Buffer, BufferError> {
        match self.device() {
            Some(_) => self.range_to_host(0..self.len),
            None => Ok(self.clone()),
        }
    }

    /// Copies the elements of `range`, which starts at a word boundary, to the host. Waits for the device.
    ///
    /// # Errors
    ///
    /// Fails if the device has failed.
    ///
    /// # Panics
    ///
    /// Panics if the range is not inside the buffer, or does not start at a word boundary.
    pub fn range_to_host(&self, range: Range<usize>) -> Result<Buffer, BufferError> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        let (dtype, len, width) = (self.dtype, range.len(), self.dtype.size());
        let start = range.start * width;
        assert!(start.is_multiple_of(WORD), "element {} of {dtype} starts no word", range.start);
        let mut host = Buffer::zeros(dtype, len);
        let size = host.size_in_bytes();
        match self.device() {
            None => host.as_bytes_mut().copy_from_slice(&self.as_bytes()[start..start + size]),
            Some(_) if len == 0 => {}
            Some(memory) => {
                let read = memory.download(start..start + size);
                let bytes = read.map_err(|reason| BufferError::Device { dtype, len, reason })?;
                host.as_bytes_mut().copy_from_slice(&bytes[..size]);
            }
        }
        Ok(host)
    }
}

#[cfg(test)]
mod tests;
