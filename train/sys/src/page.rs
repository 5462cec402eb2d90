//! Memory that a rank shares with its launcher: the rank's position, for ends that a process cannot report,
//! such as SIGKILL.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

/// Variable that names the page: its descriptor and its inode.
pub const PAGE: &str = "KILN_LAUNCHER_PAGE";

/// Size of the page in bytes.
const BYTES: usize = 4096;

/// The page of this process; null if there is none.
static SHARED: AtomicPtr<Progress> = AtomicPtr::new(ptr::null_mut());

/// The position of a rank in its run. Zero for unknown values.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Progress {
    /// The current optimizer step.
    pub(super) step: AtomicU64,
    /// The last step saved in a complete checkpoint.
    pub(super) saved: AtomicU64,
    /// The micro-batch of the step, its first sample in the global order, and the number of its samples.
    pub(super) micro_batch: [AtomicU64; 3],
}

/// Number of words of a [`Progress`].
const WORDS: usize = size_of::<Progress>() / size_of::<u64>();

/// The content of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The optimizer step that the rank was in; 0 before the first one.
    pub step: u64,
    /// The last fetched micro-batch: its number in the step, its first sample in the global order, and the
    /// number of its samples.
    pub micro_batch: Option<(u64, u64, u64)>,
}

/// The launcher's side of a page.
#[derive(Debug)]
pub struct Page(File);

impl Page {
    /// Creates an empty page.
    ///
    /// # Errors
    ///
    /// If the system cannot provide one.
    pub fn new() -> io::Result<Page> {
        let file: File = rustix::fs::memfd_create("kiln-rank", rustix::fs::MemfdFlags::CLOEXEC)?.into();
        file.set_len(BYTES as u64)?;
        Ok(Page(file))
    }

    /// Returns the file for a process to inherit, and the value of [`PAGE`] that names it.
    ///
    /// # Errors
    ///
    /// If there are too many open files.
    pub fn for_child(&self) -> io::Result<(String, File)> {
        let file = self.0.try_clone()?;
        Ok((format!("{}:{}", file.as_raw_fd(), nix::sys::stat::fstat(&file)?.st_ino), file))
    }

    /// Returns the last reported state of the process; an empty one if it has not used the page.
    pub fn seen(&self) -> Seen {
        let mut bytes = [0; WORDS * size_of::<u64>()];
        if self.0.read_exact_at(&mut bytes, 0).is_err() {
            return Seen::default();
        }
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        let [step, _, index, first, samples] = words;
        Seen { step, micro_batch: (samples > 0).then_some((index, first, samples)) }
    }
}

/// Maps the page that the launcher has created for this process, if any: `descriptor` is open.
pub(super) fn share(descriptor: RawFd) {
    // SAFETY: the descriptor is that of the launcher's page, which has `BYTES` bytes; they are mapped at an
    // unused address, and remain mapped until the process ends.
    let page = unsafe {
        let page = BorrowedFd::borrow_raw(descriptor);
        if !nix::sys::stat::fstat(page).is_ok_and(|stat| stat.st_size == BYTES as i64) {
            return;
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(ptr::null_mut(), BYTES, access, libc::MAP_SHARED, descriptor, 0)
    };
    if page != libc::MAP_FAILED {
        SHARED.store(page.cast(), Ordering::Relaxed);
    }
}

/// Returns the page of this process, to the first rank that asks.
pub(super) fn take() -> Option<&'static Progress> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let page = SHARED.load(Ordering::Relaxed);
    if page.is_null() || TAKEN.swap(true, Ordering::Relaxed) {
        return None;
    }
    // SAFETY: it is never unmapped, is aligned as pages are, and any bytes are valid atomic integers.
    Some(unsafe { &*page })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_sees_where_a_rank_is() {
        let page = Page::new().unwrap();
        assert_eq!(page.seen(), Seen::default());
        let (_, file) = page.for_child().unwrap();
        share(file.as_raw_fd());
        let progress = take().expect("a page");
        assert!(take().is_none());
        progress.step.store(7, Ordering::Relaxed);
        assert_eq!(page.seen(), Seen { step: 7, micro_batch: None });
        for (place, value) in progress.micro_batch.iter().zip([2, 90, 4]) {
            place.store(value, Ordering::Relaxed);
        }
        assert_eq!(page.seen(), Seen { step: 7, micro_batch: Some((2, 90, 4)) });
    }
}
