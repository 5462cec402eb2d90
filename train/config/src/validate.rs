//! Checks of a whole configuration, before any work starts.
//!
//! The limits are far beyond any real run, yet prevent overflow and endless loops, and catch typos.

use std::iter;
use std::ops::RangeInclusive;
use std::path::Path;

use kiln_model::ModelConfig;
use kiln_shard::Mesh;

use crate::device::{DeviceError, cores, cores_of_machine};
use kiln_data::VOCABULARY_MINIMUM;
use kiln_launch::place::{MAX_RANKS, MAX_RANKS_PER_NODE};

use super::trained::Frozen;
use super::{
    Backend, CROSS_ENTROPY, Choice, CommBackend, CommSection, Config, ConfigError, DataSection, EventFolder,
    LrSchedule, MUON, MuonSection, OptimSection, Precision,
};

/// Maximum number of optimizer steps. With [`MAX_BATCH`], positions in the data fit into 64 bits.
const MAX_STEPS: u64 = 1_000_000_000_000;

const MAX_BATCH: usize = 10_000_000;

const MAX_SEQ_LEN: usize = 10_000_000;

/// Models from Hugging Face have longer contexts than runs train on.
const MAX_CONTEXT: u64 = 1 << 40;

const MAX_NS_STEPS: u64 = 100;

const MAX_THREADS: usize = 4096;

