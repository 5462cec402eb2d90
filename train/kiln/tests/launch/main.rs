//! Starts `kiln launch` and `kiln doctor` as a user would. Most ranks are shell scripts, so that tests
//! control their actions and their end; nothing here links the trainer.

mod doctor;
mod environment;
mod failure;
mod logs;
mod node;
mod orphan;
mod recipes;
mod restart;
mod secret;
mod signal;
#[path = "../support/signals.rs"]
mod signals;
mod support;
mod usage;
