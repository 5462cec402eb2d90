use kiln_shard::Policy;

use super::choice::Choice;
use super::optim::MUON;
use super::schema::{Config, Precision, PrecisionSection};

/// Defaults that suit a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceDefaults {
    /// Dtype of computation.
    pub precision: Precision,
    /// Tokens per micro-batch that keep the whole device busy.
    pub tokens: usize,
}

impl DeviceDefaults {
    /// Defaults for a CPU whose instructions are not known yet.
    pub const CPU: DeviceDefaults = DeviceDefaults { precision: Precision::F32, tokens: 2048 };

    /// Tokens per micro-batch on a GPU.
    pub const GPU_TOKENS: usize = 16_384;
}

impl PrecisionSection {
    /// Returns the dtype of computation; the CPU's default if it is not settled yet.
    pub fn compute(&self) -> Precision {
        match self.compute {
            Choice::Is(precision) => precision,
            Choice::Auto => DeviceDefaults::CPU.precision,
        }
    }
}

impl Config {
    /// Returns the sharding policy of the configuration.
    pub fn policy(&self) -> Policy {
        Policy {
            strategy: self.shard.strategy,
            reshard: self.shard.reshard,
            recompute: self.shard.recompute(),
            accumulate: self.shard.accumulate(),
            compute_dtype: self.precision.compute().into(),
            reduce_dtype: self.precision.reduce.into(),
            offload: self.shard.offload,
            timeout: self.comm.timeout(),
            communicate_alone: self.shard.communicate_alone,
        }
    }

    /// Returns the sequences per micro-batch; the CPU's default if it is not settled yet.
    pub fn micro_batch(&self) -> usize {
        match self.train.micro_batch {
            Choice::Is(rows) => rows,
            Choice::Auto => self.rows_of(DeviceDefaults::CPU.tokens),
        }
    }

    /// Replaces `auto` and unset values. Returns the values that depend on the device, as lines of a configuration.
    pub fn settle(&mut self, defaults: DeviceDefaults) -> Vec<String> {
        if self.optim.kind == MUON {
            // So that the run folder records Muon's settings.
            self.optim.muon.get_or_insert_default();
        }
        let mut settled = Vec::new();
        if self.precision.compute == Choice::Auto {
            let precision = match defaults.precision {
                Precision::F16 if !self.can_scale_losses() => Precision::F32,
                precision => precision,
            };
            self.precision.compute = precision.into();
            settled.push(format!("precision.compute = \"{precision}\""));
        }
        if self.train.micro_batch == Choice::Auto {
            let rows = self.rows_of(defaults.tokens);
            self.train.micro_batch = rows.into();
            settled.push(format!("train.micro_batch = {rows}"));
        }
        settled
    }

    /// Returns whether the configuration allows f16, which needs a loss scale.
    fn can_scale_losses(&self) -> bool {
        !self.shard.offload && !self.has_expert_bias()
    }

    /// Shortens warm-ups that are longer than the run to its length. Returns a message if any was shortened.
    pub fn shorten_warm_up(&mut self) -> Option<String> {
        let (steps, optim) = (self.train.steps, &mut self.optim);
        let groups = optim.groups.iter_mut().filter_map(|group| group.warmup_steps.as_mut());
        let mut longest = 0;
        for warm_up in std::iter::once(&mut optim.warmup_steps).chain(groups) {
            longest = longest.max(*warm_up);
            *warm_up = steps.min(*warm_up);
        }
        (longest > steps).then(|| {
            format!("the warm-up of {longest} steps is longer than the run: it is shortened to {steps} steps")
        })
    }

