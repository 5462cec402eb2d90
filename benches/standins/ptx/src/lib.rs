//! Executes PTX on the CPU, for the stand-in of NVIDIA's driver (`benches/standins`), and checks kernels
//! while they run.
//!
//! [`module`] reads the text, a [`Launch`] executes a kernel of it. In the order of a launch's way:
//!
//! | module | what it has |
//! |---|---|
//! | `lexer`, `parse` | text to statements, with names of registers resolved |
//! | `decode`, `builder`, `arithmetic`, `movement` | statements to the instructions of `program` |
//! | `layout` | places for registers, of which the text has thousands |
//! | `grid`, `warp`, `lanes` | blocks, barriers, branches; 32 lanes side by side |
//! | `position` | which thread of a grid is which |
//! | `watch` | registers that are read before they are written |
//! | `alu`, `integers`, `float`, `conversion`, `matrix` | what computes |
//! | `access`, `moved`, `copies`, `fragments` | what reads and writes |
//! | `wgmma` | products of warpgroups |
//! | `memory` | what is allocated and has been written |
//! | `check`, `races` | who wrote and read what, when: in shared memory, in device memory |
//! | `streams`, `footprint` | asynchronous streams, and whether the order of what they do is safe |
//! | `plant` | bugs that tests put into kernels |
//! | `driver`, `stream_driver` | the functions that the stand-in calls |
//!
//! Floats are those of PTX's manual: f32 operations and conversions are exactly rounded, and so is what the
//! manual calls approximate, for which it states a bound. Differences from a GPU: sums of tensor cores (see
//! `matrix`), bits of what is no number, and the order of atomic additions.

mod access;
mod alu;
mod arithmetic;
mod builder;
mod check;
mod conversion;
mod copies;
mod decode;
mod driver;
mod error;
mod float;
mod footprint;
mod fragments;
mod grid;
mod integers;
mod lanes;
mod layout;
mod lexer;
mod matrix;
mod memory;
mod moved;
mod movement;
mod parse;
mod plant;
mod position;
mod program;
mod races;
mod stream_driver;
pub mod streams;
mod types;
mod warp;
mod watch;
mod wgmma;

pub use decode::{module, unknown};
pub use error::{Error, Fault, LaunchError, Other, ParseError, Space};
pub use footprint::Footprint;
pub use grid::{Checks, Launch, Options, Work};
pub use memory::DeviceMemory;
pub use program::{Kernel, Module};
