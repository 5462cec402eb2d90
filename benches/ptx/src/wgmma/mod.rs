//! Hopper's products of a warpgroup: `wgmma`, of which a warpgroup of four warps executes one together, while it goes
//! on with other instructions.
//!
//! | module | what it has |
//! |---|---|
//! | `decode` | the forms that are known |
//! | `descriptor` | where a matrix is in shared memory |
//! | `product` | the product of a warp's 16 rows |

pub(crate) mod decode;
pub(crate) mod descriptor;
pub(crate) mod product;
