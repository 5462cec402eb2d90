//! Runs the binary `kiln-bench` as a user would.
//!
//! - `steps`: times of steps and kernels, and the peer that takes turns;
//! - `checkpoint`: saving and loading beside a plain disk;
//! - `limits`: numbers that nobody means, too little memory, and no threads.

mod checkpoint;
mod limits;
#[path = "../../../train/tests/cli/messages.rs"]
#[allow(dead_code)] // That commands fail is told by their exit codes here.
mod messages;
#[path = "../../../train/tests/support/signals.rs"]
mod signals;
mod steps;
#[path = "../../../train/tests/cli/support.rs"]
#[allow(dead_code)] // Most of it is for commands that train.
mod support;

/// The binary that is run.
const PROGRAM: &str = env!("CARGO_BIN_EXE_kiln-bench");
