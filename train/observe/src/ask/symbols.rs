//! Finds names of functions in the files that another process has mapped, without work for that process.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::PathBuf;

use kiln_sys::files;
use object::{File, Object, ObjectSegment, ObjectSymbol, Segment, Symbol, SymbolKind};
use rustc_demangle::demangle;

/// The functions of a process.
pub struct Symbols {
    mappings: Vec<Mapping>,
    files: HashMap<PathBuf, Option<Functions>>,
}

struct Mapping {
    addresses: Range<u64>,
    offset: u64,
    path: PathBuf,
}

struct Functions {
    /// File ranges of loaded segments, each with its first address.
    loaded: Vec<(Range<u64>, u64)>,
    functions: Vec<(u64, u64, String)>,
}

impl Symbols {
    /// Reads the mappings of process `pid`.
    pub fn of(pid: i32) -> Self {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        // Still refers to the running program after a rebuild.
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

    /// Returns the name of the function at `address`, or the address and its file.
    pub fn name(&mut self, address: u64) -> String {
        let Some(mapping) = self.mappings.iter().find(|mapping| mapping.addresses.contains(&address)) else {
            return format!("{address:#x}");
        };
        let read = || Functions::read(&files::read(&mapping.path, files::MAX_WHOLE).ok()?);
        let functions = self.files.entry(mapping.path.clone()).or_insert_with(read).as_ref();
        let place = (address - mapping.addresses.start).checked_add(mapping.offset);
        match place.and_then(|place| functions?.at(place)) {
            Some(name) => format!("{:#}", demangle(name)),
            None => format!("{address:#x} in {}", mapping.path.file_name().unwrap_or_default().display()),
        }
    }
}

impl Functions {
    fn read(bytes: &[u8]) -> Option<Self> {
        let file = File::parse(bytes).ok()?;
        let part = |segment: Segment<'_, '_>| {
            let (offset, size) = segment.file_range();
            Some((offset..offset.checked_add(size)?, segment.address()))
        };
        let loaded = file.segments().filter_map(part).collect();
        let function = |symbol: Symbol<'_, '_>| {
            let is_one = symbol.kind() == SymbolKind::Text && symbol.is_definition();
            is_one.then(|| Some((symbol.address(), symbol.size(), symbol.name().ok()?.to_owned())))?
        };
        let mut functions: Vec<_> = file.symbols().filter_map(function).collect();
        if functions.is_empty() {
            // Stripped libraries still have the functions that they export.
            functions.extend(file.dynamic_symbols().filter_map(function));
        }
        functions.sort_unstable();
        Some(Functions { loaded, functions })
    }

    fn at(&self, place: u64) -> Option<&str> {
        let (part, first) = self.loaded.iter().find(|(part, _)| part.contains(&place))?;
        let address = (place - part.start).checked_add(*first)?;
        let after = self.functions.partition_point(|(begin, ..)| *begin <= address);
        let (begin, size, name) = self.functions.get(after.checked_sub(1)?)?;
        // Functions that are not exported lie between exported ones. Assembler functions may have no size.
        (*size == 0 || address - begin < *size).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(never)]
    fn a_function(count: usize) -> usize {
        std::hint::black_box(count) + 17
    }

    #[test]
    fn addresses_are_named_by_function() {
        let pid = std::process::id().cast_signed();
        let mut symbols = Symbols::of(pid);
        let name = symbols.name(a_function as *const () as u64);
        assert!(name.ends_with("ask::symbols::tests::a_function"), "{name}");
        assert_eq!(symbols.name(0), "0x0");
        assert_eq!(Symbols::of(-1).name(17), "0x11");
    }

    #[test]
    fn files_that_are_not_programs_have_no_functions() {
        let own = fs::read("/proc/self/exe").unwrap();
        assert!(Functions::read(&own).is_some());
        for length in [0, 5, 6, 40, 63, 64, 200, own.len() / 2] {
            assert!(Functions::read(&own[..length]).is_none(), "{length}");
        }
        assert!(Functions::read(&[0xff; 4096]).is_none());
    }
}
