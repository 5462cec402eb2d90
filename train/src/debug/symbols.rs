//! Names of functions of another process, found in the files that it has mapped: nothing of it is done by that
//! process, which has work and a limit of memory of its own.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::PathBuf;

use rustc_demangle::demangle;

/// The functions of a process.
pub(super) struct Symbols {
    mappings: Vec<Mapping>,
    files: HashMap<PathBuf, Option<Elf>>,
}

/// A part of a file in the memory of the process.
struct Mapping {
    addresses: Range<u64>,
    /// Where it begins in the file.
    offset: u64,
    path: PathBuf,
}

/// A program or library of 64 bits, little end first.
struct Elf {
    bytes: Vec<u8>,
    /// Parts that are loaded: where they are in the file, and their first address.
    loaded: Vec<(Range<u64>, u64)>,
    /// Functions by their address, each with its size and the place of its name.
    functions: Vec<(u64, u64, usize)>,
}

impl Symbols {
    /// Those of process `pid` of this machine.
    pub(super) fn of(pid: i32) -> Self {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        // A program that was built again since is still there by this name.
        let program = PathBuf::from(format!("/proc/{pid}/exe"));
        let itself = fs::read_link(&program).unwrap_or_default();
        let mapping = |line: &str| {
            let mut words = line.split_whitespace();
            let (begin, end) = words.next()?.split_once('-')?;
            let offset = words.nth(1)?;
            let path = PathBuf::from(line.get(line.find('/')?..)?);
            let number = |text| u64::from_str_radix(text, 16).ok();
            let path = if path == itself { program.clone() } else { path };
            Some(Mapping { addresses: number(begin)?..number(end)?, offset: number(offset)?, path })
        };
        Symbols { mappings: maps.lines().filter_map(mapping).collect(), files: HashMap::new() }
    }

    /// The function at an address; if there is no name for it, the address, and the file that it is in.
    pub(super) fn name(&mut self, address: u64) -> String {
        let Some(mapping) = self.mappings.iter().find(|mapping| mapping.addresses.contains(&address)) else {
            return format!("{address:#x}");
        };
        let file = mapping.path.file_name().unwrap_or_default().display().to_string();
        self.find(address).unwrap_or_else(|| format!("{address:#x} in {file}"))
    }

    fn find(&mut self, address: u64) -> Option<String> {
        let mapping = self.mappings.iter().find(|mapping| mapping.addresses.contains(&address))?;
        let place = address - mapping.addresses.start + mapping.offset;
        let read = || Elf::read(fs::read(&mapping.path).ok()?);
        let file = self.files.entry(mapping.path.clone()).or_insert_with(read).as_ref()?;
        Some(format!("{:#}", demangle(file.function_at(place)?)))
    }
}

impl Elf {
    fn read(bytes: Vec<u8>) -> Option<Self> {
        /// Kinds of entries in the file.
        const LOADED: u64 = 1;
        const ALL_SYMBOLS: u64 = 2;
        const SYMBOLS_FOR_OTHERS: u64 = 11;
        if bytes.get(..6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let at = |place: u64, size: usize| number(&bytes, place, size);
        let table = |begin: u64, size: u64, count: u64| (0..count).map(move |index| begin + index * size);
        let mut loaded = Vec::new();
        for entry in table(at(32, 8)?, at(54, 2)?, at(56, 2)?) {
            if at(entry, 4)? == LOADED {
                let (offset, address, size) = (at(entry + 8, 8)?, at(entry + 16, 8)?, at(entry + 32, 8)?);
                loaded.push((offset..offset.checked_add(size)?, address));
            }
        }
        let (sections, size) = (at(40, 8)?, at(58, 2)?);
        let all: Vec<u64> = table(sections, size, at(60, 2)?).collect();
        let of_kind = |kind| all.iter().copied().find(|section| at(section + 4, 4) == Some(kind));
        let symbols = of_kind(ALL_SYMBOLS).or_else(|| of_kind(SYMBOLS_FOR_OTHERS))?;
        let names = at(sections + at(symbols + 40, 4)? * size + 24, 8)?;
        let (begin, each) = (at(symbols + 24, 8)?, at(symbols + 56, 8)?.max(1));
        let mut functions = Vec::new();
        for entry in table(begin, each, at(symbols + 32, 8)? / each) {
            // Functions, and those that are chosen when the program starts, if they are in this file.
            if matches!(at(entry + 4, 1)? & 0xf, 2 | 10) && at(entry + 6, 2)? != 0 {
                let name = usize::try_from(names + at(entry, 4)?).ok()?;
                functions.push((at(entry + 8, 8)?, at(entry + 16, 8)?, name));
            }
        }
        functions.sort_unstable();
        Some(Elf { bytes, loaded, functions })
    }

    /// The name of the function at a place in the file.
    fn function_at(&self, place: u64) -> Option<&str> {
        let (part, first) = self.loaded.iter().find(|(part, _)| part.contains(&place))?;
        let address = place - part.start + first;
        let after = self.functions.partition_point(|(begin, ..)| *begin <= address);
        let (begin, size, name) = *self.functions.get(after.checked_sub(1)?)?;
        // Between functions that a library tells of are others that it does not. What was written by hand, in
        // assembler, may have no size.
        if size > 0 && address - begin >= size {
            return None;
        }
        let name = self.bytes.get(name..)?;
        std::str::from_utf8(&name[..name.iter().position(|byte| *byte == 0)?]).ok()
    }
}

/// The number of `size` bytes at a place.
fn number(bytes: &[u8], place: u64, size: usize) -> Option<u64> {
    let place = usize::try_from(place).ok()?;
    let bytes = bytes.get(place..place.checked_add(size)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_a_process_are_found_by_their_addresses() {
        let pid = std::process::id().cast_signed();
        let mut symbols = Symbols::of(pid);
        let name = symbols.name(super::number as *const () as u64);
        assert!(name.ends_with("debug::symbols::number"), "{name}");
        assert_eq!(symbols.name(0), "0x0");
        assert_eq!(Symbols::of(-1).name(17), "0x11");
    }

    #[test]
    fn files_that_are_no_programs_have_no_functions() {
        let own = fs::read("/proc/self/exe").unwrap();
        assert!(Elf::read(own.clone()).is_some());
        for length in [0, 5, 6, 40, 63, 64, 200, own.len() / 2] {
            assert!(Elf::read(own[..length].to_vec()).is_none(), "{length}");
        }
        assert!(Elf::read(vec![0xff; 4096]).is_none());
    }
}
