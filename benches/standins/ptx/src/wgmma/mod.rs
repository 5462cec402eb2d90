//! Hopper's warpgroup products: `wgmma`, which the four warps of a warpgroup execute together while they
//! continue with other instructions. `warpgroup` executes them.
//!
//! | module | contents |
//! |---|---|
//! | `form` | the supported forms |
//! | `descriptor` | the location of a matrix in shared memory |
//! | `reads` | the shared memory that products read |
//! | `alike` | whether the four warps execute the same instructions |

pub(crate) mod alike;
pub(crate) mod descriptor;
pub(crate) mod form;
pub(crate) mod reads;
