//! The binary `kiln`: the allocator, and the command line of the library.

use std::process::ExitCode;

use kiln::process::CountingAllocator;
use kiln::registry::Registry;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    kiln::cli::main(Registry::default())
}
