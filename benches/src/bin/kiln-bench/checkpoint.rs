//! `kiln-bench checkpoint`: saving and loading compared with plain I/O, and how much saves slow steps down.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::tensor::Device;
use clap::Args;
use kiln::bench::{check_counts, default_config, median, step};
use kiln::checkpoint::{
    Checkpoint, CheckpointError, CheckpointState, Format, Keep, SaveContext, SaveOptions, Saver,
};
use kiln::config::{self, Config};
use kiln::device::{ResolvedDevice, threads_per_rank};
use kiln::losses::Loss;
use kiln::passes::RunLoss;
use kiln::run::TrainError;
use kiln::sharded::ShardedDecoder;
use kiln::weights::AllowMissing;
use kiln::words::number_of;
use kiln_collectives::Phase;
use kiln_model::decoder::Decoder;
use kiln_model::{Key, Layers, ModelConfig};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{Engine, EngineBuilder};
use serde::Serialize;

use crate::beside::{Beside, Steps};
use crate::disk;
use crate::step::checked;

/// The arguments of `kiln-bench checkpoint`.
#[derive(Args, Clone, Debug)]
pub struct CheckpointArgs {
    /// Configuration whose model and batch to use [default: preset 10m].
    #[arg(long)]
    config: Option<PathBuf>,
    /// Change one value of the configuration; may be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Ranks, as threads of this process.
    #[arg(long)]
    ranks: usize,
    /// Rounds, in each of which all operations alternate; medians are shown.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Folder on the disk to measure; files written there are removed again.
    #[arg(long)]
    folder: PathBuf,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

/// Results. Times are in seconds, medians over the rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckpointTable {
    pub parameters: usize,
    pub ranks: usize,
    /// Bytes of weights and moments.
    pub bytes: u64,
    pub rounds: usize,
    /// Plain sequential writing of as many bytes, synced.
    pub raw_write_s: f64,
    pub save_s: f64,
    /// Median of the ratios within rounds, as for the ratios of times below.
    pub save_over_raw: f64,
    /// Plain sequential reading of as many bytes, not cached.
    pub raw_read_s: f64,
    /// Loading, not cached.
    pub load_s: f64,
    pub load_over_raw: f64,
    /// Bytes that all ranks have read, over `bytes`.
    pub read_over_bytes: f64,
    pub step_s: f64,
    /// Time that a save blocks steps: for its start, and for copies of data that the next step changes.
    pub held_s: f64,
    pub held_over_save: f64,
    /// Processor time of all ranks' writers for a save, in seconds of one core.
    pub cpu_s: f64,
    /// `cpu_s` over all cores, over `save_s`: the share by which a save lengthens steps that leave no core idle.
    pub cpu_over_save: f64,
    /// Total time by which steps were longer until the save was complete.
    pub slowed_s: f64,
    pub slowed_over_save: f64,
    /// Total time by which steps were longer during concurrent plain writes that bypass the system's cache.
    pub plain_slowed_s: f64,
    pub plain_slowed_over_save: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Round {
    raw_write: f64,
    save: f64,
    raw_read: f64,
    load: f64,
    bytes_read: f64,
    beside: Beside,
}

impl CheckpointArgs {
    pub fn run(self) -> Result<String, TrainError> {
        let table = self.measure()?;
        let json = || serde_json::to_string_pretty(&table).unwrap_or_default();
        Ok(if self.json { json() } else { table.to_text() })
    }

