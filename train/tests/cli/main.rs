//! Runs the binary `kiln` as a user would, and the library as a program would.
//!
//! - `support`: a working directory with tiny data and a tiny model;
//! - `resume`, `checkpoints`: what a run leaves, and going on from it;
//! - `bad_config`, `bad_data`, `bad_checkpoint`, `bad_command`: every mistake is refused with a
//!   message that says what to do, and leaves nothing behind; the messages are in `snapshots/`;
//! - `interface`, `order`, `prepare`, `generate`, `bench`: commands, files, and what they promise;
//! - `preemption`, `nonfinite`: runs that are asked to stop, and steps that go wrong;
//! - `drills`: failures on purpose, and the flight recorders they leave;
//! - `processes`: runs of which each rank knows its own arguments only;
//! - `presets`, `debug`: the configurations of this repository;
//! - `extension`: a layer that these crates do not know, trained under every strategy.

mod bad_checkpoint;
mod bad_command;
mod bad_config;
mod bad_data;
mod bench;
mod checkpoints;
mod debug;
mod drills;
mod extension;
mod generate;
mod interface;
mod messages;
mod nonfinite;
mod order;
mod preemption;
mod prepare;
mod presets;
mod processes;
mod resume;
mod support;
