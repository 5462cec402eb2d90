//! The command `kiln eval`: its arguments, and each rank's part of the work. Everything is computed in f32.

mod report;

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;

use burn::tensor::Device;
use clap::Args;
use kiln_collectives::Communicator;
use kiln_collectives::tcp::{Arrivals, Ports, Seal};
use kiln_model::{Decoder, Layers};
use kiln_shard::ranks::{run_rank, run_ranks};
use kiln_shard::{EngineBuilder, Mesh, Policy, Strategy, memory};

use kiln_data::{Sources, Tokenizer};
use kiln_train::error::{Result, TrainError};
use kiln_train::eval::{
    EvalError, Pair, Question, TokenPair, Validation, ValidationOptions, answer_losses, answers,
    check_tokens, logits, read_pairs, read_task,
};
use kiln_train::generate::Sampling;
use kiln_train::kernels;
use kiln_train::launch;
use kiln_train::process::output::{ProgressLine, print_line};
use kiln_train::registry::Registry;
use kiln_train::world;

use kiln_checkpoint::source::ModelSource;
use kiln_config::device::{self, DeviceFlag, DeviceRequest, ResolvedDevice};
use kiln_config::{self as config, Backend, CommSection, DeviceSection, Precision};
use kiln_launch::place::{self, RankEnv, Role};
use report::{Outcome, Report};

/// Default number of validation sequences per forward pass of one rank.
const ROWS: usize = 4;

/// Default number of texts that are generated at once.
const TEXTS: usize = 16;

/// Default maximum number of tokens of an answer of a task.
const ANSWER: usize = 64;

/// Flags that request something other than the loss on validation data.
const OTHERS: [&str; 4] = ["prompt", "pairs", "tokens", "task"];

/// Flags of `kiln eval`.
#[derive(Args, Clone, Debug)]
pub(crate) struct EvalArgs {
    /// Checkpoint folder, run folder (its newest checkpoint), or Hugging Face folder.
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// Prepared data; its validation split is used [default: the data that the model was trained on].
    #[arg(long, value_name = "DIR", conflicts_with_all = OTHERS)]
    data: Option<PathBuf>,
    /// Number of validation sequences [default: all].
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with_all = OTHERS)]
    samples: Option<NonZero<usize>>,
    /// Tokens per validation sequence [default: as in training, or the context length, at most 2048].
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with_all = OTHERS)]
    seq_len: Option<NonZero<usize>>,
    /// Validation sequences per forward pass [default: 4], or answers of --task generated at once [default: 16].
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with_all = ["prompt", "pairs", "tokens"])]
    rows: Option<NonZero<usize>>,
    /// Report the loss of --answer after this prompt; may be empty.
    #[arg(long, value_name = "TEXT", requires = "answer", conflicts_with_all = ["pairs", "tokens"])]
    #[arg(allow_hyphen_values = true)]
    prompt: Option<String>,
    /// The answer to --prompt.
    #[arg(long, value_name = "TEXT", requires = "prompt", allow_hyphen_values = true)]
    answer: Option<String>,
    /// Report the loss of the answers in this file: one object with "prompt" and "answer" per line.
    #[arg(long, value_name = "FILE.jsonl", conflicts_with = "tokens")]
    pairs: Option<PathBuf>,
    /// Answer the questions in this file and count the correct answers: one object with "answer", and with "prompt" or
    /// "messages", per line. The most likely tokens are generated.
    #[arg(long, value_name = "FILE.jsonl", conflicts_with_all = ["prompt", "pairs", "tokens"])]
    task: Option<PathBuf>,
    /// Maximum number of tokens of an answer to --task [default: 64].
    #[arg(long, value_name = "N", value_parser = at_least_one, requires = "task")]
    max_tokens: Option<NonZero<usize>>,
    /// End an answer to --task before this string, such as a line break; may be repeated.
    #[arg(long, value_name = "STRING", requires = "task", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Treat special tokens in prompts and answers as plain text.
    #[arg(long, conflicts_with_all = ["data", "samples", "seq_len", "rows", "tokens"])]
    plain_text: bool,
    /// Write the logits after each of these tokens to --logits.
    #[arg(long, value_name = "ID,ID,…", value_delimiter = ',', value_parser = parse_token)]
    #[arg(requires = "logits")]
    tokens: Option<Vec<u32>>,
    /// Output file for the logits: f32, one row per token.
    #[arg(long, value_name = "FILE.npy", requires = "tokens")]
    logits: Option<PathBuf>,
    /// Number of ranks, as threads of this process [default: 1].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    ranks: Option<NonZero<usize>>,
    /// Sharding strategy.
    #[arg(long, default_value_t = Strategy::FullShard)]
    strategy: Strategy,
    /// Ranks that share one copy of the model, for hybrid strategies [default: the ranks of a machine].
    #[arg(long, value_name = "N")]
    shard_size: Option<usize>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Accept connections from other machines without KILN_JOB_SECRET, as with comm.open: anyone who reaches the port can
    /// take a rank's place.
    #[arg(long, hide_short_help = true)]
    comm_open: bool,
    /// Protection of the traffic between processes, as with comm.seal: off or encrypt.
    #[arg(long, value_name = "SEAL", default_value_t = Seal::Off, hide_short_help = true)]
    comm_seal: Seal,
    /// Ports on which processes listen for each other, as with comm.ports.
    #[arg(long, value_name = "FIRST-LAST", hide_short_help = true)]
    comm_ports: Option<Ports>,
    #[command(flatten)]
    device: DeviceFlag,
    #[command(flatten)]
    place: place::Flags,
}

