//! Execution of [`wgmma`](crate::wgmma).
//!
//! | module | contents |
//! |---|---|
//! | `decode` | the instructions |
//! | `product` | the product of a warp's 16 rows |
//! | `pipeline` | the registers that products use until they are waited for |

pub(crate) mod decode;
pub(crate) mod pipeline;
pub(crate) mod product;
