//! Warpgroup products (`wgmma`) compared with plain sums, and bugs planted into kernels with such products.

mod bugs;
mod products;
mod support;
