//! The binary `kiln`: the allocator, and the command line of the library.

use std::process::ExitCode;

use kiln::process::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    kiln::cli::main()
}
