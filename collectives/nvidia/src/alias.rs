//! Gives a loaded library a second name, under which some of its functions may be replaced. cudarc asks the loader for
//! `libnccl.so`, but NCCL's name is `libnccl.so.2`. The loader finds a loaded library by its soname, and searches that
//! library's dependencies for symbols. So this module builds, in memory, a shared object with the requested soname and
//! the real library as a dependency (System V ABI, chapters 4 and 5).
//!
//! The object's own symbols take precedence: functions of this program at absolute addresses (`SHN_ABS`, which glibc
//! 2.28 and later use unchanged).

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use nix::sys::memfd::{MFdFlags, memfd_create};

const HEADER: usize = 64;
const SEGMENT: usize = 56;
const ENTRY: usize = 16;
const SYMBOL: usize = 24;

/// A multiple of every page size that Linux uses on the supported processors.
const ALIGNMENT: u64 = 0x10000;

const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// Name of a replaced function, and address of its replacement.
pub type Instead = (&'static str, usize);

/// Makes the loader find `library`, the soname of a loaded library, under the name `alias`, which no loaded library may
/// have yet. The functions in `instead` replace the library's own.
///
/// # Errors
///
/// The error of the system or of the loader.
pub(crate) fn give(library: &str, alias: &str, instead: &[Instead]) -> io::Result<()> {
    let mut file = File::from(memfd_create(alias, MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&shared_object(library, alias, instead))?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    // SAFETY: the object has no code, so loading it runs none. `library` is loaded already.
    let loaded = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    // Kept until the process ends: the loader identifies the object by the inode of its file.
    std::mem::forget((loaded.map_err(io::Error::other)?, file));
    Ok(())
}

/// Builds a shared object named `alias` that needs `library` and has the symbols of `instead`.
fn shared_object(library: &str, alias: &str, instead: &[Instead]) -> Vec<u8> {
    const SEGMENTS: usize = 3;
    const ENTRIES: usize = 8;
    let dynamic = HEADER + SEGMENTS * SEGMENT;
    let symbols = dynamic + ENTRIES * ENTRY;
    let count = 1 + instead.len();
    let hash = symbols + count * SYMBOL;
    // Two lengths, one bucket, a chain; the strings follow.
    let strings = hash + (3 + count) * 4;
    let mut names = format!("\0{library}\0{alias}\0");
    let mut offsets = Vec::new();
    for (name, _) in instead {
        offsets.push(names.len());
        names.push_str(name);
        names.push('\0');
    }
    let size = (strings + names.len()) as u64;
    let mut elf = Vec::new();
    let half = |elf: &mut Vec<u8>, value: u16| elf.extend(value.to_le_bytes());
    let word = |elf: &mut Vec<u8>, value: u32| elf.extend(value.to_le_bytes());
    let long = |elf: &mut Vec<u8>, value: u64| elf.extend(value.to_le_bytes());

    // 64 bits, little-endian, version 1, System V.
    elf.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    // A shared object.
    half(&mut elf, 3);
    half(&mut elf, MACHINE);
    word(&mut elf, 1);
    // Entry point, segments, sections, flags.
    [0, HEADER as u64, 0].into_iter().for_each(|value| long(&mut elf, value));
    word(&mut elf, 0);
    // Sizes and counts: this header, segments, sections.
    for value in [HEADER, SEGMENT, SEGMENTS, 64, 0, 0] {
        half(&mut elf, value as u16);
    }

    // One writable data segment for everything; the dynamic section; a non-executable stack.
    let (load, dynamic_type, stack) = (1, 2, 0x6474_e551);
    let read_write = 6;
    for (kind, offset, length, alignment) in [
        (load, 0, size, ALIGNMENT),
        (dynamic_type, dynamic as u64, (ENTRIES * ENTRY) as u64, 8),
        (stack, 0, 0, 16),
    ] {
        word(&mut elf, kind);
        word(&mut elf, read_write);
        for value in [offset, offset, offset, length, length, alignment] {
            long(&mut elf, value);
        }
    }

    for (tag, value) in [
        (1, 1),                         // DT_NEEDED
        (14, 2 + library.len() as u64), // DT_SONAME
        (4, hash as u64),               // DT_HASH
        (5, strings as u64),            // DT_STRTAB
        (6, symbols as u64),            // DT_SYMTAB
        (10, names.len() as u64),       // DT_STRSZ
        (11, SYMBOL as u64),            // DT_SYMENT
        (0, 0),                         // DT_NULL
    ] {
        long(&mut elf, tag);
        long(&mut elf, value);
    }
    elf.extend([0; SYMBOL]);
    for ((_, address), name) in instead.iter().zip(offsets) {
        word(&mut elf, name as u32);
        // A global function, visible, at an absolute address.
        elf.extend([0x12, 0]);
        half(&mut elf, 0xfff1);
        long(&mut elf, *address as u64);
        long(&mut elf, 0);
    }
    // A hash table with one bucket, whose chain goes through all symbols.
    let first = u32::from(count > 1);
    [1, count as u32, first, 0].into_iter().for_each(|value| word(&mut elf, value));
    for symbol in 1..count as u32 {
        let next = if symbol + 1 < count as u32 { symbol + 1 } else { 0 };
        word(&mut elf, next);
    }
    elf.extend(names.bytes());
    elf
}

#[cfg(test)]
mod tests {
    use libloading::Library;

    /// The loader finds `libm` and its functions under a name that no file has.
    #[test]
    fn a_library_is_found_under_its_second_name() {
        let alias = "libkiln-second-name.so";
        // SAFETY: opens a library of the system by its name, and a library that does not exist.
        let (original, absent) = unsafe { (Library::new("libm.so.6"), Library::new(alias)) };
        let original = original.expect("the C library's mathematics");
        assert!(absent.is_err());
        super::give("libm.so.6", alias, &[]).expect("a second name");
        // SAFETY: as above; `cbrt` has this type.
        let root = unsafe {
            let library = Library::new(alias).expect("the second name");
            let cbrt = *library.get::<extern "C" fn(f64) -> f64>("cbrt").expect("a function");
            let same = *original.get::<extern "C" fn(f64) -> f64>("cbrt").expect("a function");
            assert_eq!(cbrt as usize, same as usize);
            cbrt(27.0)
        };
        assert!((root - 3.0).abs() < 1e-12, "{root}");
    }

    extern "C" fn third(of: f64) -> f64 {
        of / 3.0
    }

    extern "C" fn fourth(of: f64) -> f64 {
        of / 4.0
    }

    #[test]
    fn functions_replace_those_of_the_library() {
        let alias = "libkiln-other-functions.so";
        // SAFETY: opens a library of the system by its name.
        let original = unsafe { Library::new("libm.so.6") }.expect("mathematics");
        let instead = [("cbrt", third as *const () as usize), ("sqrt", fourth as *const () as usize)];
        super::give("libm.so.6", alias, &instead).expect("a second name");
        // SAFETY: as above; all of these functions have this type.
        unsafe {
            let library = Library::new(alias).expect("the second name");
            let call = |library: &Library, name: &str, of: f64| {
                library.get::<extern "C" fn(f64) -> f64>(name).expect("a function")(of)
            };
            assert_eq!([call(&library, "cbrt", 27.0), call(&library, "sqrt", 16.0)], [9.0, 4.0]);
            assert_eq!(call(&original, "cbrt", 27.0).round(), 3.0);
            assert_eq!(call(&library, "floor", 1.5), 1.0);
        }
    }
}
