//! Device memory: the allocated addresses, and the bytes that have been written.
//!
//! Device memory is memory of this process, identified by its addresses, as in the stand-in for the driver.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::error::{Fault, Space};
use crate::races::{Party, Word};

/// Relaxed, because blocks have no guarantees about the order of each other's accesses.
const ORDER: Ordering = Ordering::Relaxed;

/// Upper bits of a generic address that identify its space. No pointer of this process has these values.
pub const SHARED_WINDOW: u64 = 0x5ead << 48;
pub const LOCAL_WINDOW: u64 = 0x10ca << 48;

/// A range of device memory.
#[derive(Debug)]
struct Allocation {
    start: u64,
    bytes: u64,
    /// For each byte, whether it has been written.
    written: Vec<AtomicU8>,
    /// For each word of four bytes, its last write and read.
    words: Vec<Word>,
}

/// The allocations. Clones refer to the same memory.
#[derive(Debug, Clone, Default)]
pub struct DeviceMemory {
    table: Arc<RwLock<BTreeMap<u64, Arc<Allocation>>>>,
}

/// A type for which all bits zero is a valid value.
trait Zeroed {}
impl Zeroed for AtomicU8 {}
impl Zeroed for Word {}

/// Zeros, which the system provides on first access.
fn zeros<T: Zeroed>(len: usize) -> Vec<T> {
    let Ok(layout) = Layout::array::<T>(len) else { return Vec::new() };
    if len == 0 {
        return Vec::new();
    }
    // SAFETY: the layout has a size and is that of a vector of `len` values, for which zeros are valid.
    unsafe {
        let start = alloc_zeroed(layout).cast::<T>();
        if start.is_null() {
            handle_alloc_error(layout);
        }
        Vec::from_raw_parts(start, len, len)
    }
}

impl DeviceMemory {
    /// Registers `bytes` bytes at `start` as unwritten device memory.
    ///
    /// # Safety
    /// Until [`DeviceMemory::remove`], they must be memory of this process that may be read and written.
    pub unsafe fn add(&self, start: u64, bytes: u64, checked: bool) {
        let checked = if checked { bytes as usize } else { 0 };
        let (written, words) = (zeros(checked), zeros(checked.div_ceil(4)));
        let allocation = Arc::new(Allocation { start, bytes, written, words });
        self.table.write().unwrap_or_else(PoisonError::into_inner).insert(start, allocation);
    }

    /// Unregisters the device memory at `start`.
    pub fn remove(&self, start: u64) {
        self.table.write().unwrap_or_else(PoisonError::into_inner).remove(&start);
    }

    /// Records a write by the host or a library.
    pub fn wrote(&self, start: u64, bytes: u64) {
        let view = self.view();
        if let Some((allocation, offset)) = view.find(start, bytes) {
            allocation.mark(offset, bytes);
        }
    }

    /// Records a copy: bytes that are unwritten in the source are unwritten in the target.
    pub fn copied(&self, to: u64, from: u64, bytes: u64) {
        let view = self.view();
        let Some((target, at)) = view.find(to, bytes) else { return };
        let Some((source, from)) = view.find(from, bytes) else { return target.mark(at, bytes) };
        if target.written.is_empty() || source.written.is_empty() {
            return;
        }
        let written: Vec<u8> = source.written[from as usize..][..bytes as usize]
            .iter()
            .map(|byte| byte.load(Ordering::Relaxed))
            .collect();
        for (byte, written) in target.written[at as usize..].iter().zip(written) {
            byte.store(written, Ordering::Relaxed);
        }
    }

    /// Returns the current allocations.
    pub fn view(&self) -> View {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        View { allocations: table.values().cloned().collect() }
    }
}

impl Allocation {
    fn mark(&self, offset: u64, bytes: u64) {
        if !self.written.is_empty() {
            for byte in &self.written[offset as usize..][..bytes as usize] {
                byte.store(1, Ordering::Relaxed);
            }
        }
    }
}

/// The allocations while a kernel runs.
#[derive(Debug, Clone)]
pub struct View {
    allocations: Vec<Arc<Allocation>>,
}

