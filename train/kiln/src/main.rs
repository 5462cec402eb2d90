//! The binary `kiln`: the allocator, and the command line of the library.

use std::process::ExitCode;

use kiln::registry::Registry;

kiln::allocator!();

fn main() -> ExitCode {
    kiln::cli::main(Registry::default())
}
