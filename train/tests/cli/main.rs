//! Runs the binary `kiln` as a user would, and the library as a program would.
//!
//! - `support`: a working directory with tiny data and a tiny model;
//! - `resume`, `checkpoints`: what a run leaves, and going on from it; `inspect`: looking at it, and
//!   converting it;
//! - `run_folder`: whose a folder is, and what becomes of what was there; `restarts`: jobs that are
//!   started again;
//! - `fine_tuning`: what a run keeps of the model that it starts from;
//! - `hugging_face`: models in the layout of Hugging Face, in and out; `hub`: downloads of them;
//! - `bad_config`, `bad_data`, `bad_checkpoint`, `bad_command`, `bad_hugging_face`: every mistake is
//!   refused with a message that says what to do, and leaves nothing behind; the messages are in
//!   `snapshots/`;
//! - `check`, `check_processes`: every planted fault is found and named before a run starts;
//! - `limits`: numbers that nobody means, and no threads; `words`: what commands say, and to whom;
//! - `device`: the CPU or a GPU, and what is said where there is none;
//! - `gpu`: commands on a GPU beside the same on the CPU (feature `wgpu`);
//! - `kernel_check`: the check of the kernels of a GPU (feature `wgpu`);
//! - `captured`: operations on CUDA, for their kernels; `trace`: whole runs, for what goes to the driver in
//!   which order;
//! - `interface`, `order`, `prepare`, `generate`, `bench`, `tune`: commands, files, and what they promise;
//! - `data_verify`: prepared data that has changed since; `text_in`: what is said of inputs, and what a
//!   killed prepare leaves;
//! - `config_command`: every key of a configuration, as people and editors see it;
//! - `eval`: losses and logits of a model, against each other and over ranks and strategies;
//! - `reference`: a run that has the losses of the same run in PyTorch;
//! - `preemption`, `nonfinite`: runs that are asked to stop, and steps that go wrong;
//! - `hostile`: files that somebody else has made; `unfinished`: starts that came to nothing, and folders
//!   that are not quite empty;
//! - `lost_folder`: run folders that are moved, replaced or removed under a run;
//! - `own_tokenizer`: models, and data of other tokenizers;
//! - `diff`: planted mistakes that `kiln diff` and `kiln bisect` find, and runs that are the same;
//! - `drills`: failures on purpose, and the flight recorders they leave;
//! - `origin`: checkpoints of parts and optimizers that a program does not have;
//! - `memory`: the least memory of a run, against what it takes and what there is;
//! - `plan`, `published`: what a run will hold, send and take; the same of runs that others have published;
//! - `processes`: runs of which each rank knows its own arguments only;
//! - `presets`, `debug`: the configurations of this repository;
//! - `samples`: texts, losses of answers and events on the way of a run;
//! - `smoke`: a run that tries everything, shrunk, and what prepared data look like;
//! - `shapes`: models with the shapes of Llama and Qwen;
//! - `status`: looks into runs that go on, hang, lag or have ended;
//! - `screen`: what a person sees of a run at a terminal, and what a log has instead;
//! - `surroundings`: a program that calls the library without setting up its process;
//! - `extension`: a layer that these crates do not know, trained under every strategy.

mod bad_checkpoint;
mod bad_command;
mod bad_config;
mod bad_data;
mod bad_hugging_face;
mod bench;
#[cfg(feature = "cuda")]
mod captured;
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
mod lost_folder;
mod memory;
mod messages;
mod nonfinite;
mod order;
mod origin;
mod own_attention;
mod own_layer;
mod own_loop;
mod own_loss;
mod own_metric;
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

/// The binary that is run.
const PROGRAM: &str = env!("CARGO_BIN_EXE_kiln");
