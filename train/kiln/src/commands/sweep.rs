//! `kiln sweep`: a run for each combination of settings, and a comparison of their results.
//!
//! Every run is a process with its own folder, so that a failed run harms no other. A stopped sweep resumes from the
//! folders.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Seek, SeekFrom};
use std::num::NonZeroUsize;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::Args;
use kiln_config::device::{self, Memory, ResolvedDevice};
use kiln_config::{self as config, Backend, Config, ConfigError};
use kiln_launch::place::{self, Role};
use kiln_model::{Decoder, Key};
use kiln_observe::export::cell;
use kiln_observe::plot::{Axis, Curve, Curves};
use kiln_observe::run::Run;
use kiln_sys::durable::write_atomic;
use kiln_sys::words::number_of;
use kiln_train::TrainError;
use kiln_train::launch::PREEMPTED;
use kiln_train::process::output::{ProgressLine, eprint_line, print_line};
use kiln_train::process::stop_on_signals;
use kiln_train::registry::Registry;
use kiln_train::run;
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

use crate::error::{CommandError, Result};

/// Arguments of `kiln sweep`.
#[derive(Args, Clone, Debug)]
pub struct SweepArgs {
    /// Configuration file.
    config: PathBuf,
    /// A setting and its values, such as optim.lr=1e-3,3e-3. May be repeated: each combination of values is a run.
    #[arg(long = "grid", value_name = "SECTION.KEY=VALUE,VALUE", required = true)]
    grids: Vec<String>,
    /// Number of runs of each combination, with seeds from train.seed on.
    #[arg(long, value_name = "N", default_value = "1")]
    seeds: NonZeroUsize,
    /// Override a configuration value in all runs; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Folder of the runs and of their comparison [default: runs/<configuration name>-sweep].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Number of runs at a time [default: as many as the cores and the memory allow; 1 on GPUs].
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Run failed runs again, such as runs that have diverged.
    #[arg(long)]
    retry: bool,
    /// Print the comparison as JSON.
    #[arg(long)]
    json: bool,
}

struct Grid {
    key: String,
    values: Vec<String>,
}

struct Trial {
    /// Index of its combination of values.
    combination: usize,
    name: String,
    folder: PathBuf,
    /// Overrides in the form that `--set` takes.
    settings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    Open,
    Done(Outcome),
    Failed(String),
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Outcome {
    /// Validation loss after the last step.
    loss: f64,
    tokens_per_s: Option<f64>,
}

const MOST_RUNS: usize = 10_000;

const NAME: usize = 200;

/// Key of the results, in tables and plots.
const RESULT: &str = "val_loss";

/// Name of the file that marks the folder of a sweep and records its configuration.
const MARK: &str = "sweep.toml";
/// Name of the folder of the runs' outputs. Names of runs contain "=".
const LOGS: &str = "logs";
const MARK_LINE: &str = "# The configuration of all runs of this sweep, written by kiln sweep.\n";

const PROCESS: u64 = 64 << 20;

const LOOK: Duration = Duration::from_millis(20);

/// Looks from one count of the running runs' steps to the next.
const LOOKS_FOR_STEPS: u64 = 50;

impl SweepArgs {
    /// Runs what is left of the sweep and prints the comparison. Returns the exit code: 1 if a run has failed.
    pub(crate) fn run(&self, registry: &Registry) -> Result<u8> {
        if !matches!(place::find_here(&place::Flags::default()).map_err(TrainError::from)?, Role::Alone(_)) {
            return Err(CommandError::usage(
                "kiln sweep starts its runs itself: start it once, without a launcher",
            ));
        }
        let grids = grids(&self.grids, &self.overrides)?;
        if self.seeds.get() > 1 && grids.iter().any(|grid| grid.key == "train.seed") {
            return Err(CommandError::usage("train.seed has a grid: remove --seeds"));
        }
        let base = config::load(&self.config, &self.overrides).map_err(TrainError::from)?;
        let out = self.out.clone().unwrap_or_else(|| {
            let name = self.config.file_stem().map_or("run".into(), |name| name.to_string_lossy());
            Path::new("runs").join(format!("{name}-sweep"))
        });
        let combinations = combinations(&grids, self.seeds)?;
        let trials = self.trials(&grids, &combinations, &base, &out);
        // Every mistake in a value is found before the first run.
        let configs = trials.iter().map(|trial| -> Result<_> {
            let settings: Vec<_> = self.overrides.iter().chain(&trial.settings).cloned().collect();
            // The base is valid, so the values of the grids are not.
            let wrong =
                |error: ConfigError| CommandError::usage(error.to_string().replace("--set", "--grid"));
            let config = config::load(&self.config, &settings).map_err(wrong)?;
            Ok(run::with_ranks(config, &run::RunOptions::default())?)
        });
        let configs = configs.collect::<Result<Vec<_>>>()?;
        let _lock = claim(&out, &base)?;
        let failures = self.run_trials(&trials, &configs, &out, registry)?;
        let states: Vec<_> = trials
            .iter()
            .zip(failures)
            .map(|(trial, failure)| match (state(&trial.folder), failure) {
                (State::Open, Some(why)) => State::Failed(why),
                (state, _) => state,
            })
            .collect();
        let report = SweepReport::new(&grids, &combinations, &trials, &states);
        report.write(&out)?;
        if self.json {
            print_line(&report.to_json());
        } else {
            print_line(report.to_text(&grids).trim_end());
            print_line(&format!("curves: kiln watch {}", out.display()));
        }
        if states.contains(&State::Open) {
            self.tell("stopped: the same command continues the sweep");
            return Ok(PREEMPTED);
        }
        Ok(u8::from(states.iter().any(|state| matches!(state, State::Failed(_)))))
    }