fn at_least_one(text: &str) -> Result<NonZero<usize>, String> {
    text.parse().map_err(|_| "not a whole number of at least 1".to_owned())
}

fn parse_token(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "not a token id".to_owned())
}

impl EvalArgs {
    /// Evaluates as one rank, or launches the ranks of this node. Rank 0 prints the result. Returns the exit code.
    pub(crate) fn run(self, registry: &Registry) -> Result<u8> {
        let place = match place::find_here(&self.place)? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => Some(place),
            Role::Alone(_) => None,
        };
        memory::use_huge_pages();
        let report = match &place {
            None => self.run_as_threads(registry)?,
            Some(place) => self.run_as_process(place, registry)?,
        };
        if place.is_none_or(|place| place.rank == 0) {
            print_line(&if self.json { report.to_json() } else { report.to_string() });
        }
        Ok(0)
    }

    fn run_as_threads(&self, registry: &Registry) -> Result<Report> {
        let ranks = self.ranks.map_or(1, NonZero::get);
        if let Some(problem) = config::thread_ranks("--ranks", ranks) {
            return Err(TrainError::usage(problem));
        }
        if !self.strategy.is_hybrid() || self.shard_size.is_some() {
            self.check_mesh(ranks)?;
        }
        let work = Work::new(self, registry)?;
        let threads = device::threads_per_rank(&DeviceSection::default(), ranks);
        let selected = work.select(&self.device, ranks, None)?;
        selected.warn_of_idle_gpus();
        work.settle_kernels(&selected, None, &CommSection::default())?;
        let device = selected.device();
        let mut reports = run_ranks(ranks, threads, |world| work.on_rank(world, &device))?;
        Ok(reports.swap_remove(0))
    }

    /// Runs as one rank of several processes. Each reads its own arguments and files, which must agree.
    fn run_as_process(&self, place: &RankEnv, registry: &Registry) -> Result<Report> {
        let ranks = world::size_of(place, self.ranks.map(NonZero::get))?;
        if self.shard_size.is_some() {
            self.check_mesh(ranks)?;
        }
        let comm = CommSection {
            open: self.comm_open,
            seal: self.comm_seal,
            ports: self.comm_ports,
            ..CommSection::default()
        };
        let met = world::join(place, &comm, None, &Arrivals::default())?;
        let sharing = device::ranks_sharing_cores(place);
        let threads = device::threads_per_rank(&DeviceSection::default(), sharing);
        Ok(run_rank(met.communicator(), threads, |world| {
            let work = Work::new(self, registry)?;
            // Arguments that may differ from rank to rank are not compared.
            let told = EvalArgs { place: place::Flags::default(), ranks: None, ..self.clone() };
            let folder = work.source.folder();
            let told = format!("{} {told:?} {folder:?}", env!("CARGO_PKG_VERSION"));
            world::agree(&*world, &told, comm.timeout())?;
            let device = work.select(&self.device, ranks, Some(place))?;
            if self.device.backend() != Backend::Cpu {
                met.settle_on(&device, &comm)?;
            }
            work.settle_kernels(&device, Some(&*world), &comm)?;
            work.on_rank(world, &device.device())
        })?)
    }

    fn check_mesh(&self, ranks: usize) -> Result<()> {
        Mesh::new(self.strategy, ranks, self.shard_size)
            .map(|_| ())
            // The message names a configuration key, but this command has a flag instead.
            .map_err(|error| error.to_string().replace("shard.shard_size", "--shard-size"))
            .map_err(TrainError::usage)
    }
}

/// The work of an evaluation, prepared the same way on every rank.
struct Work {
    layers: Layers,
    source: ModelSource,
    task: Task,
    strategy: Strategy,
    shard_size: Option<usize>,
}

enum Task {
    Validation(Box<Validation>),
    Answer(TokenPair),
    Answers(Vec<TokenPair>),
    Logits { tokens: Vec<i32>, path: PathBuf },
    Questions { questions: Vec<Question>, tokenizer: Box<Tokenizer>, sampling: Sampling, rows: usize },
}

impl Work {
    fn new(args: &EvalArgs, registry: &Registry) -> Result<Self> {
        let layers = registry.layers();
        let source = ModelSource::open_with(&args.checkpoint, layers)?;
        let task = Task::new(args, &source, registry.sources())?;
        Ok(Work {
            layers: layers.clone(),
            source,
            task,
            strategy: args.strategy,
            shard_size: args.shard_size,
        })
    }