type Range = (&'static str, fn(f64) -> bool);

const POSITIVE: Range = ("positive and finite", |value| value > 0.0 && value.is_finite());
const FROM_0: Range = ("zero or more, and finite", |value| value >= 0.0 && value.is_finite());
const FROM_0_TO_1: Range = ("between 0 and 1", |value| (0.0..=1.0).contains(&value));
const BETWEEN_0_AND_1: Range = ("above 0 and below 1", |value| value > 0.0 && value < 1.0);
const SHARE: Range = ("above 0 and at most 1", |value| value > 0.0 && value <= 1.0);
const DECAY: Range = ("in [0, 1)", |value| (0.0..1.0).contains(&value));
const SECONDS: Range = ("above 0 and below 1e9, in seconds", |value| value > 0.0 && value < 1e9);

impl Config {
    /// Checks every value that can be checked without the data, and reports all problems at once.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check(Vec::new())
    }

    /// Like [`Config::validate`], for ranks that are threads of this process.
    pub fn validate_threads(&self) -> Result<(), ConfigError> {
        // Caps the number: `check_ranges` reports more ranks than any job can have.
        let ranks = self.train.ranks.min(MAX_RANKS);
        self.check(
            thread_ranks("train.ranks", ranks).filter(|_| ranks == self.train.ranks).into_iter().collect(),
        )
    }

    fn check(&self, mut problems: Vec<String>) -> Result<(), ConfigError> {
        self.check_ranges(&mut problems);
        self.check_batch(&mut problems);
        self.train.check_patterns(&mut problems);
        self.check_lora(&mut problems);
        self.check_places(&mut problems);
        self.check_device(&mut problems);
        self.check_precision(&mut problems);
        self.check_mpi(&mut problems);
        // No other size has to divide the vocabulary size, so a placeholder serves.
        match self.resolve_model(None, Some(self.data.vocab_size.max(1))) {
            Err(_) if self.init_from().is_some() => {}
            Ok(model) => {
                if let Err(error) = model.validate() {
                    problems.push(error.to_string());
                }
            }
            Err(problem) => problems.push(problem),
        }
        if self.train.ranks > 0
            && let Err(error) = Mesh::new(self.shard.strategy, self.train.ranks, self.shard.shard_size)
        {
            problems.push(error.to_string());
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError::Invalid { problems }) }
    }

    /// Returns the path of the weights that a new run starts from; `None` if it draws them at random.
    pub fn init_from(&self) -> Option<&Path> {
        Some(self.init.from.as_path()).filter(|path| !path.as_os_str().is_empty())
    }

    /// Returns the model: unset keys come from `weights`, the model of the initial weights, and the vocabulary is that of
    /// `weights`, or else `vocab_size`.
    ///
    /// # Errors
    ///
    /// The name of the missing or unknown key.
    pub fn resolve_model(
        &self,
        weights: Option<&ModelConfig>,
        vocab_size: Option<usize>,
    ) -> Result<ModelConfig, String> {
        let model = self.model.resolve_from(weights, vocab_size)?;
        Ok(ModelConfig { lora: self.lora.adapters(), ..model })
    }

    /// Returns the parameters that are not trained: those that `[train]` freezes or, with adapters, all others.
    pub fn frozen_parameters(&self) -> Frozen {
        match self.lora.adapters() {
            Some(_) => Frozen::except_adapters(),
            None => self.train.frozen(),
        }
    }

    /// Returns a predicate for the names of frozen parameters.
    pub fn frozen(&self) -> impl Fn(&str) -> bool + Send + Sync + 'static + use<> {
        let frozen = self.frozen_parameters();
        move |name| frozen.contains(name)
    }

    fn check_lora(&self, problems: &mut Vec<String>) {
        if self.lora.adapters().is_none() {
            if !self.lora.is_default() {
                problems.push("lora.rank = 0 means no adapters: set lora.rank, or remove [lora]".to_owned());
            }
            return;
        }
        if self.init_from().is_none() {
            problems.push("[lora] adapts a trained model: name its folder in init.from".to_owned());
        }
        if self.train.freezes() {
            let keys = "train.freeze and train.train_only";
            problems.push(format!("[lora] trains the adapters and freezes all other weights: remove {keys}"));
        }
    }

    fn check_optimizer(&self, problems: &mut Vec<String>) {
        let OptimSection { kind, lr, muon, groups, .. } = &self.optim;
        let mut rates = Vec::new();
        if kind != MUON && muon.is_some() {
            problems.push(format!("[optim.muon] is for optim.kind = \"muon\", not \"{kind}\""));
        }
        let muon = muon.clone().or_else(|| (kind == MUON).then(MuonSection::default));
        if let Some(MuonSection { lr, momentum, weight_decay, ns_steps, .. }) = muon {
            rates.push(("optim.muon.lr", lr, FROM_0));
            rates.push(("optim.muon.momentum", momentum, DECAY));
            rates.push(("optim.muon.weight_decay", weight_decay, FROM_0));
            problems.extend(out_of_range("optim.muon.ns_steps", ns_steps as u64, 1..=MAX_NS_STEPS));
        }
        for group in groups {
            if group.parameters.is_empty() {
                problems.push(
                    "optim.groups: a group names no parameters; set parameters = [\"*\"] for all".to_owned(),
                );
            } else if group.has_no_option() {
                let named = group.parameters.join("\", \"");
                problems
                    .push(format!("optim.groups: the group of \"{named}\" has no option, such as lr = 1e-4"));
            }
            rates.extend(group.lr.map(|lr| ("optim.groups: lr", lr, FROM_0)));
            rates.extend(group.weight_decay.map(|decay| ("optim.groups: weight_decay", decay, FROM_0)));
            rates.extend(group.min_lr_ratio.map(|ratio| ("optim.groups: min_lr_ratio", ratio, FROM_0_TO_1)));
        }
        for (key, value, (range, contains)) in &rates {
            if !contains(*value) {
                problems.push(format!("{key} = {value}: must be {range}"));
            }
        }
        // The schedule of `optim.lr` scales the other rates, so they cannot be set if it is 0.
        let moves = rates.iter().find(|(key, rate, _)| key.ends_with("lr") && *rate != 0.0);
        if let (0.0, Some((key, rate, _))) = (*lr, moves) {
            problems.push(format!("{key} = {rate} follows optim.lr, which is 0: set optim.lr above 0"));
        }
    }

    fn check_ranges(&self, problems: &mut Vec<String>) {
        let Config { model, data, train, optim, device, comm, checkpoint, log, sample, .. } = self;
        for (key, value, most) in [
            ("data.seq_len", data.seq_len as u64, MAX_SEQ_LEN as u64),
            ("model.context_length", model.context_length.unwrap_or(1) as u64, MAX_CONTEXT),
            ("train.steps", train.steps, MAX_STEPS),
            ("train.global_batch", train.global_batch as u64, MAX_BATCH as u64),
            ("train.micro_batch", self.micro_batch() as u64, MAX_BATCH as u64),
            ("train.ranks", train.ranks as u64, MAX_RANKS as u64),
            ("log.every", log.every, u64::MAX),
            ("device.threads", device.threads.unwrap_or(1) as u64, MAX_THREADS as u64),
        ] {
            problems.extend(out_of_range(key, value, 1..=most));
        }
        problems.extend(device.threads.and_then(too_many_threads));
        if log.histograms > 0 && log.tensorboard == EventFolder::None {
            problems.push(format!(
                "log.histograms = {}: histograms are written for TensorBoard only; set log.tensorboard = true",
                log.histograms
            ));
        }
        if train.z_loss > 0.0 && self.loss.kind != CROSS_ENTROPY {
            let kind = &self.loss.kind;
            problems.push(format!(
                "train.z_loss = {} is a part of the cross-entropy, and loss.kind is \"{kind}\"; remove it, \
                 and add such a term to the program's own loss",
                train.z_loss
            ));
        }
        for (key, value, (range, contains)) in [
            ("data.validation_fraction", data.validation_fraction, BETWEEN_0_AND_1),
            ("train.z_loss", train.z_loss, FROM_0),
            ("optim.lr", optim.lr, FROM_0),
            ("optim.min_lr_ratio", optim.min_lr_ratio, FROM_0_TO_1),
            ("optim.weight_decay", optim.weight_decay, FROM_0),
            ("optim.beta1", optim.beta1, DECAY),
            ("optim.beta2", optim.beta2, DECAY),
            ("optim.eps", optim.eps, POSITIVE),
            ("optim.expert_bias_lr", optim.expert_bias_lr, FROM_0),
            ("optim.grad_clip", optim.grad_clip, ("zero (no clipping) or more, and finite", FROM_0.1)),
            ("device.peak_tflops", device.peak_tflops.unwrap_or(1.0), POSITIVE),
            ("device.memory_fraction", device.memory_fraction.unwrap_or(1.0), SHARE),
            ("comm.timeout_s", comm.timeout_s, SECONDS),
            ("comm.join_timeout_s", comm.join_timeout_s, SECONDS),
            ("checkpoint.timeout_s", checkpoint.timeout_s, SECONDS),
            ("sample.temperature", sample.temperature, FROM_0),
        ] {
            if !contains(value) {
                problems.push(format!("{key} = {value}: must be {range}"));
            }
        }
        if sample.every > 0 && sample.all_prompts().next().is_none() {
            problems.push(format!(
                "sample.every = {}: there is no prompt; set sample.prompt or sample.prompts",
                sample.every
            ));
        }
        self.check_optimizer(problems);
        self.check_schedules(problems);
    }

    fn check_schedules(&self, problems: &mut Vec<String>) {
        let (OptimSection { groups, .. }, steps) = (&self.optim, self.train.steps);
        let of_rest = self.optim.lr_schedule();
        // Values that a group inherits from `[optim]` are reported for `[optim]`.
        let own = groups.iter().filter(|group| group.warmup_steps.or(group.decay_steps).is_some());
        let own = own.filter_map(|group| Some(("optim.groups: ", "", group.lr_schedule(of_rest)?)));
        for (place, again, schedule) in iter::once(("optim.", "optim.", of_rest)).chain(own) {
            let LrSchedule { warmup_steps: warmup, decay_steps, .. } = schedule;
            // A warm-up without a decay is shortened instead.
            let Some(decay) = decay_steps else { continue };
            let both = warmup.saturating_add(decay);
            if both > steps {
                problems.push(format!(
                    "{place}warmup_steps + {again}decay_steps = {warmup} + {decay} = {both} is longer than \
                     train.steps = {steps}: lower one of them"
                ));
            }
        }
    }

    /// Checks that `global_batch` divides evenly over ranks, and then over micro-batches.
    fn check_batch(&self, problems: &mut Vec<String>) {
        let (global, micro, ranks) = (self.train.global_batch, self.micro_batch(), self.train.ranks);
        let counts = |value: usize, most: usize| (1..=most).contains(&value);
        if !(counts(global, MAX_BATCH) && counts(micro, MAX_BATCH) && counts(ranks, MAX_RANKS)) {
            return;
        }
        if !global.is_multiple_of(ranks) {
            problems.push(format!(
                "train.global_batch = {global} over {ranks} ranks leaves {}: {global} / {ranks} = \
                 {:.2} sequences per rank; use a multiple of {ranks}, such as {}",
                global % ranks,
                global as f64 / ranks as f64,
                global.next_multiple_of(ranks.saturating_mul(micro))
            ));
        } else if !(global / ranks).is_multiple_of(micro) {
            let per_rank = global / ranks;
            problems.push(format!(
                "train.global_batch = {global} over {ranks} ranks is {per_rank} sequences per rank, which \
                 train.micro_batch = {micro} does not divide (remainder {}): use a micro_batch that divides \
                 {per_rank}, or a global_batch that is a multiple of {ranks} x {micro} = {}",
                per_rank % micro,
                ranks * micro
            ));
        }
    }

    fn check_places(&self, problems: &mut Vec<String>) {
        if self.data.path.as_os_str().is_empty() {
            problems.push(
                "data.path is missing: name a folder with prepared data, or one to prepare from data.text"
                    .to_owned(),
            );
        }
        if self.data.source.is_some() && !self.data.text.is_empty() {
            problems.push("data.source and data.text are both set: remove one of them".to_owned());
        }
        if self.data.source.is_some() {
            let (data, default) = (&self.data, DataSection::default());
            let of_text = [
                ("bos", data.bos != default.bos),
                ("end_of_text", data.end_of_text.is_some()),
                ("special_tokens", data.special_tokens),
                ("bad_lines", data.bad_lines != default.bad_lines),
            ];
            for (key, _) in of_text.into_iter().filter(|(_, is_set)| *is_set) {
                problems.push(format!(
                    "data.{key} is a setting for data.text, and data.source makes token ids without text: remove it"
                ));
            }
        }
        if !self.data.chat.is_empty() && (self.data.source.is_some() || !self.data.text.is_empty()) {
            problems
                .push("data.chat is set together with data.text or data.source: keep one of them".to_owned());
        }
        if self.data.tokenizer.is_some() && self.data.chat.is_empty() {
            problems.push(
                "data.tokenizer is the tokenizer of data.chat, which is not set: remove it. data.text trains its own \
                 tokenizer; `kiln data prepare --tokenizer` uses an existing one"
                    .to_owned(),
            );
        }
        if self.data.source.is_none() && !self.data.extra.is_empty() {
            problems.push(
                "data.extra has settings of a source that the program adds: name it in data.source"
                    .to_owned(),
            );
        }
        if !self.data.text.is_empty() && self.data.vocab_size < VOCABULARY_MINIMUM {
            problems.push(format!(
                "data.vocab_size = {}: must be at least {VOCABULARY_MINIMUM}, one token for each \
                 byte and one for the end of text",
                self.data.vocab_size
            ));
        }
    }

    fn check_mpi(&self, problems: &mut Vec<String>) {
        let CommSection { backend, seal, ports, .. } = &self.comm;
        if *backend != CommBackend::Mpi {
            return;
        }
        if let Some(ports) = ports {
            problems.push(format!(
                "comm.ports = \"{ports}\" are ports of TCP, and comm.backend = \"mpi\" has its own: use \
                 comm.backend = \"tcp\", or remove comm.ports"
            ));
        }
        if !seal.is_off() {
            problems.push(format!(
                "comm.seal = \"{seal}\" covers traffic over TCP only, and comm.backend = \"mpi\": use \
                 comm.backend = \"tcp\", or remove comm.seal"
            ));
        }
    }

    pub(super) fn has_expert_bias(&self) -> bool {
        self.model.moe.as_ref().is_some_and(|moe| moe.expert_bias)
    }

    /// Checks the settings that f16 restricts: its range is small, and its loss scale adapts on the GPU.
    pub(super) fn check_precision(&self, problems: &mut Vec<String>) {
        let is_f16 = self.precision.compute == Choice::Is(Precision::F16);
        for (is_wrong, problem) in [
            (
                self.precision.reduce == Precision::F16,
                "precision.reduce = \"f16\": sums of gradients over ranks would overflow; use \"f32\" or \
                 \"bf16\"",
            ),
            (
                is_f16 && self.device.backend == Backend::Cpu,
                "precision.compute = \"f16\" is for GPUs, and device.backend = \"cpu\": use \"bf16\", or \
                 \"f32\", which is faster there",
            ),
            (
                is_f16 && self.shard.offload,
                "precision.compute = \"f16\" and shard.offload = true cannot be combined, because the loss \
                 scale adapts on the GPU: use \"bf16\"",
            ),
            (
                is_f16 && self.has_expert_bias(),
                "precision.compute = \"f16\" and model.moe.expert_bias = true cannot be combined, because \
                 f16 cannot represent the numbers in which the load of experts is sent: use \"bf16\", or \
                 model.moe.router_aux_loss_coef alone",
            ),
        ] {
            problems.extend(is_wrong.then(|| problem.to_owned()));
        }
    }

    fn check_device(&self, problems: &mut Vec<String>) {
        let (name, missing, transport) = match self.device.backend {
            Backend::Auto | Backend::Cpu => return,
            Backend::Cuda => (
                "cuda",
                (!cfg!(feature = "cuda")).then_some(DeviceError::NotBuilt),
                "which is NCCL between GPUs",
            ),
            Backend::Wgpu => (
                "wgpu",
                (!cfg!(feature = "wgpu")).then_some(DeviceError::WgpuNotBuilt),
                "and ranks that are threads",
            ),
        };
        if let Some(missing) = missing {
            problems.push(format!("device.backend = \"{name}\": {missing}"));
        }
        if let Some(threads) = self.device.threads {
            problems.push(format!(
                "device.threads = {threads} is for the CPU, and device.backend = \"{name}\": remove one of \
                 them"
            ));
        }
        if self.device.backend == Backend::Wgpu {
            let (compute, reduce) = (self.precision.compute(), self.precision.reduce);
            for (key, precision) in [("compute", compute), ("reduce", reduce)] {
                if precision == Precision::Bf16 {
                    problems.push(format!(
                        "precision.{key} = \"bf16\": wgpu has no bf16; use \"f32\", or another device.backend"
                    ));
                }
            }
        }
        let comm = match self.comm.backend {
            CommBackend::Auto | CommBackend::Local => return,
            CommBackend::Tcp => "tcp",
            CommBackend::Mpi => "mpi",
        };
        problems.push(format!(
            "comm.backend = \"{comm}\" moves only data in the memory of the CPU, and device.backend = \
             \"{name}\": use comm.backend = \"auto\", {transport}"
        ));
    }
}