    fn measure(&self) -> Result<CheckpointTable, TrainError> {
        let mut config = match &self.config {
            Some(path) => config::load(path, &self.overrides)?,
            None => default_config(),
        };
        config.train.ranks = self.ranks;
        let model = checked(&mut config)?;
        check_counts(&[("--rounds", self.rounds)])?;
        // A new folder, since it is removed with all its contents.
        let folder = std::fs::create_dir_all(&self.folder)
            .and_then(|()| tempfile::Builder::new().prefix(".kiln-bench-").tempdir_in(&self.folder))
            .map_err(disk::error("write into", &self.folder))?;
        let selected = ResolvedDevice::new(&config, &Layers::default(), None)?;
        config.settle(selected.defaults());
        let device = selected.device();
        let threads = threads_per_rank(&config.device, self.ranks);
        let measured = run_ranks(self.ranks, threads, |world| {
            let decoder = Decoder::new(&Layers::default(), &model, Key::new(config.train.seed), &device)?;
            let shard_size = config.shard.shard_size;
            let builder = EngineBuilder::new(world, config.policy(), shard_size)?;
            let sharded = ShardedDecoder::new(decoder, builder)?;
            Bench { config: &config, shape: &model, model: &sharded, device: &device, folder: folder.path() }
                .rounds(self.rounds)
        });
        let (parameters, bytes, rounds) = measured?.swap_remove(0);
        let path = folder.path().to_owned();
        folder.close().map_err(disk::error("remove", &path))?;
        Ok(table(self.ranks, parameters, bytes, &rounds))
    }
}

struct Bench<'a> {
    config: &'a Config,
    shape: &'a ModelConfig,
    model: &'a ShardedDecoder,
    device: &'a Device,
    folder: &'a Path,
}

impl Bench<'_> {
    fn engine(&self) -> &Engine {
        self.model.engine()
    }

    fn rounds(&self, count: usize) -> Result<(usize, u64, Vec<Round>), TrainError> {
        self.step(1)?;
        let mut rounds = Vec::new();
        for index in 0..count {
            rounds.push(self.round(2 + index as u64 * 1000)?);
        }
        let bytes = Checkpoint::open(self.folder)?.manifest().bytes();
        Ok((self.engine().layout().num_parameters(), bytes, rounds))
    }

    fn round(&self, first_step: u64) -> Result<Round, TrainError> {
        let (raw, last) = (self.folder.join("raw"), Keep { newest: 1, every: 0 });
        let options = |background| SaveOptions {
            folder: self.folder.to_owned(),
            format: Format::Sharded,
            background,
            keep: last,
            timeout: self.config.checkpoint.timeout(),
            held: None,
        };
        let rank = self.engine().world().rank();
        let mut round = Round::default();
        // Finishes writes of earlier rounds, so that they do not affect this round.
        self.alone(|| disk::forget(self.folder))?;
        let mut saver = Saver::new(options(false), rank);
        round.save = self.together(|| {
            saver.begin(self.engine(), self.context(first_step))?;
            Ok::<_, CheckpointError>(())
        })?;
        let bytes = Checkpoint::open(self.folder)?.manifest().bytes();
        round.raw_write = self.alone(|| disk::write(&raw, bytes))?;
        self.alone(|| disk::forget(self.folder).and_then(|()| disk::forget(&raw)))?;
        round.raw_read = self.alone(|| disk::read(&raw))?;
        let checkpoint = Checkpoint::open(self.folder)?;
        self.alone(|| disk::forget(checkpoint.folder()))?;
        let reader = checkpoint.reader();
        round.load = self.together(|| {
            reader.load_weights(self.engine(), &AllowMissing::default())?;
            reader.load_optimizer(self.engine(), &AllowMissing::default())?;
            Ok::<_, CheckpointError>(())
        })?;
        let read = [reader.bytes_read() as f64];
        round.bytes_read = self.engine().all_reduce_f64(Phase::Checkpoint, "bytes", &read)?[0];
        self.alone(|| std::fs::remove_file(&raw))?;
        let steps = Steps { engine: self.engine(), step: &|number| self.step(number) };
        let context = |step| self.context(step);
        let saver = Saver::new(options(true), rank);
        round.beside = steps.beside_saves(first_step, saver, &context, &raw, bytes)?;
        Ok(round)
    }

    /// Runs a step on made-up tokens; returns the seconds of its update.
    fn step(&self, number: u64) -> Result<f64, TrainError> {
        let loss = RunLoss::from(Loss::CrossEntropy);
        Ok(step(self.config, self.model, self.device, &loss, number)?.update.as_secs_f64())
    }

    fn context(&self, step: u64) -> SaveContext {
        let state = CheckpointState {
            step,
            skipped: 0,
            loss_scale: None,
            next_sample: 0,
            tokens: 0,
            seed: self.config.train.seed,
            model: self.shape.clone(),
            context_length: self.config.data.seq_len,
            data_sha256: None,
        };
        SaveContext::new(state)
    }

    /// Runs `work` on rank 0 while the others wait; returns the seconds it took.
    fn alone(&self, work: impl FnOnce() -> std::io::Result<()>) -> Result<f64, TrainError> {
        self.together(|| match self.engine().world().rank() {
            0 => work().map_err(disk::error("measure", self.folder)),
            _ => Ok(()),
        })
    }

    /// Runs `work` on all ranks; returns the seconds until all were done.
    fn together<E>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<f64, TrainError>
    where
        TrainError: From<E>,
    {
        self.engine().all_reduce_f64(Phase::Other, "begin", &[0.0])?;
        let start = Instant::now();
        work()?;
        self.engine().all_reduce_f64(Phase::Other, "end", &[0.0])?;
        Ok(start.elapsed().as_secs_f64())
    }
}