    /// Prints a line of progress, which must not mix with JSON.
    fn tell(&self, line: &str) {
        if self.json { eprint_line(line) } else { print_line(line) }
    }

    fn trials(&self, grids: &[Grid], combinations: &[Vec<usize>], base: &Config, out: &Path) -> Vec<Trial> {
        let mut trials: Vec<Trial> = Vec::new();
        for (combination, chosen) in combinations.iter().enumerate() {
            for seed in 0..self.seeds.get() as u64 {
                let pairs = || grids.iter().zip(chosen).map(|(grid, value)| (grid, &grid.values[*value]));
                let mut settings: Vec<_> =
                    pairs().map(|(grid, value)| format!("{}={value}", grid.key)).collect();
                let mut parts: Vec<_> =
                    pairs().map(|(grid, value)| format!("{}={value}", short(&grid.key, grids))).collect();
                // The first run of a combination is the same for any number of seeds.
                if seed > 0 {
                    let seed = base.train.seed.wrapping_add(seed);
                    settings.push(format!("train.seed={seed}"));
                    parts.push(format!("seed={seed}"));
                }
                let name = name_of(&parts.join(","), &settings);
                trials.push(Trial { combination, folder: out.join(&name), name, settings });
            }
        }
        trials
    }

    /// Runs all trials that are neither finished nor failed, or until a signal stops the sweep. Returns for each trial
    /// the reason why its process failed.
    fn run_trials(
        &self,
        trials: &[Trial],
        configs: &[Config],
        out: &Path,
        registry: &Registry,
    ) -> Result<Vec<Option<String>>> {
        let is_left = |index: &usize| match state(&trials[*index].folder) {
            State::Open => true,
            State::Done(_) => false,
            State::Failed(_) => self.retry,
        };
        let mut failures = vec![None; trials.len()];
        let mut left: VecDeque<_> = (0..trials.len()).filter(is_left).collect();
        if left.is_empty() {
            return Ok(failures);
        }
        let mut jobs = left.len();
        match self.jobs {
            Some(given) => jobs = jobs.min(given.get()),
            None => {
                for &index in &left {
                    jobs = jobs.min(jobs_for(&configs[index], registry)?);
                    if jobs == 1 {
                        break;
                    }
                }
            }
        }
        self.tell(&format!(
            "sweep: {} in {}, {} left, {jobs} at a time",
            number_of(trials.len(), "run"),
            out.display(),
            left.len()
        ));
        let stop = stop_on_signals();
        let line = ProgressLine::on_stderr("sweep", "the first runs");
        let (all, mut ended, mut has_signalled) = (left.len(), 0_u32, false);
        let (mut looks, mut parts) = (0_u64, 0.0);
        let mut running = Running((0..jobs).map(|_| None).collect());
        loop {
            let stops = stop.load(Ordering::Relaxed);
            for (slot, process) in running.0.iter_mut().enumerate() {
                if let Some(Process { index, child, log, start, .. }) = process {
                    let trial = &trials[*index];
                    let status =
                        child.try_wait().map_err(TrainError::io("wait for the run in", &trial.folder))?;
                    let Some(status) = status else { continue };
                    ended += 1;
                    looks = 0;
                    if !status.success() && status.code() != Some(i32::from(PREEMPTED)) {
                        let why = match state(&trial.folder) {
                            State::Failed(why) => why,
                            _ => last_error(log, *start).unwrap_or_else(|| status.to_string()),
                        };
                        self.tell(&format!("{} failed: {why}", trial.name));
                        failures[*index] = Some(why);
                    }
                    *process = None;
                }
                if !stops && let Some(index) = left.pop_front() {
                    *process = Some(self.start(index, &trials[index], out, slot, jobs)?);
                }
            }
            if running.0.iter().all(Option::is_none) {
                return Ok(failures);
            }
            if stops && !has_signalled {
                has_signalled = true;
                running.signal();
            }
            if looks % LOOKS_FOR_STEPS == 0 {
                parts = running.0.iter_mut().flatten().map(Process::done).sum();
            }
            looks += 1;
            let names = running.0.iter().flatten().map(|process| trials[process.index].name.as_str());
            // In thousandths of a run.
            let done = (1000.0 * (f64::from(ended) + parts)) as u64;
            line.set(names.collect::<Vec<_>>().join(" | "), done, 1000 * all as u64);
            std::thread::sleep(LOOK);
        }
    }

