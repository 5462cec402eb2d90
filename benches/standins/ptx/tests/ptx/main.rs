//! The interpreter: instructions against what PTX's manual says of them, computed in other ways; and bugs
//! that are planted in kernels, each of which has to be found in its line.

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