fn table(ranks: usize, parameters: usize, bytes: u64, rounds: &[Round]) -> CheckpointTable {
    let of = |value: &dyn Fn(&Round) -> f64| median(rounds.iter().map(value).collect());
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get) as f64;
    CheckpointTable {
        parameters,
        ranks,
        bytes,
        rounds: rounds.len(),
        raw_write_s: of(&|round| round.raw_write),
        save_s: of(&|round| round.save),
        save_over_raw: of(&|round| round.save / round.raw_write),
        raw_read_s: of(&|round| round.raw_read),
        load_s: of(&|round| round.load),
        load_over_raw: of(&|round| round.load / round.raw_read),
        read_over_bytes: of(&|round| round.bytes_read) / (3 * 4 * parameters) as f64,
        step_s: of(&|round| round.beside.step),
        held_s: of(&|round| round.beside.held),
        held_over_save: of(&|round| round.beside.held / round.save),
        cpu_s: of(&|round| round.beside.cpu),
        cpu_over_save: of(&|round| round.beside.cpu / cores / round.save),
        slowed_s: of(&|round| round.beside.slowed),
        slowed_over_save: of(&|round| round.beside.slowed / round.save),
        plain_slowed_s: of(&|round| round.beside.plain_slowed),
        plain_slowed_over_save: of(&|round| round.beside.plain_slowed / round.save),
    }
}

impl CheckpointTable {
    pub fn to_text(&self) -> String {
        let gigabytes = self.bytes as f64 / 1e9;
        let line = |what: &str, seconds: f64, more: String| format!("{what:<44} {seconds:>8.3} s  {more}\n");
        let rate = |seconds: f64| format!("{:.2} GB/s", gigabytes / seconds);
        let mut text = format!(
            "{:.2}M parameters, {}, {gigabytes:.3} GB; medians of {}\n",
            self.parameters as f64 / 1e6,
            number_of(self.ranks, "rank"),
            number_of(self.rounds, "round")
        );
        text += &line("plain writing", self.raw_write_s, rate(self.raw_write_s));
        let over = |seconds, ratio: f64, of: &str| format!("{}, {ratio:.2} x {of}", rate(seconds));
        let ratio = over(self.save_s, self.save_over_raw, "plain writing");
        text += &line("save", self.save_s, ratio);
        text += &line("plain reading", self.raw_read_s, rate(self.raw_read_s));
        let ratio = over(self.load_s, self.load_over_raw, "plain reading");
        text += &line("load", self.load_s, ratio);
        text += &format!(
            "{:<44} {:>8.3} x the bytes of weights and moments\n",
            "read by all ranks together", self.read_over_bytes
        );
        text += &line("step", self.step_s, String::new());
        let of_save = |ratio: f64| format!("{:.1} % of a save", 100.0 * ratio);
        for (what, seconds, ratio) in [
            ("save in the background: steps held up", self.held_s, self.held_over_save),
            ("... work of its writers, spread over all cores", self.cpu_s, self.cpu_over_save),
            ("... steps longer", self.slowed_s, self.slowed_over_save),
            (
                "plain writing in the background: steps longer",
                self.plain_slowed_s,
                self.plain_slowed_over_save,
            ),
        ] {
            text += &line(what, seconds, of_save(ratio));
        }
        text.trim_end().to_owned()
    }
}
