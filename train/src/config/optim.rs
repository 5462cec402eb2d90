//! The section `[optim]`: the optimizer, its schedule, and parameters with options of their own.

use kiln_shard::{AdamW, AdjustLr, Muon};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `optim.kind` of AdamW, for all parameters.
pub const ADAMW: &str = "adamw";

/// `optim.kind` of Muon for the matrices of blocks, with AdamW for the rest.
pub const MUON: &str = "muon";

/// `optim.expert_bias_lr`, as in DeepSeek-V3.
const EXPERT_BIAS_LR: f64 = 1e-3;

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
        /// What the biases that balance experts, with `model.moe.expert_bias`, move by in a step.
        #[serde(skip_serializing_if = "is_expert_bias_lr")]
        expert_bias_lr: f64 = EXPERT_BIAS_LR,
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
    /// Their peak learning rate; it moves as `optim.lr` does, unless they have a schedule of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Their decoupled weight decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// How their learning rate moves. With any of this and the next three they have a schedule of their own, in
    /// which what is left out is that of `[optim]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// Steps of its linear warm-up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// Steps of its final decay, for `wsd`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// Its final learning rate over the peak.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_lr_ratio: Option<f64>,
}

/// How a learning rate moves over the steps of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    /// Its kind.
    pub schedule: Schedule,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// Steps of the final decay of `wsd`; a tenth of the run if there is none.
    pub decay_steps: Option<u64>,
    /// Final learning rate over the peak.
    pub min_lr_ratio: f64,
}

impl OptimGroup {
    /// The schedule of these parameters, if they have one of their own. `of_rest` is that of `[optim]`.
    pub fn lr_schedule(&self, of_rest: LrSchedule) -> Option<LrSchedule> {
        let OptimGroup { schedule, warmup_steps, decay_steps, min_lr_ratio, .. } = *self;
        let is_own =
            schedule.is_some() || warmup_steps.is_some() || decay_steps.is_some() || min_lr_ratio.is_some();
        is_own.then(|| LrSchedule {
            schedule: schedule.unwrap_or(of_rest.schedule),
            warmup_steps: warmup_steps.unwrap_or(of_rest.warmup_steps),
            decay_steps: decay_steps.or(of_rest.decay_steps),
            min_lr_ratio: min_lr_ratio.unwrap_or(of_rest.min_lr_ratio),
        })
    }
}

impl OptimGroup {
    /// Whether it names parameters and says nothing of them.
    pub(super) fn has_no_option(&self) -> bool {
        let OptimGroup { parameters, dims, .. } = self.clone();
        *self == OptimGroup { parameters, dims, ..OptimGroup::default() }
    }
}

/// Whether a kind need not be written out.
fn is_adamw(kind: &str) -> bool {
    kind == ADAMW
}

/// Whether the rate of biases need not be written out.
fn is_expert_bias_lr(rate: &f64) -> bool {
    *rate == EXPERT_BIAS_LR
}

impl OptimSection {
    /// The schedule of `lr`.
    pub fn lr_schedule(&self) -> LrSchedule {
        let OptimSection { schedule, warmup_steps, decay_steps, min_lr_ratio, .. } = *self;
        LrSchedule { schedule, warmup_steps, decay_steps, min_lr_ratio }
    }

    /// All schedules of the run, each once: that of `lr`, then those of groups, in their order.
    pub fn lr_schedules(&self) -> Vec<LrSchedule> {
        let first = self.lr_schedule();
        let mut schedules = vec![first];
        for own in self.groups.iter().filter_map(|group| group.lr_schedule(first)) {
            if !schedules.contains(&own) {
                schedules.push(own);
            }
        }
        schedules
    }

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
