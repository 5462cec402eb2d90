//! The section `[optim]`: the optimizer, its schedule, and parameters with options of their own.

use kiln_shard::{AdamW, AdjustLr, Muon};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `optim.kind` of AdamW, for all parameters.
pub const ADAMW: &str = "adamw";

/// `optim.kind` of Muon for the matrices of blocks, with AdamW for the rest.
pub const MUON: &str = "muon";

/// Learning-rate schedules; all start with a linear warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// `lr` to the end.
    Constant,
    /// Half a cosine from `lr` to `lr * min_lr_ratio` (Loshchilov and Hutter, 2017).
    #[default]
    Cosine,
    /// Warm-up, stable, decay: `lr` until the last `decay_steps`, then linearly to
    /// `lr * min_lr_ratio` (Hu et al., 2024).
    Wsd,
}

section! {
    /// `[optim]`: the optimizer and its schedule.
    OptimSection {
        /// `adamw`, `muon`, or an optimizer that the program adds.
        #[serde(skip_serializing_if = "is_adamw")]
        kind: String = ADAMW.to_owned(),
        /// Peak learning rate.
        lr: f64 = 1e-3,
        /// How the learning rate moves.
        schedule: Schedule = Schedule::default(),
        /// Steps of linear warm-up.
        warmup_steps: u64 = 10,
        /// Steps of the final decay of `wsd`; a tenth of the run if left out.
        decay_steps: Option<u64> = None,
        /// Final learning rate over `lr`.
        min_lr_ratio: f64 = 0.1,
        /// Decoupled weight decay of matrices and embeddings.
        weight_decay: f64 = 0.1,
        /// Decay of the first moment.
        beta1: f64 = 0.9,
        /// Decay of the second moment.
        beta2: f64 = 0.95,
        /// Added to the root of the second moment.
        eps: f64 = 1e-8,
        /// Largest norm of the gradient; 0 for no clipping.
        grad_clip: f64 = 1.0,
        /// Muon's own keys, for `kind = "muon"`; the others are those of AdamW.
        #[serde(skip_serializing_if = "Option::is_none")]
        muon: Option<MuonSection> = None,
        /// Parameters with options of their own. Where several groups name a parameter, the last that has an
        /// option counts.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        groups: Vec<OptimGroup> = Vec::new(),
        /// Settings of an optimizer that the program adds.
        #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
        extra: serde_json::Map<String, serde_json::Value> = serde_json::Map::new(),
    }
}

section! {
    /// `[optim.muon]`: Muon for the matrices of blocks.
    MuonSection {
        /// Peak learning rate of the matrices; it moves as `optim.lr` does.
        lr: f64 = 0.02,
        /// Share of the momentum that stays in a step.
        momentum: f64 = 0.95,
        /// Whether the direction blends gradient and momentum, or is momentum alone.
        nesterov: bool = true,
        /// Decoupled weight decay.
        weight_decay: f64 = 0.1,
        /// Newton–Schulz iterations.
        ns_steps: usize = 5,
        /// How the learning rate goes by the shape of a matrix: `original` or `match_rms_adamw`.
        adjust_lr: AdjustLr = AdjustLr::default(),
    }
}

/// `[[optim.groups]]`: parameters with options of their own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OptimGroup {
    /// Their full names, in which `*` stands for anything, as in `*norm.weight`.
    pub parameters: Vec<String>,
    /// Only those with so many dimensions, such as 2 for matrices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dims: Option<usize>,
    /// Which rule of the optimizer updates them, such as `adamw` where `optim.kind` is `muon`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Their peak learning rate; it moves as `optim.lr` does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Their decoupled weight decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

/// Whether a kind need not be written out.
fn is_adamw(kind: &str) -> bool {
    kind == ADAMW
}

impl OptimSection {
    /// The settings of AdamW.
    pub fn adamw(&self) -> AdamW {
        AdamW { beta1: self.beta1, beta2: self.beta2, epsilon: self.eps, weight_decay: self.weight_decay }
    }

    /// The settings of Muon.
    pub fn muon(&self) -> Muon {
        let MuonSection { lr, momentum, nesterov, weight_decay, ns_steps, adjust_lr } =
            self.muon.clone().unwrap_or_default();
        let learning_rate = self.relative(lr);
        Muon { learning_rate, momentum, nesterov, weight_decay, ns_steps, adjust_lr, ..Muon::default() }
    }

    /// What the learning rate of a step is multiplied by, so that its peak is `lr`.
    pub fn relative(&self, lr: f64) -> f64 {
        if lr == self.lr { 1.0 } else { lr / self.lr }
    }
}
