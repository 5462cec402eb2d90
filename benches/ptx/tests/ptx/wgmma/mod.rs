//! Products of a warpgroup (`wgmma`), against plain sums.

mod products;
mod support;
