use kiln_shard::{AdamW, AdjustLr, Muon};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) const ADAMW: &str = "adamw";

/// `optim.kind` of Muon for the matrices of blocks, with AdamW for all other parameters.
pub const MUON: &str = "muon";

/// Default of `optim.expert_bias_lr`, as in DeepSeek-V3.
const EXPERT_BIAS_LR: f64 = 1e-3;

/// Learning-rate schedules; all start with a linear warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Stays at `lr` to the end.
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
        /// Schedule of the learning rate.
        schedule: Schedule = Schedule::default(),
        /// Steps of linear warm-up.
        warmup_steps: u64 = 10,
        /// Steps of the final decay of `wsd`; a tenth of the run by default.
        decay_steps: Option<u64> = None,
        /// Final learning rate relative to `lr`.
        min_lr_ratio: f64 = 0.1,
        /// Decoupled weight decay of matrices and embeddings.
        weight_decay: f64 = 0.1,
        /// Decay of the first moment.
        beta1: f64 = 0.9,
        /// Decay of the second moment.
        beta2: f64 = 0.95,
        /// Added to the root of the second moment.
        eps: f64 = 1e-8,
        /// Maximum norm of the gradient; 0 for no clipping.
        grad_clip: f64 = 1.0,
        /// Step size of the biases that balance experts, with `model.moe.expert_bias`.
        #[serde(skip_serializing_if = "is_expert_bias_lr")]
        expert_bias_lr: f64 = EXPERT_BIAS_LR,
        /// Muon's own keys, for `kind = "muon"`; all others are those of AdamW.
        #[serde(skip_serializing_if = "Option::is_none")]
        muon: Option<MuonSection> = None,
        /// Groups of parameters with their own options. If several groups name a parameter, the last one that
        /// sets an option wins.
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
        /// Peak learning rate of the matrices; it follows the schedule of `optim.lr`.
        lr: f64 = 0.02,
        /// Share of the momentum that is kept in each step.
        momentum: f64 = 0.95,
        /// Blend gradient and momentum for the direction (Nesterov), instead of using momentum alone.
        nesterov: bool = true,
        /// Decoupled weight decay for matrix-shaped parameters.
        weight_decay: f64 = 0.1,
        /// Number of Newton–Schulz iterations.
        ns_steps: usize = 5,
        /// Adjustment of the learning rate to the shape of a matrix: `original` or `match_rms_adamw`.
        adjust_lr: AdjustLr = AdjustLr::default(),
    }
}

/// `[[optim.groups]]`: parameters with their own options.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OptimGroup {
    /// Full names of the parameters, in which `*` matches anything, as in `*norm.weight`.
    pub parameters: Vec<String>,
    /// Number of dimensions that the parameters must have, such as 2 for matrices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dims: Option<usize>,
    /// The optimizer's rule for these parameters, such as `adamw` if `optim.kind` is `muon`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Peak learning rate of these parameters; it follows the schedule of `optim.lr`, unless the group has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Decoupled weight decay of these parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Schedule of the learning rate of these parameters. Setting this or any of the next three keys gives the
    /// group its own schedule, whose unset keys take the values of `[optim]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// Linear warm-up steps of the group's schedule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// Final decay steps of the group's schedule, for `wsd`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// Final learning rate of the group's schedule relative to its peak.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_lr_ratio: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LrSchedule {
    pub(crate) schedule: Schedule,
    pub(crate) warmup_steps: u64,
    /// Steps of the final decay of `wsd`; a tenth of the run if `None`.
    pub(crate) decay_steps: Option<u64>,
    pub(crate) min_lr_ratio: f64,
}

impl OptimGroup {
    /// Returns the group's own schedule, with unset keys from `of_rest`; `None` if the group sets no key.
    pub(crate) fn lr_schedule(&self, of_rest: LrSchedule) -> Option<LrSchedule> {
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

    pub(super) fn has_no_option(&self) -> bool {
        let OptimGroup { parameters, dims, .. } = self.clone();
        *self == OptimGroup { parameters, dims, ..OptimGroup::default() }
    }
}

fn is_adamw(kind: &str) -> bool {
    kind == ADAMW
}

fn is_expert_bias_lr(rate: &f64) -> bool {
    *rate == EXPERT_BIAS_LR
}

impl OptimSection {
    pub(crate) fn lr_schedule(&self) -> LrSchedule {
        let OptimSection { schedule, warmup_steps, decay_steps, min_lr_ratio, .. } = *self;
        LrSchedule { schedule, warmup_steps, decay_steps, min_lr_ratio }
    }

    /// Returns the distinct schedules: first for `lr`, then for the groups, in order.
    pub(crate) fn lr_schedules(&self) -> Vec<LrSchedule> {
        let first = self.lr_schedule();
        let mut schedules = vec![first];
        for own in self.groups.iter().filter_map(|group| group.lr_schedule(first)) {
            if !schedules.contains(&own) {
                schedules.push(own);
            }
        }
        schedules
    }

    /// Returns the settings of AdamW.
    pub fn adamw(&self) -> AdamW {
        AdamW { beta1: self.beta1, beta2: self.beta2, epsilon: self.eps, weight_decay: self.weight_decay }
    }

    /// Returns the settings of Muon.
    pub fn muon(&self) -> Muon {
        let MuonSection { lr, momentum, nesterov, weight_decay, ns_steps, adjust_lr } =
            self.muon.clone().unwrap_or_default();
        let learning_rate = self.relative(lr);
        Muon { learning_rate, momentum, nesterov, weight_decay, ns_steps, adjust_lr, ..Muon::default() }
    }

    /// Returns the factor that turns a learning rate of `[optim]` into one whose peak is `lr`.
    pub fn relative(&self, lr: f64) -> f64 {
        if lr == self.lr { 1.0 } else { lr / self.lr }
    }
}