    /// Starts the process of `trial`, which has this index, on its share of the cores.
    fn start(&self, index: usize, trial: &Trial, out: &Path, slot: usize, jobs: usize) -> Result<Process> {
        let program = std::env::current_exe().map_err(TrainError::io("find", Path::new("this program")))?;
        let log = log_of(out, trial);
        let file = OpenOptions::new().create(true).append(true).open(&log);
        let file = file.map_err(TrainError::io("open", &log))?;
        let start = file.metadata().map_or(0, |file| file.len());
        let copy = file.try_clone().map_err(TrainError::io("open", &log))?;
        let mut command = Command::new(program);
        command.arg("train").arg(&self.config).arg("--out").arg(&trial.folder);
        for setting in self.overrides.iter().chain(&trial.settings) {
            command.arg("--set").arg(setting);
        }
        if trial.folder.join("checkpoints/latest").exists() {
            command.args(["--resume", "latest"]);
        }
        // In a separate process group, it gets one signal to stop, not also that of the terminal.
        command.stdin(Stdio::null()).stdout(file).stderr(copy).process_group(0);
        // A process inherits the cores of the thread that starts it.
        let spawned = std::thread::scope(|scope| {
            let spawn = scope.spawn(|| {
                if let Some(cores) = cores_of(slot, jobs) {
                    // Without its own cores, the run is only slower.
                    let _ = sched_setaffinity(None, &cores);
                }
                command.spawn()
            });
            spawn.join()
        });
        match spawned {
            Ok(child) => {
                let child = child.map_err(TrainError::io("start the run in", &trial.folder))?;
                Ok(Process { index, child, folder: trial.folder.clone(), run: None, log, start })
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// The process of a run.
struct Process {
    /// Index of its trial.
    index: usize,
    child: Child,
    folder: PathBuf,
    /// The run, once its folder exists.
    run: Option<Run>,
    log: PathBuf,
    /// Length of the log when the process started.
    start: u64,
}

impl Process {
    /// Returns the share of the run's steps that are done.
    fn done(&mut self) -> f64 {
        match &mut self.run {
            Some(run) => _ = run.refresh(),
            none => *none = Run::open(&self.folder).ok(),
        }
        let run = self.run.as_ref();
        let steps = run.and_then(|run| run.metrics().last_step().zip(run.steps()));
        steps.map_or(0.0, |(done, of)| done as f64 / of.max(1) as f64)
    }
}

/// The processes of a sweep, one in each slot. Those that are left when the sweep ends early are stopped as well.
struct Running(Vec<Option<Process>>);

impl Running {
    /// Asks all processes to save and stop.
    fn signal(&self) {
        for process in self.0.iter().flatten() {
            let pid = i32::try_from(process.child.id()).ok().and_then(Pid::from_raw);
            // A process that has ended meanwhile needs no signal.
            let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.signal();
        for process in self.0.iter_mut().flatten() {
            // The sweep is already ending, so an error changes nothing.
            let _ = process.child.wait();
        }
    }
}

/// Returns the cores of one of `jobs` runs at a time; `None` if there is nothing to share.
fn cores_of(slot: usize, jobs: usize) -> Option<CpuSet> {
    let all = sched_getaffinity(None).ok()?;
    let cores: Vec<_> = (0..CpuSet::MAX_CPU).filter(|core| all.is_set(*core)).collect();
    if jobs < 2 || cores.len() < jobs {
        return None;
    }
    // A container may have fewer than it sees.
    let usable = std::thread::available_parallelism().map_or(cores.len(), NonZeroUsize::get);
    let each = (usable.min(cores.len()) / jobs).max(1);
    let mut share = CpuSet::new();
    cores[slot * each..(slot + 1) * each].iter().for_each(|core| share.set(*core));
    Some(share)
}

/// Returns how many runs of `config` the cores and the memory of this machine allow at a time. Runs that may use a GPU
/// have it for themselves.
fn jobs_for(config: &Config, registry: &Registry) -> Result<usize> {
    if cfg!(any(feature = "cuda", feature = "wgpu")) && config.device.backend != Backend::Cpu {
        return Ok(1);
    }
    let mut config = config.clone();
    let device = ResolvedDevice::new(&config, registry.layers(), None).map_err(TrainError::from)?;
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = config.device.threads.unwrap_or(config.train.ranks);
    let jobs = cores / threads.max(1);
    config.settle(device.defaults());
    // A model that cannot be planned fails in its run, with a reason.
    let Ok(model) = run::model_of_run(&config, registry.layers()) else { return Ok(jobs.max(1)) };
    let decoder =
        Decoder::new(registry.layers(), &model, Key::new(0), &device::plain()).map_err(TrainError::from)?;
    let optimizer = registry.optimizers().make(&config.optim).map_err(TrainError::from)?;
    let needed = run::needed_bytes(&config, &model, &decoder, &optimizer, &device, None);
    let fit = needed.zip(Memory::for_machine()).map(|(needed, memory)| {
        usize::try_from(memory.free / needed.saturating_add(PROCESS)).unwrap_or(usize::MAX)
    });
    Ok(jobs.min(fit.unwrap_or(jobs)).max(1))
}

fn grids(arguments: &[String], overrides: &[String]) -> Result<Vec<Grid>> {
    let mut grids: Vec<Grid> = Vec::new();
    for argument in arguments {
        let wrong = |problem: &str| Err(CommandError::usage(format!("--grid {argument}: {problem}")));
        let Some((key, values)) = argument.split_once('=') else {
            return wrong("expected a key and its values, as in optim.lr=1e-3,3e-3");
        };
        let Some(values) = split(values) else { return wrong("a quote or a bracket is not closed") };
        let key = key.trim().to_owned();
        if grids.iter().any(|grid| grid.key == key) {
            return wrong("this key has another grid: write all values in one");
        }
        if overrides.iter().any(|setting| setting.split('=').next().map(str::trim) == Some(&*key)) {
            return wrong("--set has this key as well: remove one of them");
        }
        if values.iter().any(String::is_empty) {
            return wrong("a value is empty");
        }
        if let Some((_, twice)) =
            values.iter().enumerate().find(|(index, value)| values[..*index].contains(value))
        {
            return wrong(&format!("{twice} is listed twice"));
        }
        grids.push(Grid { key, values });
    }
    Ok(grids)
}

/// Splits values at commas outside of brackets and quotes; `None` if one of them is not closed.
fn split(values: &str) -> Option<Vec<String>> {
    let (mut parts, mut depth, mut quote) = (vec![String::new()], 0_usize, None);
    for letter in values.chars() {
        match (letter, quote) {
            (',', None) if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            ('[' | '{', None) => depth += 1,
            (']' | '}', None) => depth = depth.saturating_sub(1),
            ('"' | '\'', None) => quote = Some(letter),
            (letter, Some(open)) if letter == open => quote = None,
            _ => {}
        }
        if let Some(last) = parts.last_mut() {
            last.push(letter);
        }
    }
    (depth == 0 && quote.is_none()).then(|| parts.iter().map(|part| part.trim().to_owned()).collect())
}

/// Returns all combinations of the grids' values, as indices; the last grid varies fastest. Fails if they make too many
/// runs.
fn combinations(grids: &[Grid], seeds: NonZeroUsize) -> Result<Vec<Vec<usize>>> {
    let all = grids.iter().fold(seeds.get(), |all, grid| all.saturating_mul(grid.values.len()));
    if all > MOST_RUNS {
        return Err(CommandError::usage(format!(
            "the grids make {all} runs, and a sweep has at most {MOST_RUNS}: name fewer values"
        )));
    }
    let mut combinations = vec![Vec::new()];
    for grid in grids {
        let extend = |start: Vec<usize>| {
            (0..grid.values.len()).map(move |value| start.iter().copied().chain([value]).collect())
        };
        combinations = combinations.into_iter().flat_map(extend).collect();
    }
    Ok(combinations)
}

/// Returns the last part of `key`, or the whole key if another grid's key ends the same way.
fn short<'a>(key: &'a str, grids: &[Grid]) -> &'a str {
    let last = |key: &'a str| key.rsplit('.').next().unwrap_or(key);
    let is_unique = grids.iter().filter(|grid| grid.key.rsplit('.').next() == Some(last(key))).count() == 1;
    if is_unique { last(key) } else { key }
}

/// Returns the name of a run's folder: `text`, with a hash of the `settings` if that is not a portable file name or too long.
fn name_of(text: &str, settings: &[String]) -> String {
    let name = file_name(text);
    if name == text && name.len() <= NAME {
        return name;
    }
    let mut hasher = DefaultHasher::new();
    settings.hash(&mut hasher);
    let short: String = name.chars().take(NAME / 2).collect();
    format!("{short}-{:016x}", hasher.finish())
}

/// Returns `name` with only the characters that need no quotes in a shell.
fn file_name(name: &str) -> String {
    let keep = |letter: char| letter.is_ascii_alphanumeric() || "._+-=,".contains(letter);
    name.chars()
        .filter(|letter| *letter != '"' && *letter != '\'')
        .map(|letter| if keep(letter) { letter } else { '_' })
        .collect()
}

fn log_of(out: &Path, trial: &Trial) -> PathBuf {
    out.join(LOGS).join(format!("{}.log", trial.name))
}

/// Makes `out` the folder of a sweep of `base`, and keeps other sweeps out of it as long as the file is open.
fn claim(out: &Path, base: &Config) -> Result<File> {
    let base = toml::to_string(base)
        .map_err(|error| CommandError::usage(format!("the configuration cannot be written: {error}")))?;
    let (mark, text) = (out.join(MARK), format!("{MARK_LINE}{base}"));
    let logs = out.join(LOGS);
    match fs::read_to_string(&mark) {
        Ok(before) if before == text => {}
        Ok(_) => {
            return Err(CommandError::usage(format!(
                "{} holds a sweep of another configuration ({}): choose another folder with --out",
                out.display(),
                mark.display()
            )));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            fs::create_dir_all(out).map_err(TrainError::io("create", out))?;
            let mut files = fs::read_dir(out).map_err(TrainError::io("read", out))?;
            if files.next().is_some() {
                return Err(CommandError::usage(format!(
                    "{} holds other files: choose another folder with --out",
                    out.display()
                )));
            }
            write_atomic(&mark, text.as_bytes()).map_err(TrainError::io("write", &mark))?;
        }
        Err(error) => return Err(TrainError::io("read", &mark)(error).into()),
    }
    fs::create_dir_all(&logs).map_err(TrainError::io("create", &logs))?;
    let file = File::open(&mark).map_err(TrainError::io("open", &mark))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(CommandError::usage(format!("another sweep is at work in {}", out.display())))
        }
        Err(TryLockError::Error(error)) => Err(TrainError::io("lock", &mark)(error).into()),
    }
}

fn state(folder: &Path) -> State {
    let Ok(run) = Run::open(folder) else { return State::Open };
    match run.events().last() {
        Some(event) if event.kind == "failure" => State::Failed(first_clause(&event.text)),
        Some(event) if event.kind == "end" => {
            let last = |key: &str| run.metrics().get(key).and_then(|series| series.last());
            match last(RESULT).filter(|(step, _)| Some(*step) == run.metrics().last_step()) {
                Some((_, loss)) => {
                    State::Done(Outcome { loss, tokens_per_s: last("tokens_per_s").map(|(_, speed)| speed) })
                }
                // A run that resumes from its last step evaluates, but logs nothing.
                None => {
                    State::Failed("stopped in its last evaluation; remove its folder to repeat it".to_owned())
                }
            }
        }
        _ => State::Open,
    }
}

fn first_clause(text: &str) -> String {
    text.split([';', '\n']).next().unwrap_or_default().to_owned()
}

/// Returns the last error in the log of a run, after its first `start` bytes.
fn last_error(log: &Path, start: u64) -> Option<String> {
    let mut text = Vec::new();
    let mut file = File::open(log).ok()?;
    file.seek(SeekFrom::Start(start)).ok()?;
    file.read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    text.lines().rev().find_map(|line| line.strip_prefix("error: ")).map(first_clause)
}

#[derive(Debug, Serialize)]
struct SweepReport {
    /// Always [`RESULT`].
    result: &'static str,
    /// The combinations, the best first; those without a result last.
    rows: Vec<SweepRow>,
}

#[derive(Debug, Serialize)]
struct SweepRow {
    settings: Vec<(String, String)>,
    mean: Option<f64>,
    /// Standard deviation of the results; absent for a single run.
    spread: Option<f64>,
    tokens_per_s: Option<f64>,
    runs: Vec<SweepRun>,
}

#[derive(Debug, Serialize)]
struct SweepRun {
    folder: String,
    result: Option<f64>,
    failure: Option<String>,
}

impl SweepReport {
    fn new(grids: &[Grid], combinations: &[Vec<usize>], trials: &[Trial], states: &[State]) -> Self {
        let outcome = |state: &State| match state {
            State::Done(outcome) => Some(*outcome),
            _ => None,
        };
        let mut rows: Vec<_> = combinations
            .iter()
            .enumerate()
            .map(|(index, chosen)| {
                let own = || trials.iter().zip(states).filter(|(trial, _)| trial.combination == index);
                let done: Vec<_> = own().filter_map(|(_, state)| outcome(state)).collect();
                let results: Vec<_> = done.iter().map(|outcome| outcome.loss).collect();
                let speeds: Vec<_> = done.iter().filter_map(|outcome| outcome.tokens_per_s).collect();
                let settings = grids.iter().zip(chosen);
                SweepRow {
                    settings: settings
                        .map(|(grid, value)| (grid.key.clone(), grid.values[*value].clone()))
                        .collect(),
                    mean: mean(&results),
                    spread: spread(&results),
                    tokens_per_s: mean(&speeds),
                    runs: own()
                        .map(|(trial, state)| SweepRun {
                            folder: trial.folder.display().to_string(),
                            result: outcome(state).map(|outcome| outcome.loss),
                            failure: match state {
                                State::Failed(why) => Some(why.clone()),
                                _ => None,
                            },
                        })
                        .collect(),
                }
            })
            .collect();
        let rank = |row: &SweepRow| row.mean.filter(|mean| mean.is_finite()).unwrap_or(f64::INFINITY);
        rows.sort_by(|one, other| rank(one).total_cmp(&rank(other)));
        SweepReport { result: RESULT, rows }
    }

    fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    fn to_text(&self, grids: &[Grid]) -> String {
        let names: Vec<_> = grids.iter().map(|grid| short(&grid.key, grids)).collect();
        let widths: Vec<_> = names
            .iter()
            .zip(grids)
            .map(|(name, grid)| grid.values.iter().map(String::len).max().unwrap_or(0).max(name.len()))
            .collect();
        let cells = |values: &mut dyn Iterator<Item = &str>| {
            let cells: Vec<_> =
                values.zip(&widths).map(|(value, &width)| format!("{value:<width$}")).collect();
            cells.join("  ")
        };
        let mut text = format!(
            "  {}  {:>9}  {:>9}  {:>5}  {:>9}\n",
            cells(&mut names.iter().copied()),
            self.result,
            "spread",
            "runs",
            "tok/s"
        );
        let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.4}"));
        for row in &self.rows {
            let done = row.runs.iter().filter(|run| run.result.is_some()).count();
            let failed = row.runs.iter().filter(|run| run.failure.is_some()).count();
            let failed = if failed > 0 { format!("  {failed} failed") } else { String::new() };
            let _ = writeln!(
                text,
                "  {}  {:>9}  {:>9}  {:>5}  {:>9}{failed}",
                cells(&mut row.settings.iter().map(|(_, value)| value.as_str())),
                number(row.mean),
                number(row.spread),
                format!("{done}/{}", row.runs.len()),
                row.tokens_per_s.map_or("-".to_owned(), |speed| format!("{speed:.0}")),
            );
        }
        text
    }