impl View {
    /// Returns the allocation that contains all of these bytes, and their position in it.
    fn find(&self, start: u64, bytes: u64) -> Option<(&Allocation, u64)> {
        let at = self.allocations.partition_point(|allocation| allocation.start <= start);
        let allocation = &**self.allocations.get(at.checked_sub(1)?)?;
        let offset = start - allocation.start;
        (offset < allocation.bytes && bytes <= allocation.bytes - offset).then_some((allocation, offset))
    }

    /// Returns the limits of the nearest allocation, for a message.
    fn limits(&self, address: u64) -> Option<(u64, u64)> {
        let distance = |a: &Allocation| match address {
            _ if address < a.start => a.start - address,
            _ => address.saturating_sub(a.start + a.bytes),
        };
        let nearest = self.allocations.iter().min_by_key(|allocation| distance(allocation))?;
        Some((nearest.start, nearest.start + nearest.bytes))
    }

    /// Finds `bytes` bytes at `address` for an access that must be aligned. `hint` is the position of the
    /// last allocation found.
    #[inline]
    pub fn reach(&self, address: u64, bytes: u32, hint: &mut usize) -> Result<Region<'_>, Fault> {
        if address & u64::from(bytes - 1) != 0 {
            return Err(Fault::Misaligned { space: Space::Global, address, bytes });
        }
        if let Some(allocation) = self.allocations.get(*hint) {
            let offset = address.wrapping_sub(allocation.start);
            if offset < allocation.bytes && u64::from(bytes) <= allocation.bytes - offset {
                return Ok(Region { allocation, offset, bytes });
            }
        }
        match self.find(address, u64::from(bytes)) {
            Some((allocation, offset)) => {
                *hint = self.allocations.partition_point(|allocation| allocation.start <= address) - 1;
                Ok(Region { allocation, offset, bytes })
            }
            None => {
                Err(Fault::OutOfBounds { space: Space::Global, address, bytes, limits: self.limits(address) })
            }
        }
    }
}

/// Bytes of an allocation, aligned to their number, which is 1, 2, 4, 8 or 16.
pub struct Region<'a> {
    allocation: &'a Allocation,
    offset: u64,
    bytes: u32,
}

