//! The scale of the loss in runs that compute in `f16`.

use serde::{Deserialize, Serialize};

/// The factor by which the loss is multiplied before backward, so that small gradients do not vanish in `f16`
/// (Micikevicius et al., 2018). It is halved when a gradient overflows, in which case the update is skipped, and
/// doubled after 2000 updates without an overflow.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    /// The factor.
    pub scale: f64,
    /// Number of updates since the factor was changed.
    pub steps: u64,
}

#[cfg(feature = "cube")]
impl LossScale {
    /// No scaling.
    pub(crate) const NONE: LossScale = LossScale { scale: 1.0, steps: 0 };
}

impl Default for LossScale {
    /// Returns the initial scale of a run.
    fn default() -> Self {
        LossScale { scale: 65_536.0, steps: 0 }
    }
}
