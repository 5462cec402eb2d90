//! Runs the binary `kiln-bench` as a user would.
//!
//! - `steps`: times of steps and kernels, and the alternating peer;
//! - `checkpoint`: saving and loading compared with a plain disk;
//! - `limits`: senseless numbers, too little memory, and no threads.

mod checkpoint;
mod limits;
#[path = "../../../train/kiln/tests/cli/messages.rs"]
#[allow(dead_code)] // Here exit codes show that commands fail, not messages.
mod messages;
#[path = "../../../train/kiln/tests/support/signals.rs"]
mod signals;
mod steps;
#[path = "../../../train/kiln/tests/cli/support.rs"]
#[allow(dead_code)] // Most of it is for commands that train.
mod support;

/// The binary under test.
const PROGRAM: &str = env!("CARGO_BIN_EXE_kiln-bench");