impl Region<'_> {
    fn address(&self) -> u64 {
        self.allocation.start + self.offset
    }

    /// Returns the words that contain the bytes, with their addresses and the bytes in them.
    fn words(&self) -> impl Iterator<Item = (&Word, u64, u64)> {
        let bytes = if self.bytes >= 4 { 0xf } else { ((1 << self.bytes) - 1) << (self.offset % 4) };
        let first = self.offset / 4;
        let words = self.allocation.words.get(first as usize..).unwrap_or_default();
        let start = self.address() / 4 * 4;
        words
            .iter()
            .take(self.bytes.div_ceil(4) as usize)
            .zip(0..)
            .map(move |(word, n)| (word, start + 4 * n, bytes))
    }

    /// Fails if a byte is unwritten.
    #[inline]
    fn initialised(&self) -> Result<(), Fault> {
        let written = self.allocation.written.get(self.offset as usize..).unwrap_or_default();
        let mut written = written.iter().take(self.bytes as usize);
        match written.position(|byte| byte.load(Ordering::Relaxed) == 0) {
            Some(at) => {
                Err(Fault::Uninitialised { space: Space::Global, address: self.address() + at as u64 })
            }
            None => Ok(()),
        }
    }

    /// Returns the unwritten bytes, one bit for each.
    pub fn unwritten(&self) -> u16 {
        let written = self.allocation.written.get(self.offset as usize..).unwrap_or_default();
        let bytes = written.iter().take(self.bytes as usize).enumerate();
        bytes.fold(0, |all, (n, byte)| all | u16::from(byte.load(Ordering::Relaxed) == 0) << n)
    }

    /// Marks these bytes as unwritten, one bit for each.
    pub fn unmark(&self, bytes: u16) {
        let written = self.allocation.written.get(self.offset as usize..).unwrap_or_default();
        for (n, byte) in written.iter().take(self.bytes as usize).enumerate() {
            if bytes >> n & 1 != 0 {
                byte.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Checks and records a read. Fails if a byte is unwritten, or was written by others.
    #[inline]
    pub fn check_read(&self, party: Party) -> Result<(), Fault> {
        self.initialised()?;
        self.words().try_for_each(|(word, address, bytes)| word.read(address, party, bytes))
    }

    /// Checks and records an atomic operation. Fails if a byte is unwritten, or if others have accessed it by
    /// other than atomic operations.
    pub fn check_update(&self, party: Party) -> Result<(), Fault> {
        self.initialised()?;
        self.check_write(party, true)
    }

    /// Checks and records a write. Fails if others have written or read the bytes.
    #[inline]
    pub fn check_write(&self, party: Party, atomic: bool) -> Result<(), Fault> {
        self.words().try_for_each(|(word, address, bytes)| word.write(address, party, bytes, atomic))
    }

    /// Reads the bytes, lowest first, in parts of `size` bytes, each with a single access.
    #[inline]
    pub fn read(&self, size: u32) -> u128 {
        let mut value = 0;
        for at in (0..self.bytes).step_by(size as usize) {
            let address = self.address() + u64::from(at);
            // SAFETY: the bytes are inside an allocation that its owner keeps readable and writable, and are
            // aligned to `size`, which divides `bytes`. Other blocks of the kernel may write to them at the
            // same time, which atomic accesses allow.
            let part = unsafe {
                match size {
                    1 => u64::from(AtomicU8::from_ptr(address as *mut u8).load(Ordering::Relaxed)),
                    2 => u64::from(AtomicU16::from_ptr(address as *mut u16).load(Ordering::Relaxed)),
                    4 => u64::from(AtomicU32::from_ptr(address as *mut u32).load(Ordering::Relaxed)),
                    _ => AtomicU64::from_ptr(address as *mut u64).load(Ordering::Relaxed),
                }
            };
            value |= u128::from(part) << (8 * at);
        }
        value
    }

    /// Writes the bytes of `value`, lowest first, in parts of `size` bytes.
    #[inline]
    pub fn write(&self, value: u128, size: u32) {
        for at in (0..self.bytes).step_by(size as usize) {
            let address = self.address() + u64::from(at);
            let part = (value >> (8 * at)) as u64;
            // SAFETY: as in `read`.
            unsafe {
                match size {
                    1 => AtomicU8::from_ptr(address as *mut u8).store(part as u8, Ordering::Relaxed),
                    2 => AtomicU16::from_ptr(address as *mut u16).store(part as u16, Ordering::Relaxed),
                    4 => AtomicU32::from_ptr(address as *mut u32).store(part as u32, Ordering::Relaxed),
                    _ => AtomicU64::from_ptr(address as *mut u64).store(part, Ordering::Relaxed),
                }
            }
        }
        self.allocation.mark(self.offset, u64::from(self.bytes));
    }

    /// Changes 2, 4 or 8 bytes atomically. Returns the previous value.
    pub fn update(&self, f: impl Fn(u64) -> u64) -> u64 {
        let address = self.address();
        // SAFETY: as in `read`.
        let before = unsafe {
            match self.bytes {
                2 => AtomicU16::from_ptr(address as *mut u16)
                    .fetch_update(ORDER, ORDER, |value| Some(f(value.into()) as u16))
                    .map(u64::from)
                    .unwrap_or_else(u64::from),
                4 => AtomicU32::from_ptr(address as *mut u32)
                    .fetch_update(ORDER, ORDER, |value| Some(f(value.into()) as u32))
                    .map(u64::from)
                    .unwrap_or_else(u64::from),
                _ => AtomicU64::from_ptr(address as *mut u64)
                    .fetch_update(ORDER, ORDER, |value| Some(f(value)))
                    .unwrap_or_else(|value| value),
            }
        };
        self.allocation.mark(self.offset, u64::from(self.bytes));
        before
    }
}
