//! Crashes on purpose, for fire drills and tests.

use std::ffi::c_void;
use std::hint::black_box;
use std::ptr;

/// Sends SIGSEGV to the calling thread.
#[inline(never)]
pub fn raise_segv() {
    // SAFETY: this ends the process, with or without the crash handler.
    unsafe { libc::raise(libc::SIGSEGV) };
}

/// Reads a page beyond the end of its file, which raises SIGBUS. Does nothing if the system cannot map such a file.
#[inline(never)]
pub fn read_beyond_a_file() {
    const BYTES: usize = 4096;
    // SAFETY: the name ends with a zero. The file gets an unused address, and the page is meant to be unreadable.
    unsafe {
        let file = libc::memfd_create(c"kiln-drill".as_ptr(), libc::MFD_CLOEXEC);
        if file < 0 {
            return;
        }
        let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
        let page: *mut c_void = libc::mmap(ptr::null_mut(), BYTES, read, shared, file, 0);
        if page != libc::MAP_FAILED {
            black_box(ptr::read_volatile(page.cast::<u8>()));
        }
    }
}

/// Recurses until the stack of the thread is exhausted.
#[inline(never)]
pub fn overflow_the_stack() {
    black_box(recurse(0));
}

fn recurse(depth: u64) -> u64 {
    if depth == u64::MAX {
        return 0;
    }
    let block = black_box([depth; 64]);
    recurse(black_box(depth + 1)) + block[0]
}
