//! The interpreter: instructions compared with independent computations of PTX's manual, and bugs planted
//! into kernels, each of which must be found in its line.

mod bugs;
mod control;
mod conversions;
mod exact;
mod floats;
mod integers;
mod matrices;
mod memory;
mod orders;
mod stream_setup;
mod streams;
mod support;
mod wgmma;