    fn select(&self, flag: &DeviceFlag, ranks: usize, place: Option<&RankEnv>) -> Result<ResolvedDevice> {
        let Work { layers, source, strategy, shard_size, .. } = self;
        let parameters = Decoder::count_parameters(layers, source.model())?;
        let request = DeviceRequest::for_weights(flag.backend(), parameters, ranks, *strategy, *shard_size);
        Ok(DeviceFlag::select(&request, place)?)
    }

    /// Checks the kernels of `device`, and replaces faulty ones. Collective if there is a `world`.
    fn settle_kernels(
        &self,
        device: &ResolvedDevice,
        world: Option<&dyn Communicator>,
        comm: &CommSection,
    ) -> Result<()> {
        kernels::settle_in(Precision::F32, self.source.model(), device, world, comm)
    }

    fn on_rank(&self, world: Arc<dyn Communicator>, device: &Device) -> Result<Report> {
        let Work { layers, source, task, strategy, shard_size } = self;
        let (rank, ranks) = (world.rank(), world.world_size());
        world.recorder().set_activity("evaluation");
        let shard_size = world::shard_size(*strategy, *shard_size, &*world)?;
        let policy = Policy { strategy: *strategy, ..Policy::default() };
        let model = source.decoder(layers, EngineBuilder::new(world, policy, shard_size)?, device)?;
        let outcome = match task {
            Task::Validation(validation) => {
                let line = (rank == 0).then(|| ProgressLine::on_stderr("evaluating", "the first pass"));
                let progress = |done, of| {
                    line.iter().for_each(|line| line.set(format!("pass {done} of {of}"), done, of));
                };
                Outcome::Validation(validation.loss(&model, device, progress)?)
            }
            Task::Answer(pair) => {
                let losses = answer_losses(&model, device, std::slice::from_ref(pair))?;
                Outcome::Answer(losses[0])
            }
            Task::Answers(pairs) => Outcome::Answers(answer_losses(&model, device, pairs)?),
            Task::Logits { tokens, path } => {
                let logits = logits(&model, device, tokens)?;
                if rank == 0 {
                    let failed = |source| EvalError::Write { path: path.clone(), source };
                    logits.write_npy(path).map_err(failed)?;
                }
                Outcome::Logits { path: path.clone(), shape: logits.shape }
            }
            Task::Questions { questions, tokenizer, sampling, rows } => {
                let line = (rank == 0).then(|| ProgressLine::on_stderr("evaluating", "the first answers"));
                let of = questions.len();
                let progress = |done| {
                    let count = |line: &ProgressLine| {
                        line.set(format!("answer {done} of {of}"), done as u64, of as u64);
                    };
                    line.iter().for_each(count);
                };
                let answers = answers(&model, device, tokenizer, questions, sampling, *rows, progress)?;
                Outcome::Task(answers)
            }
        };
        outcome.check()?;
        Ok(Report { outcome, ranks, strategy: *strategy })
    }
}

impl Task {
    /// Returns the task that the arguments request; the parser ensures that they request exactly one.
    fn new(args: &EvalArgs, source: &ModelSource, sources: &Sources) -> Result<Self> {
        if let (Some(prompt), Some(answer)) = (&args.prompt, &args.answer) {
            let pair = Pair { prompt: prompt.clone(), answer: answer.clone() };
            let tokenizer = source.load_tokenizer()?.reading_special_tokens(!args.plain_text);
            return Ok(Task::Answer(TokenPair::new(&pair, source.context_length(), &tokenizer, "--answer")?));
        }
        if let Some(path) = &args.pairs {
            let tokenizer = source.load_tokenizer()?.reading_special_tokens(!args.plain_text);
            let pairs = read_pairs(path)?;
            return Ok(Task::Answers(TokenPair::from_file(
                path,
                &pairs,
                source.context_length(),
                &tokenizer,
            )?));
        }
        if let Some(path) = &args.task {
            let tokenizer = source.load_tokenizer()?.reading_special_tokens(!args.plain_text);
            let sampling = Sampling {
                max_tokens: args.max_tokens.map_or(ANSWER, NonZero::get),
                temperature: 0.0,
                context_length: source.context_length(),
                end_ids: source.end_ids()?,
                stop: args.stop.clone(),
                ..Sampling::default()
            };
            return Ok(Task::Questions {
                questions: read_task(path, source, &tokenizer)?,
                tokenizer: Box::new(tokenizer),
                sampling,
                rows: args.rows.map_or(TEXTS, NonZero::get),
            });
        }
        if let (Some(tokens), Some(path)) = (&args.tokens, &args.logits) {
            return Ok(Task::Logits { tokens: check_tokens(source, tokens)?, path: path.clone() });
        }
        let options = ValidationOptions {
            seq_len: args.seq_len.map(NonZero::get),
            samples: args.samples.map_or(0, NonZero::get) as u64,
            rows: args.rows.map_or(ROWS, NonZero::get),
        };
        let validation = Validation::open(source, args.data.as_deref(), sources, options)?;
        Ok(Task::Validation(Box::new(validation)))
    }
}
