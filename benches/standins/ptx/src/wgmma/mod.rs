//! Hopper's warpgroup products: `wgmma`, which the four warps of a warpgroup execute together while they
//! continue with other instructions.
//!
//! | module | contents |
//! |---|---|
//! | `form`, `decode` | the supported forms |
//! | `descriptor` | the location of a matrix in shared memory |
//! | `product` | the product of a warp's 16 rows |
//! | `pipeline` | the registers that products use until they are waited for |
//! | `reads` | the shared memory that they read meanwhile |
//! | `alike` | whether the four warps execute the same instructions |

pub(crate) mod alike;
pub(crate) mod decode;
pub(crate) mod descriptor;
pub(crate) mod form;
pub(crate) mod pipeline;
pub(crate) mod product;
pub(crate) mod reads;
