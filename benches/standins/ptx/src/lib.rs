//! Executes PTX on the CPU for the stand-in of NVIDIA's driver (`benches/standins`), and checks kernels while
//! they run.
//!
//! [`module`] reads the text, and a [`Launch`] executes one of its kernels. In the order in which a launch
//! uses them:
//!
//! | module | contents |
//! |---|---|
//! | `lexer`, `parse` | text to statements, with names of registers resolved |
//! | `decode`, `builder`, `arithmetic`, `movement` | statements to the instructions of `program` |
//! | `layout` | places for registers, of which the text has thousands |
//! | `grid`, `warp`, `lanes` | blocks, barriers, branches; 32 lanes in a row |
//! | `position` | the place of a thread in its grid |
//! | `watch` | registers that are read before they are written |
//! | `alu`, `integers`, `float`, `conversion`, `matrix` | arithmetic |
//! | `access`, `moved`, `copies`, `fragments` | reads and writes of memory |
//! | `wgmma`, `warpgroup` | products of warpgroups; their execution |
//! | `memory` | allocated and written bytes |
//! | `check`, `races` | books of reads and writes: in shared memory, in device memory |
//! | `streams`, `footprint` | asynchronous streams, and the safety of the order of their operations |
//! | `plant` | bugs that tests put into kernels |
//! | `driver`, `stream_driver` | the functions that the stand-in calls |
//!
//! Floats follow PTX's manual: f32 operations and conversions are exactly rounded, including those that the
//! manual calls approximate and for which it states a bound. Differences from a GPU: sums of tensor cores
//! (see `matrix`), the bits of NaN, and the order of atomic additions.

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
mod warpgroup;
mod watch;
mod wgmma;

pub use decode::{module, unknown};
pub use error::{Error, Fault, LaunchError, Other, ParseError, Space};
pub use footprint::Footprint;
pub use grid::{Checks, Launch, Options, Work};
pub use memory::DeviceMemory;
pub use program::{Kernel, Module};
