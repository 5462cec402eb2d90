//! Real processes that are really killed: the behaviour of a run when a rank fails at any place.
//!
//! The default tests show that processes train like threads, and cover one fault of each kind. Every fault in
//! every part of a step: `cargo test --release -p kiln --test faults -- --ignored matrix`. Sixteen crashes of
//! each kind, and the files they leave: `… -- --ignored sixteen`. 200 random kills: `… -- --ignored soak`.
//! 100 kills while a checkpoint is written: `… -- --ignored kills`. Full and read-only disks (needs mount
//! namespaces): `… -- --ignored disk`. Two machines made of network namespaces (needs root and iproute2):
//! `… -- --ignored netns`. 256 ranks on one machine: `… -- --ignored many`. None of it links burn.

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
