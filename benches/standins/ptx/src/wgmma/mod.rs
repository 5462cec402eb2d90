//! Hopper's products of a warpgroup: `wgmma`, of which a warpgroup of four warps executes one together, while
//! it goes on with other instructions.
//!
//! | module | what it has |
//! |---|---|
//! | `form`, `decode` | the forms that are known |
//! | `descriptor` | where a matrix is in shared memory |
//! | `product` | the product of a warp's 16 rows |
//! | `pipeline` | which registers products use until they are waited for |
//! | `reads` | what of shared memory they read meanwhile |
//! | `alike` | whether the four warps do the same |

pub(crate) mod alike;
pub(crate) mod decode;
pub(crate) mod descriptor;
pub(crate) mod form;
pub(crate) mod pipeline;
pub(crate) mod product;
pub(crate) mod reads;