    /// Returns the largest divisor of a rank's batch, in sequences, with at most `tokens` tokens; at least 1.
    pub fn rows_of(&self, tokens: usize) -> usize {
        let per_rank = self.train.global_batch / self.train.ranks.max(1);
        let most = (tokens / self.data.seq_len.max(1)).min(per_rank);
        (1..=most).rev().find(|rows| per_rank.is_multiple_of(*rows)).unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use kiln_shard::{Accumulate, Recompute, Strategy};

    use super::*;

    const GPU: DeviceDefaults = DeviceDefaults { precision: Precision::Bf16, tokens: 16_384 };

    fn config(text: &str) -> Config {
        toml::from_str(text).expect("a configuration")
    }

    #[test]
    fn open_values_follow_the_device() {
        let open = "[data]\nseq_len = 512\n[train]\nmicro_batch = \"auto\"\nglobal_batch = 96\n\
                    [precision]\ncompute = \"auto\"\n";
        let asked = config(open);
        let (mut cpu, mut gpu) = (asked.clone(), asked.clone());
        assert_eq!(cpu.settle(DeviceDefaults::CPU), ["precision.compute = \"f32\"", "train.micro_batch = 4"]);
        assert_eq!(gpu.settle(GPU), ["precision.compute = \"bf16\"", "train.micro_batch = 32"]);
        assert_eq!((asked.micro_batch(), asked.precision.compute()), (4, Precision::F32));
        for config in [&asked, &gpu] {
            let text = toml::to_string(config).expect("TOML");
            assert_eq!(&self::config(&text), config);
        }
        assert_eq!(gpu.clone().settle(DeviceDefaults::CPU), [""; 0]);
        assert_eq!((gpu.micro_batch(), gpu.precision.compute()), (32, Precision::Bf16));
    }

    #[test]
    fn accumulation_follows_the_strategy() {
        let of = |text: &str| config(text).policy().accumulate;
        assert_eq!(of(""), Accumulate::Sharded);
        for strategy in Strategy::ALL {
            let expected =
                if strategy == Strategy::NoShard { Accumulate::Unsharded } else { Accumulate::Sharded };
            assert_eq!(of(&format!("[shard]\nstrategy = '{strategy}'")), expected);
            for set in [Accumulate::Sharded, Accumulate::Unsharded] {
                let text = format!("[shard]\nstrategy = '{strategy}'\naccumulate = '{set}'");
                assert_eq!(of(&text), set, "{strategy}");
            }
        }
    }

    #[test]
    fn recomputation_is_a_name_a_table_or_auto() {
        let of = |value: &str| config(&format!("[shard]\nrecompute = {value}")).shard.recompute;
        let every = Recompute::Every(NonZeroUsize::MIN.saturating_add(1));
        let all = [
            ("'none'", Choice::Is(Recompute::None)),
            ("'selective'", Choice::Is(Recompute::Selective)),
            ("'block'", Choice::Is(Recompute::Block)),
            ("{ every = 2 }", Choice::Is(every)),
            ("'auto'", Choice::Auto),
        ];
        for (value, expected) in all {
            assert_eq!(of(value), expected, "{value}");
            let mut written = config("");
            written.shard.recompute = expected;
            let text = toml::to_string(&written).expect("TOML");
            assert_eq!(self::config(&text).shard.recompute, expected, "{text}");
        }
        assert_eq!(config("").shard.recompute, Choice::Is(Recompute::None));
        assert_eq!([0, 1, 2].map(|block| every.repeats(block)), [true, false, true]);
        let wrong = toml::from_str::<Config>("[shard]\nrecompute = { every = 0 }").expect_err("refused");
        assert!(wrong.to_string().contains("nonzero") || wrong.to_string().contains("non-zero"), "{wrong}");
    }

    #[test]
    fn f16_is_chosen_where_allowed() {
        let old = DeviceDefaults { precision: Precision::F16, ..GPU };
        let open = "[precision]\ncompute = \"auto\"\n";
        for (more, precision) in [
            ("", Precision::F16),
            ("[shard]\noffload = true\n", Precision::F32),
            ("[model.moe]\nexpert_bias = true\n", Precision::F32),
            ("[model.moe]\nexpert_bias = false\n", Precision::F16),
        ] {
            let mut config = config(&format!("{open}{more}"));
            let line = format!("precision.compute = \"{precision}\"");
            assert!(config.settle(old).contains(&line), "{more}");
            assert_eq!(config.precision.compute(), precision, "{more}");
            let mut problems = Vec::new();
            config.check_precision(&mut problems);
            assert_eq!(problems, [""; 0], "{more}");
        }
    }

    #[test]
    fn micro_batches_divide_the_rank_batch() {
        let mut config = config("[data]\nseq_len = 512\n");
        let mut rows = |global_batch, ranks| {
            (config.train.global_batch, config.train.ranks) = (global_batch, ranks);
            config.rows_of(GPU.tokens)
        };
        assert_eq!([rows(64, 1), rows(64, 4), rows(30, 2), rows(62, 1)], [32, 16, 15, 31]);
        assert_eq!([rows(37, 1), rows(1, 8), rows(usize::MAX - 1, 1)], [1, 1, 14]);
        config.data.seq_len = 1 << 20;
        assert_eq!(config.rows_of(GPU.tokens), 1);
    }

    #[test]
    fn wrong_values_name_the_expected_type() {
        let problem = |text: &str| toml::from_str::<Config>(text).expect_err("refused").to_string();
        let dtype = problem("[precision]\ncompute = \"f8\"");
        assert!(dtype.contains("unknown variant `f8`, expected one of `f32`, `bf16`"), "{dtype}");
        let rows = problem("[train]\nmicro_batch = \"many\"");
        assert!(rows.contains("string \"many\", expected usize"), "{rows}");
    }
}