    /// Returns the table as CSV, with a row for each run.
    fn to_csv(&self) -> String {
        let keys = self.rows.first().map_or(&[][..], |row| &row.settings);
        let mut csv = String::new();
        for (key, _) in keys {
            let _ = write!(csv, "{},", cell(key));
        }
        let _ = writeln!(csv, "run,{},failure", self.result);
        for (row, run) in self.rows.iter().flat_map(|row| row.runs.iter().map(move |run| (row, run))) {
            for (_, value) in &row.settings {
                let _ = write!(csv, "{},", cell(value));
            }
            let result = run.result.map_or_else(String::new, |result| result.to_string());
            let failure = run.failure.as_deref().unwrap_or_default();
            let _ = writeln!(csv, "{},{result},{}", cell(&run.folder), cell(failure));
        }
        csv
    }

    /// Returns the results over the grid at `axis`, a curve per combination of the others; `None` if not numbers.
    fn curves(&self, axis: usize) -> Option<Curves> {
        let key = &self.rows.first()?.settings.get(axis)?.0;
        let mut curves: Vec<Curve> = Vec::new();
        let mut values: Vec<f64> = Vec::new();
        for row in &self.rows {
            let value: f64 = row.settings[axis].1.replace('_', "").parse().ok()?;
            values.push(value);
            let others = row.settings.iter().enumerate().filter(|(index, _)| *index != axis);
            let name: Vec<_> = others.map(|(_, (key, value))| format!("{key} {value}")).collect();
            let name = name.join(", ");
            let Some(mean) = row.mean.filter(|mean| mean.is_finite()) else { continue };
            match curves.iter_mut().find(|curve| curve.name == name) {
                Some(curve) => curve.points.push((value, mean)),
                None => curves.push(Curve {
                    name,
                    series: curves.len(),
                    points: vec![(value, mean)],
                    is_faint: false,
                    has_marks: true,
                }),
            }
        }
        for curve in &mut curves {
            curve.points.sort_by(|one, other| one.0.total_cmp(&other.0));
        }
        Some(Curves {
            title: format!("{} by {key}", self.result),
            description: format!("The {} of the sweep's runs over {key}; lower is better.", self.result),
            x: if is_geometric(&values) { Axis::log(key) } else { Axis::linear(key) },
            y: Axis::linear(self.result),
            curves,
        })
    }