fn out_of_range(key: &str, value: u64, range: RangeInclusive<u64>) -> Option<String> {
    let (least, most) = range.into_inner();
    match value {
        value if value < least => Some(format!("{key} = {value}: must be at least {least}")),
        value if value > most => Some(format!("{key} = {value}: must be at most {most}")),
        _ => None,
    }
}

/// Returns an error message if `threads` far exceeds the cores, since the threads then slow each other down.
fn too_many_threads(threads: usize) -> Option<String> {
    let (mine, all) = (cores(), cores_of_machine());
    // This process may be restricted to some cores, but `device.threads` is for all ranks of the machine.
    let most = mine.saturating_mul(16).max(all.unwrap_or(mine).saturating_mul(2)).max(64);
    (most < threads && threads <= MAX_THREADS).then(|| {
        format!(
            "device.threads = {threads}: must be at most {most}, as this process has {mine} cores; remove it \
             for one thread per core"
        )
    })
}

/// Returns an error message if there are too many ranks as threads; `key` is the setting.
pub fn thread_ranks(key: &str, ranks: usize) -> Option<String> {
    (ranks > MAX_RANKS_PER_NODE).then(|| {
        format!(
            "{key} = {ranks}: one process has at most {MAX_RANKS_PER_NODE} ranks as threads; use fewer, or \
             start ranks as processes, as `kiln launch` does"
        )
    })
}
