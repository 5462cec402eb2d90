//! Real processes, really killed: what a run does when a rank fails, wherever it is.
//!
//! The everyday run shows that processes train as threads do, and one fault of each sort. All of
//! them, in every part of a step: `cargo test --release -p kiln --test faults -- --ignored matrix`.
//! Sixteen crashes of each kind, and what they leave: `… -- --ignored sixteen`. 200 random kills:
//! `… -- --ignored soak`. 100 kills while a checkpoint is written: `… -- --ignored kills`. Full and
//! read-only disks (mount namespaces needed): `… -- --ignored disk`. Two machines, made of network
//! namespaces (root and iproute2 needed): `… -- --ignored netns`. 256 ranks on one machine:
//! `… -- --ignored many`. None of it links burn.

mod crash;
mod crash_folder;
mod held;
mod kills;
mod log;
mod many;
mod matrix;
mod netns;
mod output;
mod parity;
mod preemption;
mod replay;
mod restart;
mod saving;
#[path = "../support/signals.rs"]
mod signals;
mod soak;
mod support;
#[path = "../support/terminal.rs"]
mod terminal;
mod watched;
