//! The scale of the loss of runs that compute in `f16`.

use serde::{Deserialize, Serialize};

/// What the loss is multiplied by before backward, so that small gradients are not lost in `f16`
/// (Micikevicius et al., 2018): halved when a gradient overflows, which leaves the update out, and
/// doubled after 2000 updates without that.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    /// The factor.
    pub scale: f64,
    /// Updates since it was changed.
    pub steps: u64,
}

#[cfg(feature = "cube")]
impl LossScale {
    /// No scaling.
    pub(crate) const NONE: LossScale = LossScale { scale: 1.0, steps: 0 };
}

impl Default for LossScale {
    /// Where a run starts.
    fn default() -> Self {
        LossScale { scale: 65_536.0, steps: 0 }
    }
}
