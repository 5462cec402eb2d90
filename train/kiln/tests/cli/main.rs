//! Runs the binary `kiln` as a user would, and the library as a program would.
//!
//! - `support`: a working directory with tiny data and a tiny model;
//! - `resume`, `checkpoints`: the files of a run, and resuming from them; `inspect`: inspection and
//!   conversion;
//! - `run_folder`: ownership of a folder, and the fate of earlier files; `restarts`: jobs that are restarted;
//! - `fine_tuning`: the parts of the base model that a run keeps;
//! - `hugging_face`: models in the layout of Hugging Face, in and out; `hub`: downloads of them;
//! - `bad_config`, `bad_data`, `bad_checkpoint`, `bad_command`, `bad_hugging_face`: every mistake is refused
//!   with a message that includes the fix, and leaves nothing behind; the messages are in `snapshots/`;
//! - `check`, `check_processes`: every planted fault is found and named before a run starts;
//! - `limits`: absurd numbers, and no threads; `words`: the texts of commands, and their streams;
//! - `device`: the CPU or a GPU, and the messages if it is missing;
//! - `gpu`: commands on a GPU compared with the CPU (feature `wgpu`);
//! - `kernel_check`: the check of the kernels of a GPU (feature `wgpu`);
//! - `captured`: operations on CUDA, for their kernels; `trace`: whole runs, for the order of calls to the
//!   driver;
//! - `interface`, `order`, `prepare`, `generate`, `chat`, `bench`, `tune`: commands, files, and their guarantees;
//! - `data_verify`: prepared data that was changed; `text_in`: messages about inputs, and leftovers of a
//!   killed prepare;
//! - `config_command`: every key of a configuration, for users and editors;
//! - `eval`: losses and logits of a model, compared with each other and across ranks and strategies;
//! - `reference`: a run that has the losses of the same run in PyTorch;
//! - `preemption`, `nonfinite`: runs that are asked to stop, and steps that go wrong;
//! - `hostile`: files from untrusted sources; `unfinished`: starts that failed early, and nearly empty
//!   folders;
//! - `lost_folder`: run folders that are moved, replaced or removed during a run;
//! - `own_tokenizer`: models, and data of other tokenizers;
//! - `diff`: planted mistakes that `kiln diff` and `kiln bisect` find, and equal runs;
//! - `drills`: deliberate failures, and the flight recorders they leave;
//! - `origin`: checkpoints of parts and optimizers that a program does not have;
//! - `memory`: the planned memory of a run, compared with its use and with the available memory;
//! - `plan`, `published`: predictions of memory, traffic and time, also for published runs;
//! - `processes`: runs in which each rank knows only its own arguments;
//! - `presets`, `debug`: the configurations of this repository;
//! - `samples`: texts, losses of answers and events during a run;
//! - `smoke`: a shrunk run that tries everything, and views of prepared data;
//! - `shapes`: models with the shapes of Llama and Qwen;
//! - `status`: the status of runs that train, hang, lag or have ended;
//! - `screen`: the output of a run on a terminal and in a log;
//! - `surroundings`: a program that calls the library without setting up its process;
//! - `cached_layers`: custom layers with a state or a latent in the cache of `generate`;
//! - `extension`: a layer defined outside the crates, trained under every strategy.

mod adapters;
mod bad_checkpoint;
mod bad_command;
mod bad_config;
mod bad_data;
mod bad_hugging_face;
mod bench;
mod cached_layers;
#[cfg(feature = "cuda")]
mod captured;
mod chat;
mod check;
mod check_processes;
mod checkpoints;
mod config_command;
mod data_verify;
mod debug;
mod device;
mod diff;
mod drills;
mod eval;
mod experts;
mod extension;
mod fine_tuning;
mod generate;
#[cfg(feature = "wgpu")]
mod gpu;
mod hostile;
#[cfg(feature = "hub")]
mod hub;
mod hugging_face;
mod inspect;
mod interface;
#[cfg(feature = "wgpu")]
mod kernel_check;
#[cfg(feature = "cuda")]
mod launches_trace;
mod limits;
mod lora;
mod lost_folder;
mod memory;
mod messages;
mod nonfinite;
mod order;
mod origin;
mod own_attention;
mod own_command;
mod own_layer;
mod own_loop;
mod own_loss;
mod own_metric;
mod own_objective;
mod own_optimizer;
mod own_tokenizer;
mod own_trainer;
mod plan;
mod ports;
mod preemption;
mod prepare;
mod presets;
mod processes;
mod published;
mod reference;
mod report;
mod restarts;
mod resume;
mod run_folder;
mod samples;
mod screen;
mod shapes;
#[path = "../support/signals.rs"]
mod signals;
mod smoke;
mod status;
mod support;
mod surroundings;
mod sweep;
#[path = "../support/terminal.rs"]
mod terminal;
mod text_in;
mod timeline;
#[cfg(feature = "cuda")]
mod trace;
mod tune;
mod unfinished;
#[cfg(feature = "cuda")]
mod warmup_trace;
mod words;

/// The binary under test.
const PROGRAM: &str = env!("CARGO_BIN_EXE_kiln");
