//! Products of a warpgroup (`wgmma`), against plain sums; and bugs that are planted in kernels which have
//! some.

mod bugs;
mod products;
mod support;