    /// Writes the comparison into `out`: `sweep.csv`, and a plot for each key whose values are numbers.
    fn write(&self, out: &Path) -> Result<()> {
        let write = |name: &str, text: &str| -> Result<()> {
            let path = out.join(name);
            Ok(write_atomic(&path, text.as_bytes()).map_err(TrainError::io("write", &path))?)
        };
        write("sweep.csv", &self.to_csv())?;
        let axes = self.rows.first().map_or(0, |row| row.settings.len());
        for axis in 0..axes {
            if let Some(curves) = self.curves(axis).filter(|curves| !curves.is_empty()) {
                let name = format!("sweep-{}", file_name(&self.rows[0].settings[axis].0));
                write(&format!("{name}.svg"), &curves.draw(640.0, 400.0).file(&name))?;
            }
        }
        Ok(())
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn spread(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|_| values.len() > 1)?;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt())
}

fn is_geometric(values: &[f64]) -> bool {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    least > 0.0 && most / least >= 4.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_split_outside_of_brackets_and_quotes() {
        let split = |values| split(values).expect("closed");
        assert_eq!(split("1e-3, 3e-3"), ["1e-3", "3e-3"]);
        assert_eq!(
            split("none,{ every = 2 },[1, 2],\"a,b\""),
            ["none", "{ every = 2 }", "[1, 2]", "\"a,b\""]
        );
        assert_eq!(split(""), [""]);
        assert_eq!([super::split("it's,ok"), super::split("[1,2")], [None, None]);
    }

    #[test]
    fn the_last_grid_varies_fastest() {
        let grid = |key: &str, values: &[&str]| Grid {
            key: key.to_owned(),
            values: values.iter().map(|value| (*value).to_owned()).collect(),
        };
        let grids = [grid("optim.lr", &["1", "2"]), grid("shard.strategy", &["a", "b"])];
        assert_eq!(combinations(&grids, NonZeroUsize::MIN).unwrap(), [[0, 0], [0, 1], [1, 0], [1, 1]]);
        assert_eq!(short("optim.lr", &grids), "lr");
        let same = [grid("a.x", &["1"]), grid("b.x", &["1"])];
        assert_eq!(short("a.x", &same), "a.x");
        let many: Vec<_> = (0..20).map(|index| grid(&format!("a.k{index}"), &["1", "2"])).collect();
        assert!(combinations(&many, NonZeroUsize::MIN).unwrap_err().to_string().contains("1048576 runs"));
    }

    #[test]
    fn means_and_spreads() {
        assert_eq!((mean(&[]), spread(&[1.0])), (None, None));
        assert_eq!((mean(&[1.0, 3.0]), spread(&[1.0, 3.0])), (Some(2.0), Some(2.0_f64.sqrt())));
        assert!(is_geometric(&[1e-3, 1e-2]) && !is_geometric(&[1.0, 2.0]) && !is_geometric(&[-1.0, 8.0]));
    }
}
